"""The records that stand for the rows of a table.

A record stands for a row if it is finished, read the row's corpus and has the row's recipe. A recipe is what two runs
that differ in seed and corpus share, see :mod:`attnlab.run.identity`. Names of options do not count.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from omegaconf import DictConfig

from attnlab.callbacks.speedup import PROTOCOL
from attnlab.config.build import leaves
from attnlab.config.check import check
from attnlab.config.rules import OF_THE_MODEL
from attnlab.report.spec import Row, Spec
from attnlab.run.identity import architecture, canonical
from attnlab.run.record import EMBEDDED, corpus_of
from attnlab.run.store import SavedRecord

PLACES = ("task.encoder_checkpoint", "task.data.vocabulary.file")  # files of the machine that measures a row


def scored(records: Sequence[SavedRecord], spec: Spec) -> tuple[list[SavedRecord], list[SavedRecord]]:
    """The finished records of a specification's modes, and those of them that read its corpus."""
    every = [saved for saved in records if saved.record["status"] == "finished" and saved.record["mode"] in spec.modes]
    return every, [saved for saved in every if is_corpus(saved.record["corpus"], spec.corpus)]


def is_corpus(text: str, wanted: Mapping[str, Any]) -> bool:
    """Whether a record's `corpus` has the `name`, and as many training sentences or test questions as `train` says."""
    sizes = re.findall(r"\btrain (\d+)|\b(\d+) test questions", text)
    if not wanted or not sizes or not text.startswith(wanted["name"]):
        return False
    least, most = wanted["train"]
    trained, asked = sizes[-1]  # the corpus' path stands before its sizes, and may look like one
    return least <= int(trained or asked) <= most


def is_of(saved: SavedRecord, spec: Spec) -> bool:
    """Whether a record read the corpus of a specification or of its rows; True if these name no corpus."""
    rows = [{"name": row.corpus, "train": row.train} for row in spec.rows if row.corpus and row.train]
    corpora = [spec.corpus] * bool(spec.corpus) + rows
    return not corpora or any(is_corpus(saved.record["corpus"], corpus) for corpus in corpora)


def choose(row: Row, records: Sequence[SavedRecord], spec: Spec) -> list[SavedRecord]:
    """The newest record of each seed with a row's recipe and a score; `records`: the oldest first."""
    if not row.command or not spec.quality:
        return []
    read = [f for f in records if f.record["corpus"].startswith(row.corpus) and f.number(spec.quality) is not None]
    same = [saved for saved in read if is_recipe(saved, spec.overrides(row), row.start)]
    return list({saved.record["seed"]: saved for saved in same}.values())


@cache
def composed(*overrides: str) -> DictConfig:
    """The configuration of a command line, cached for other tables with the row. A pretrained decoder is not read."""
    return check(overrides, read_models=False).jobs[0]


@cache
def _recipe(*overrides: str) -> dict[str, Any]:
    """The recipe of a command line, by dotted keys."""
    return dict(leaves(canonical(composed(*overrides))))


def is_recipe(saved: SavedRecord, overrides: Sequence[str], start: str = "") -> bool:
    """Whether a record has the recipe of a command line.

    A record of mode=test with a checkpoint does not count: it does not say how that was trained. `start`: the overrides
    of the run with the compressed model from which the command line starts.
    """
    tested, compression = saved.record["mode"] == "test", saved.record.get("compression", {})
    compressed = architecture(composed(*shlex.split(start)))["compression"] if start else None
    if compression.get("start") != compressed or tested != (composed(*overrides).mode == "test"):
        return False
    if tested and saved.record["config"].get("checkpoint") is not None:
        return False
    recipe, expected = dict(leaves(saved.canonical)), _recipe(*overrides)
    keys = recipe.keys() | expected.keys()
    ignored = {key for key in PLACES if None not in (recipe.get(key), expected.get(key))}
    named = [word.replace("${seed}", str(saved.record["seed"])) for word in overrides if "${seed}" in word]
    if start or f"model={saved.record['config'].get('model')}" in named:  # another folder for each seed
        ignored.add("task.model.weights")
    if "task.weights" in expected:  # what a run has read from its model
        ignored |= {key for key in keys if f"{key}.".startswith(tuple(f"{node}." for node in OF_THE_MODEL))}
    return all(recipe.get(key, "unset") == expected.get(key, "unset") for key in keys - ignored)


def statistics(row: Row, records: Sequence[SavedRecord]) -> Mapping[str, float]:
    """The numbers of a row's split in the newest record of mode=statistics of its corpus; empty without such a one."""
    for saved in reversed(records):
        splits, text = saved.record.get("statistics", {}), saved.record["corpus"]
        if saved.record["status"] != "finished" or row.split not in splits:
            continue
        if corpus_of(saved.record).startswith(EMBEDDED):
            sizes = ", ".join(f"{name} {values['utterances']}" for name, values in splits.items())
            text = f"sample of {saved.record['task']}: {sizes}"
        if is_corpus(text, {"name": row.corpus, "train": row.train}):
            return dict(splits[row.split])
    return {}


def protocol(saved: SavedRecord) -> list[Any]:
    """The values that two records must share before their times or memory are compared."""
    plain = dict(leaves(saved.record))
    return [plain.get("identity.corpus" if key == "corpus" else key) for key in PROTOCOL]

"""Which records stand for the rows of a table.

A record stands for a row if it is finished, read the row's corpus and has the row's recipe (see
:mod:`attnlab.run.identity`), whatever its options were called. Where there is none, those of the row's task, mechanism
and scale do, marked with what they differ in. Neither another model, nor the embedded sample corpus or any other, ever
stands for a paper's.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf

from attnlab.config.build import PATTERN, leaves, written
from attnlab.config.check import check
from attnlab.config.rules import OF_THE_MODEL
from attnlab.report.spec import Row, Spec
from attnlab.run.identity import architecture, canonical
from attnlab.run.speedup import PROTOCOL
from attnlab.run.store import SavedRecord

MODEL = {"task.model.name", "task.weights"}  # which pretrained model a run starts from
PLACES = {  # a row's command names files that only exist where the row is measured
    "task.encoder_checkpoint": "the encoder did not start from recognition",
    "task.data.vocabulary.file": "the vocabulary was not read from a file",
}


def scored(records: Sequence[SavedRecord], spec: Spec) -> tuple[list[SavedRecord], list[SavedRecord]]:
    """The finished records of the specification's modes, and those among them that read its corpus."""
    every = [saved for saved in records if saved.record["status"] == "finished" and saved.record["mode"] in spec.modes]
    return every, [saved for saved in every if is_corpus(saved.record["corpus"], spec.corpus)]


def is_corpus(text: str, wanted: Mapping[str, Any]) -> bool:
    """Whether a record's `corpus` has the `name`, and its training sentences or test questions lie in `train`."""
    sizes = re.findall(r"\btrain (\d+)|\b(\d+) test questions", text)
    if not wanted or not sizes or not text.startswith(wanted["name"]):
        return False
    least, most = wanted["train"]
    trained, asked = sizes[-1]  # the corpus' path stands before its sizes, and may look like one
    return least <= int(trained or asked) <= most


def is_of(saved: SavedRecord, spec: Spec) -> bool:
    """Whether a record read the corpus of a specification, or of one of its rows; one that names none takes all."""
    rows = [{"name": row.corpus, "train": row.train} for row in spec.rows if row.corpus and row.train]
    corpora = [spec.corpus] * bool(spec.corpus) + rows
    return not corpora or any(is_corpus(saved.record["corpus"], corpus) for corpus in corpora)


def choose(row: Row, records: Sequence[SavedRecord], spec: Spec) -> list[tuple[SavedRecord, list[str]]]:
    """The newest record of each seed with what it differs in; only those of the row's recipe, if there are any.

    The records are scored, read the specification's corpus, and the oldest is first. Another pretrained model never
    stands for a row, nor does a trained one for a row with mode=test.
    """
    if not records or not row.command or not spec.quality:
        return []
    overrides = spec.overrides(row)
    cfg = composed(*overrides)
    keys = {"task": cfg.task.name, "compress": cfg.choices.compress, "scale": cfg.choices.scale}
    keys |= {"stride": cfg.stride, "rank": cfg.rank}
    if cfg.task.get("weights") is None:  # else the attention is the model's
        keys["attention"] = cfg.choices.attention or "none"
    records = [f for f in records if f.record["corpus"].startswith(row.corpus) and _is_model(f, row, overrides)]
    if cfg.mode == "test":
        records = [f for f in records if f.record["mode"] == "test" and f.record["config"].get("checkpoint") is None]
    pairs = [(f, differences(f, overrides, row.start)) for f in records if f.number(spec.quality) is not None]
    exact = [pair for pair in pairs if not pair[1]]
    alike = [pair for pair in pairs if all(pair[0].record.get(key) == value for key, value in keys.items())]
    pattern = written(OmegaConf.select(cfg, PATTERN))  # every stack of several mechanisms is called hybrid
    alike = [pair for pair in alike if (pair[0].record["config"].get("attention") or {}).get("pattern") == pattern]
    return list({pair[0].record["seed"]: pair for pair in exact or alike}.values())


def _is_model(saved: SavedRecord, row: Row, overrides: Sequence[str]) -> bool:
    """Whether a record starts from the pretrained model of a row, or from the compressed one of its `start`."""
    untouched = composed(*overrides).mode == "test"
    keys = MODEL | {"task.model.weights"} if untouched else MODEL  # a local copy of the weights has another name
    start = architecture(composed(*shlex.split(row.start)))["compression"] if row.start else None
    if saved.record.get("compression", {}).get("start") != start:
        return False
    recipe, expected = dict(leaves(saved.canonical)), _recipe(*overrides)
    return all(recipe.get(key) == expected.get(key) for key in keys)


@cache
def composed(*overrides: str) -> DictConfig:
    """The configuration of a command line. Cached, because every table of a report composes its rows again; read-only.

    Of a pretrained decoder only the name is known: its folder need not be here.
    """
    return check(overrides, read_models=False).jobs[0]


@cache
def _recipe(*overrides: str) -> dict[str, Any]:
    """The recipe of a command line, by dotted keys."""
    return dict(leaves(canonical(composed(*overrides))))


def differences(saved: SavedRecord, overrides: Sequence[str], start: str = "") -> list[str]:
    """In what the recipe of a record differs from that of a command line; `start`: the overrides of a run before it."""
    recipe, expected = dict(leaves(saved.canonical)), dict(_recipe(*overrides))
    ignored = ["task.model.weights"] if start else []
    if "task.weights" in expected:  # what a run has read from its model
        parts = tuple(f"{node}." for node in OF_THE_MODEL)
        ignored += [key for key in recipe | expected if f"{key}.".startswith(parts)]
    wrong = []
    for key, without in PLACES.items():
        if expected.get(key) is not None:
            wrong += [without] if recipe.get(key) is None else []
            ignored.append(key)
    wrong += [
        f"{key}={recipe.get(key, 'unset')} instead of {expected.get(key, 'unset')}"
        for key in sorted((recipe.keys() | expected.keys()) - set(ignored))
        if recipe.get(key, "unset") != expected.get(key, "unset")
    ]
    tested = saved.record["mode"] == "test"
    if tested and saved.record["config"].get("checkpoint") is not None:
        wrong.append("scored with mode=test: how the checkpoint was trained is not in this record")
    elif tested != ((mode := composed(*overrides).mode) == "test"):
        wrong.append(f"mode={saved.record['mode']} instead of {mode}")
    return wrong


def statistics(row: Row, records: Sequence[SavedRecord]) -> Mapping[str, float]:
    """What the newest record of mode=statistics says of the split of a row; empty where none has read its corpus."""
    for saved in reversed(records):
        splits, text = saved.record.get("statistics", {}), saved.record["corpus"]
        if saved.record["status"] != "finished" or row.split not in splits:
            continue
        if text == "sample":
            sizes = ", ".join(f"{name} {values['utterances']}" for name, values in splits.items())
            text = f"sample of {saved.record['task']}: {sizes}"
        if is_corpus(text, {"name": row.corpus, "train": row.train}):
            return dict(splits[row.split])
    return {}


def protocol(saved: SavedRecord) -> list[Any]:
    """What two records must share before their times or memory are compared."""
    plain = dict(leaves(saved.record))
    return [plain.get("identity.corpus" if key == "corpus" else key) for key in PROTOCOL]

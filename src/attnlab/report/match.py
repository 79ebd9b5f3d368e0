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

from attnlab.config.build import leaves, written
from attnlab.config.check import check
from attnlab.config.model import OF_THE_MODEL, pretrained_decoder
from attnlab.config.stack import PATTERN
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
    """Finished records that have a score; those among them that read the specification's corpus.

    Args:
        records: of any task and status.
        spec: the table; it names modes and corpus.
    """
    found = [f for f in records if f.record["status"] == "finished" and f.record["mode"] in spec.modes]
    return found, [f for f in found if is_corpus(f.record["corpus"], spec.corpus)]


def is_corpus(text: str, wanted: Mapping[str, Any]) -> bool:
    """Whether a record's `corpus` is the one that a specification names: its name, and its size within the bounds.

    Args:
        text: the record's `corpus`.
        wanted: the specification's: `name`, and `train`, the least and the largest number of training sentences (or
            test questions).
    """
    sizes = re.findall(r"\btrain (\d+)|\b(\d+) test questions", text)
    if not wanted or not sizes:
        return False
    least, most = wanted["train"]
    trained, asked = sizes[-1]  # the corpus' path stands before its sizes, and may look like one
    return bool(text.startswith(wanted["name"])) and least <= int(trained or asked) <= most


def is_of(found: SavedRecord, spec: Spec) -> bool:
    """Whether a record read the corpus of a specification, or of one of its rows; one that names none takes all.

    Args:
        found: the record.
        spec: the table.
    """
    rows = [{"name": row.corpus, "train": row.train} for row in spec.rows if row.corpus and row.train]
    wanted = [spec.corpus] * bool(spec.corpus) + rows
    return not wanted or any(is_corpus(found.record["corpus"], one) for one in wanted)


def choose(row: Row, records: Sequence[SavedRecord], spec: Spec) -> list[tuple[SavedRecord, list[str]]]:
    """The newest record of each seed with what it differs in; only those of the row's recipe, if there are any.

    Another pretrained model never stands for a row, nor does a trained one for a row with mode=test.

    Args:
        row: the row; one without a command has no records.
        records: scored records that read the specification's corpus, the oldest first.
        spec: the row's table.
    """
    if not records or not row.command or not spec.quality:
        return []
    overrides = spec.overrides(row)
    cfg = composed(*overrides)
    keys = {"task": cfg.task.name, "compress": cfg.choices.compress, "scale": cfg.choices.scale}
    keys |= {"stride": cfg.stride, "rank": cfg.rank}
    if cfg.task.get("weights") is None:  # else the attention is the model's
        keys["attention"] = cfg.choices.attention or "none"
    mine = [f for f in records if f.record["corpus"].startswith(row.corpus) and _is_model(f, row, overrides)]
    if cfg.mode == "test":
        mine = [f for f in mine if f.record["mode"] == "test" and f.record["config"].get("checkpoint") is None]
    found = [(f, differences(f, overrides, row.start)) for f in mine if f.number(spec.quality) is not None]
    exact = [pair for pair in found if not pair[1]]
    alike = [pair for pair in found if all(pair[0].record.get(key) == value for key, value in keys.items())]
    pattern = written(OmegaConf.select(cfg, PATTERN))  # every stack of several mechanisms is called hybrid
    alike = [pair for pair in alike if (pair[0].record["config"].get("attention") or {}).get("pattern") == pattern]
    return list({pair[0].record["seed"]: pair for pair in exact or alike}.values())


def _is_model(found: SavedRecord, row: Row, overrides: Sequence[str]) -> bool:
    """Whether a record starts from the pretrained model of a row, or from the compressed one of its `start`."""
    untouched = composed(*overrides).mode == "test"
    keys = MODEL | {"task.model.weights"} if untouched else MODEL  # a local copy of the weights has another name
    start = architecture(composed(*shlex.split(row.start)))["compression"] if row.start else None
    if found.record.get("compression", {}).get("start") != start:
        return False
    mine, theirs = dict(leaves(found.canonical)), _recipe(*overrides)
    return all(mine.get(key) == theirs.get(key) for key in keys)


@cache
def composed(*overrides: str) -> DictConfig:
    """The configuration of a command line. Cached, because every table of a report composes its rows again; read-only.

    Of a pretrained decoder only the name is known: its folder need not be here.

    Args:
        overrides: its settings.
    """
    return check(overrides, complete=pretrained_decoder).jobs[0]


@cache
def _recipe(*overrides: str) -> dict[str, Any]:
    """The recipe of a command line, by dotted keys."""
    return dict(leaves(canonical(composed(*overrides))))


def differences(found: SavedRecord, overrides: Sequence[str], start: str = "") -> list[str]:
    """In what the recipe of a record differs from that of a command line; one text for each key.

    Args:
        found: the record.
        overrides: of the row's command.
        start: the overrides of the run whose compressed model the row starts from; empty: it starts from none.
    """
    if not found.canonical:
        return ["no configuration is known of this old record: its recipe is unknown"]
    mine, theirs = dict(leaves(found.canonical)), dict(_recipe(*overrides))
    if "task.weights" in theirs:  # what a run has read from its model
        parts = tuple(f"{node}." for node in OF_THE_MODEL)
        for leaves_of in (mine, theirs):
            for key in [key for key in leaves_of if f"{key}.".startswith(parts)]:
                del leaves_of[key]
    wrong = []
    if start:
        mine.pop("task.model.weights", None)
        theirs.pop("task.model.weights", None)
    for key, without in PLACES.items():
        if theirs.get(key) is not None:
            theirs.pop(key)
            if mine.pop(key, None) is None:
                wrong.append(without)
    wrong += [
        f"{key}={mine.get(key, 'unset')} instead of {theirs.get(key, 'unset')}"
        for key in sorted(mine.keys() | theirs.keys())
        if mine.get(key, "unset") != theirs.get(key, "unset")
    ]
    tested = found.record["mode"] == "test"
    if tested and found.record["config"].get("checkpoint") is not None:
        wrong.append("scored with mode=test: how the checkpoint was trained is not in this record")
    elif tested != ((mode := composed(*overrides).mode) == "test"):
        wrong.append(f"mode={found.record['mode']} instead of {mode}")
    return wrong


def statistics(row: Row, records: Sequence[SavedRecord]) -> Mapping[str, float]:
    """What the newest record of mode=statistics says of the split of a row; empty where none has read its corpus.

    Args:
        row: with `corpus`, `split` and `train`.
        records: every record there is, the oldest first.
    """
    for found in reversed(records):
        splits, text = found.record.get("statistics", {}), found.record["corpus"]
        if found.record["status"] != "finished" or row.split not in splits:
            continue
        if text == "sample":
            sizes = ", ".join(f"{name} {values['utterances']}" for name, values in splits.items())
            text = f"sample of {found.record['task']}: {sizes}"
        if is_corpus(text, {"name": row.corpus, "train": row.train}):
            return dict(splits[row.split])
    return {}


def protocol(found: SavedRecord) -> list[Any]:
    """What two records must share before their times or memory are compared.

    Args:
        found: the record.
    """
    plain = dict(leaves(found.record))
    return [plain.get("identity.corpus" if key == "corpus" else key) for key in PROTOCOL]

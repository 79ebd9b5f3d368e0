"""Every specification, filled with records that hold its published numbers, shows these numbers.

A record is made from its row's own command, as a run makes it. A cell whose published number follows from nothing is
named by its row (`differs`) and explained by a note.
"""

import copy
import dataclasses
import re
from collections.abc import Mapping
from math import log
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from attnlab.config.build import CONF, instantiate
from attnlab.data.questions import question_set
from attnlab.data.recall.data import NAMES
from attnlab.report.command import specifications
from attnlab.report.match import choose, composed, is_corpus
from attnlab.report.render import table
from attnlab.report.spec import Column, Row, Spec, read_spec
from attnlab.run import record as records
from attnlab.run.identity import architecture
from attnlab.run.store import SavedRecord
from tests.report.conftest import finished

EXPERIMENTS = CONF.parent / "experiments"
PATHS = [
    path
    for path in specifications(EXPERIMENTS)
    if read_spec(path).picture != "context" and any(row.published for row in read_spec(path).rows)
]
UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9}
QUICK = {"irratt/table3", "mtla/table6", "tensorized/table2", "tensorllm/table2"}  # with every kind of column
ANY = 1.0  # where nothing was published


def number(text: str) -> tuple[float, float] | None:
    """The first number of a cell, and half a unit of its last digit; None: it has none."""
    match = re.match(r"([-+]?[\d,]*\.?\d+(?:e-?\d+)?)([KMB]?)", text)
    if match is None:
        return None
    mantissa, _, exponent = match[1].replace(",", "").partition("e")
    scale = UNITS[match[2]] * 10 ** int(exponent or 0)
    return float(mantissa) * scale, 0.5 * scale * 10 ** -len(mantissa.partition(".")[2])


def same(published: str, shown: str) -> bool:
    """Whether two cells agree in the digits that both have."""
    measured, printed = number(shown), number(published)
    if measured is None or printed is None:
        return published.lower() == shown.lower()
    return abs(measured[0] - printed[0]) <= max(measured[1], printed[1]) * (1 + 1e-9)


def corpus_of(cfg: DictConfig, spec: Spec, row: Row) -> str:
    """The corpus text of a run, with the size that the specification expects."""
    size = (row.train or spec.corpus["train"])[0]
    kind = cfg.task.kind._target_.rpartition(".")[2]
    place = "/data/some folder"
    data = cfg.task.data
    if kind == "ImageClassificationTask":
        return f"some folder at {place}: train {size}, val 50000 images, 1000 classes"
    if kind == "ReasoningTask":
        return f"{question_set(data.questions).title} in {place}: 100 validation and {size} test questions"
    if kind == "RecallTask":
        return (
            f"{NAMES[data.problem]}, generated, version 1: train {size}, validation 1, test 1 sequences; vocabulary 9"
        )
    if kind == "LanguageModellingTask":
        return f"{instantiate(data.corpus).name} at {place}: train {size}, validation 1, test 1 pieces; vocabulary 9"
    if cfg.data_root is None:
        return "sample"
    reader = instantiate(data.reader)
    sizes = ", ".join(f"{name} {size if i == 0 else 9}" for i, name in enumerate(reader.splits))
    return f"{reader.name} at {place}: {sizes} {reader.unit}"


def set_number(record: dict[str, Any], dotted: str, value: float) -> None:
    *path, last = dotted.split(".")
    for part in path:
        record = record.setdefault(part, {})
    record[last] = value


def numbers(spec: Spec, row: Row, base: Mapping[str, float]) -> dict[str, float]:
    """The numbers in the record of a row, by dotted key. `base`: the same for the row with which it is compared."""
    values: dict[str, float] = {}
    printed = {key: read[0] for key, text in row.published.items() if (read := number(text))}
    for column in spec.columns:
        if column.value and column.key in printed:
            value = printed[column.key] / column.factor
            values[column.value] = log(value) if column.exp else value
    for column in spec.columns:
        rest = [key for key in (*column.mean, column.ratio, column.against) if key and key not in values]
        if column.key in printed and rest:
            value = printed[column.key]
            if column.mean:
                value /= column.factor
            elif column.ratio:
                value = base[column.ratio] / value
            else:
                value += base[column.against]
            values |= dict.fromkeys(rest, value)
    keys = {key for c in spec.columns for key in (c.value, *c.mean, c.ratio, c.against) if key}
    return dict.fromkeys(keys, ANY) | values


def fill(record: dict[str, Any], spec: Spec, row: Row, base: Mapping[str, float]) -> dict[str, float]:
    filled = numbers(spec, row, base)
    for key, value in filled.items():
        set_number(record, key, value)
    if row.split:
        values = record.setdefault("statistics", {}).setdefault(row.split, {"utterances": row.train[0]})
        printed = {column.statistic: number(row.published.get(column.key, "")) for column in spec.columns}
        values |= {key: value[0] for key, value in printed.items() if value}
    return filled


def synthetic(spec: Spec, row: Row) -> dict[str, Any]:
    """The finished record of a row's command, without numbers."""
    cfg = composed(*spec.overrides(row))
    record = finished(cfg, spec.overrides(row))
    record["mode"] = "statistics" if row.split else cfg.mode if cfg.mode in spec.modes else spec.modes[0]
    record["corpus"] = corpus_of(cfg, spec, row) if spec.corpus or row.train else records.NOT_RUN
    if record["mode"] == "evaluate":
        tasks = ", ".join(cfg.task.evaluation.tasks)
        record["corpus"] = f"lm-evaluation-harness: {tasks}; trained on {record['corpus']}"
    if row.start:
        record["compression"] = {"start": architecture(composed(*row.start.split()))["compression"]}
        record["identity"]["weights"]["task.model.weights"] = "sha256:0"
    return record


def fillings(spec: Spec) -> list[dict[str, Row]]:
    """Rows by label, in as many groups as are needed for each record to hold the numbers of one row or split."""
    groups: list[dict[tuple[str, str], Row]] = []
    for row in spec.rows:
        key = (row.command, row.split)
        if row.command:
            group = next((group for group in groups if key not in group), None)
            if group is None:
                groups.append(group := {})
            group[key] = row
    return [{row.label: row for row in group.values()} for group in groups]


def shown(spec: Spec, column: Column, cells: list[str]) -> str:
    """Our cell of a column."""
    at = 1 + len(spec.facts)
    for other in spec.columns:
        at += spec.published(other)
        if other is column:
            return cells[at]
        at += 1
    raise KeyError(column.key)


def base_of(row: Row, spec: Spec) -> str:
    """The label of another row to which a row is compared; empty: none."""
    label = row.baseline or spec.baseline
    return "" if label == row.label else label


EACH = [
    path if f"{path.parent.name}/{path.stem}" in QUICK else pytest.param(path, marks=pytest.mark.slow) for path in PATHS
]


@pytest.mark.parametrize("path", EACH, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_table_shows_what_was_published(path: Path) -> None:
    check(read_spec(path))


def check(spec: Spec) -> None:
    rows = {row.label: row for row in spec.rows}
    made = {row.command: synthetic(spec, row) for row in rows.values() if row.command}
    saved = [SavedRecord(Path(f"/runs/{i}/record.json"), record) for i, record in enumerate(made.values())]
    wrong: set[tuple[str, str]] = set()
    for group in fillings(spec):
        filled: dict[str, dict[str, float]] = {}
        for row in sorted(group.values(), key=lambda row: bool(base_of(row, spec))):
            filled[row.label] = fill(made[row.command], spec, row, filled.get(base_of(row, spec), {}))
        assert [records.problems(record.record) for record in saved] == [[]] * len(saved)
        grid = table(spec, saved)
        assert [note for note in grid.notes if re.match("Left out|not run", note)] == []
        for (label, row), cells in zip(rows.items(), grid.rows, strict=True):
            assert not {"not run", "protocols differ"} & set(cells), (label, cells)
            for column in spec.columns if label in group else ():
                if column.key in row.published and not same(row.published[column.key], shown(spec, column, cells)):
                    wrong.add((label, column.key))
    assert wrong == {(row.label, key) for row in spec.rows for key in row.differs}
    explained = {column.key for column in spec.columns if column.note}
    assert all(row.note or set(row.differs) <= explained for row in spec.rows)


IRRATT = read_spec(EXPERIMENTS / "irratt" / "table1.yaml")


def test_only_the_untouched_model_stands_for_an_original() -> None:
    """And a model that started from another run only for the row that names this run; never one of another size."""
    labels = "DeiT-Small", "DeiT-Small, IrrAtt 192", "DeiT-Small, IrrAtt from constrained CP 192", "DeiT-Base"
    original, plain, constrained, base = rows = [r for name in labels for r in IRRATT.rows if r.label == name]
    made = [synthetic(IRRATT, row) for row in rows]
    for record in made:
        record["quality"] = {"top1": 79.0}
    trained = copy.deepcopy(made[0]) | {"mode": "train"}
    scored, tuned = copy.deepcopy(made[0]), copy.deepcopy(made[0])
    scored["config"]["checkpoint"] = "/a/run"
    tuned["identity"]["weights"]["task.model.weights"] = "sha256:0"

    def chosen(row: Row, *among: dict[str, Any]) -> list[SavedRecord]:
        return choose(row, [SavedRecord(Path("record.json"), record) for record in among], IRRATT)

    assert [len(chosen(row, record)) for row, record in zip(rows, made, strict=True)] == [1] * 4
    assert chosen(original, trained, scored, tuned, made[3]) == []
    assert chosen(constrained, made[1]) == chosen(plain, made[2]) == chosen(base, made[0]) == []


def test_a_row_takes_the_model_that_it_names_for_each_seed() -> None:
    spec = read_spec(EXPERIMENTS / "comparison" / "compression_gpt2.yaml")
    row = next(row for row in spec.rows if row.label == "LASER, 50 %")
    made = [synthetic(spec, row) for _ in range(4)]
    for record, seed, model in zip(made, (1, 2, 3, 3), ("gpt2_s1", "gpt2_s2", "gpt2_s3", "llama_s3"), strict=True):
        record["seed"], record["config"]["model"] = seed, model
        record["identity"]["weights"]["task.model.weights"] = f"sha256:{seed}"
        record["quality"] = {"perplexity": 6.0}
        record["compression"] = {"quality": {"dense": {"perplexity": 4.0}}}
    saved = [SavedRecord(Path("record.json"), record) for record in made]
    assert choose(row, saved, spec) == saved[:3]
    assert saved[0].number("quality.perplexity / compression.quality.dense.perplexity") == 1.5
    assert saved[0].number("quality.perplexity - compression.quality.dense.perplexity") == 2
    assert saved[0].number("quality.perplexity / compression.quality.dense.loss") is None
    made[0]["compression"]["quality"]["dense"]["perplexity"] = 0.0
    assert saved[0].number("quality.perplexity / compression.quality.dense.perplexity") is None
    assert saved[0].number("quality.perplexity - compression.quality.dense.perplexity") == 6


def test_a_drop_is_against_a_record_of_the_baselines_own_recipe() -> None:
    label, compressed = "DeiT-Base", "DeiT-Base, IrrAtt and MLP 168"
    spec = dataclasses.replace(IRRATT, baseline=label, rows=[r for r in IRRATT.rows if r.label in (label, compressed)])
    made = [synthetic(spec, row) for row in spec.rows]
    for record, top1 in zip(made, (81.0, 80.0), strict=True):
        record["quality"] = {"top1": top1}

    def drop() -> str:
        grid = table(spec, [SavedRecord(Path(f"{i}/record.json"), record) for i, record in enumerate(made)])
        return shown(spec, next(c for c in spec.columns if c.key == "drop"), grid.rows[1])

    assert drop() == "-1.00"
    made[0]["config"]["task"]["data"]["image_size"] = 384
    assert drop() == "not run"


def test_seeds_are_compared_in_pairs() -> None:
    label, compressed = "DeiT-Base", "DeiT-Base, IrrAtt and MLP 168"
    rows = [r for r in IRRATT.rows if r.label in (label, compressed)]
    paired = dataclasses.replace(IRRATT.columns[0], value="", paired="quality.top1", factor=100, digits=1, welch=True)
    spec = dataclasses.replace(IRRATT, baseline=label, rows=rows, columns=[*IRRATT.columns, paired])
    saved = []
    for row, scores in zip(rows, ((80.0, 81.0, 82.0), (79.0, 79.0, 79.0)), strict=True):
        for seed, top1 in enumerate(scores, 1):
            record = synthetic(spec, row) | {"seed": seed, "quality": {"top1": top1 / 100}}
            saved.append(SavedRecord(Path(f"{row.label}/{seed}/record.json"), record))
    expected = ["-2.0 (-4.5 to +0.5, n = 3)", "0.074 (0.074)", "0.074 (0.074)"]  # Welch's: one row does not vary
    assert [cells[-3:] for cells in table(spec, saved).rows] == [["–"] * 3, expected]
    assert table(spec, saved[:4]).rows[1][-3:] == ["not run"] * 3
    for one, top1 in zip(saved, (80.1, 81.3, 82.7, 80.8, 82.0, 83.4), strict=True):
        one.record["quality"] = {"top1": top1 / 100}  # equal differences but for rounding
    assert table(spec, saved).rows[1][-3:] == ["+0.7 (each of 3 seeds)", "–", "–"]
    for one, top1 in zip(saved, (80.0, 81.0, 82.0, 79.0, 79.0, 79.0), strict=True):
        one.record["quality"] = {"top1": top1 / 100}
    planned = next(row for row in IRRATT.rows if row.command and row not in rows)
    several = dataclasses.replace(spec, rows=[*rows, planned])
    assert table(several, saved).rows[1][-3:] == [expected[0], "0.074 (0.15)", "0.074 (0.15)"]  # it was not run


def test_the_size_of_a_corpus_is_not_read_from_its_path() -> None:
    place = "some folder at /data/x train 1281167"
    assert not is_corpus(f"{place}: train 5, val 9 images, 3 classes", IRRATT.corpus)
    assert not is_corpus(f"FEVER in {place}: 5 validation and 9 test questions", IRRATT.corpus)
    assert is_corpus("some folder at /x train 5: train 1281167, val 50000 images, 1000 classes", IRRATT.corpus)

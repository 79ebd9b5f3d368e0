"""The table of recall, its frontier and its curves, from made-up records."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from attnlab.config.build import CONF
from attnlab.errors import ConfigError
from attnlab.report.render import write_table
from attnlab.report.spec import read_spec
from attnlab.run.store import collect
from tests.report.conftest import Run

SPEC = CONF.parent / "experiments" / "recall" / "table.yaml"
CORPUS = "MQAR, generated, version 1: train 48096, validation 256, test 2000 sequences; vocabulary 256"
MADE_UP = {"MHA": (0.98, 528.0), "MLA, r = 16": (0.9, 112.0), "TPA, R = 2": (0.5, 336.0)}


def lines(path: Path) -> list[list[str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


@pytest.mark.slow
def test_seeds_frontier_and_curves(tmp_path: Path, run: Run) -> None:
    spec = read_spec(SPEC)
    spec = replace(spec, rows=[row for row in spec.rows if row.label in (*MADE_UP, "MQA")])
    rows = {row.label: row for row in spec.rows}
    for label, (accuracy, size) in MADE_UP.items():
        for seed in (1, 2, 3) if label == "MHA" else (1,):
            found = accuracy + 0.01 * (seed - 1)
            path = run(
                f"{label}{seed}".replace(", ", "_").replace(" = ", ""), f"task=recall {rows[label].command}",
                "hardware=cpu", f"seed={seed}", corpus=CORPUS, kv_cache__bytes_per_position=size,
                quality={"accuracy": found, "cells": {"128x32": found / 2}},
            )  # fmt: skip
            (path.parent / "curves").mkdir()
            logged = "".join(f"0,{update},{found * update / 200}\n" for update in (100, 200))
            (path.parent / "curves" / "metrics.csv").write_text(f"epoch,step,val_accuracy\n{logged}")
    written = write_table(spec, collect([tmp_path / "runs"]), tmp_path / "table")
    assert {path.name for path in written} >= {"table.md", "table_points.png", "table_curves.png", "table_curves.csv"}
    header, *body = lines(tmp_path / "table.csv")
    cells = {row[0].partition(" [")[0]: dict(zip(header, row, strict=True)) for row in body}
    assert cells["MHA"]["Accuracy, %"] == "99.0 (98.0–100.0, 3 seeds)"
    assert cells["MHA"]["32 pairs"] == "49.5 (49.0–50.0, 3 seeds)" and cells["MHA"]["4 pairs [a]"] == "not run"
    assert cells["MLA, r = 16"]["Accuracy, %"] == "90.0" and cells["MQA"]["Accuracy, %"] == "not run"
    points = lines(tmp_path / "table_points.csv")[1:]
    assert [row[:2] for row in points] == [
        ["MHA", "1"],
        ["MHA", "2"],
        ["MHA", "3"],
        ["MLA, r = 16", "1"],
        ["TPA, R = 2", "1"],
    ]
    drawn = lines(tmp_path / "table_curves.csv")[1:]
    assert ["MHA", "2", "200", "0.99"] in [row[1:] for row in drawn] and len(drawn) == 10
    text = (tmp_path / "table.md").read_text()
    assert "`python -m src.run task=recall attention.pattern=[sliding_window,mqa]" in text


def test_a_frontier_that_is_neither_most_nor_least(tmp_path: Path) -> None:
    wrong = tmp_path / "table.yaml"
    wrong.write_text(SPEC.read_text().replace("frontier: max", "frontier: best"))
    with pytest.raises(ConfigError, match="frontier 'best': expected max or min"):
        read_spec(wrong)

"""Records with a needle in a haystack that the committed ones do not have: of a scored model, of seeds, damaged."""

import json
from pathlib import Path
from typing import Any

import pytest

from attnlab.errors import DataError
from attnlab.report import needle
from attnlab.report.command import main
from attnlab.run.store import collect
from tests.report.conftest import committed

pytestmark = pytest.mark.usefixtures("unrendered")


@pytest.fixture
def record() -> dict[str, Any]:
    return committed("convert/needle/mla_keep50_xeon.json")


def test_seeds_have_one_line_and_a_scored_model_has_one(record: dict[str, Any], tmp_path: Path) -> None:
    states = record["conversion"]["points"]
    for seed in (1, 2):
        states["converted"]["perplexity"] = 3.6 + seed / 10
        (tmp_path / f"{seed}.json").write_text(json.dumps(record | {"seed": seed}))
    quality = {"perplexity": 4.0, "needle": states["original"]["needle"]}
    scored = {name: section for name, section in record.items() if name != "conversion"} | {"quality": quality}
    (tmp_path / "scored.json").write_text(json.dumps(scored))
    rows = needle.table(collect([tmp_path])).rows
    assert [row[1:3] for row in rows] == [["original", "3.410"], ["converted", "3.750"], ["scored", "4.000"]]
    assert rows[2][4:] == rows[0][4:]


def test_runs_that_ask_differently_are_not_averaged(record: dict[str, Any], tmp_path: Path) -> None:
    for seed, asks in ((1, "numbers of 5 digits"), (2, "numbers of 5 digits, one of 4 facts")):
        for state in ("original", "converted"):
            record["conversion"]["points"][state]["needle"]["asks"] = asks
        (tmp_path / f"{seed}.json").write_text(json.dumps(record | {"seed": seed}))
    rows = needle.table(collect([tmp_path])).rows
    assert len(rows) == 4 and sum("one of 4 facts" in row[0] for row in rows) == 2


@pytest.mark.parametrize("damage", [{"cells": [{"length": "x"}]}, {"accuracy": None, "cells": 5}, {"trials": 16}])
def test_a_damaged_record_is_named(record: dict[str, Any], tmp_path: Path, damage: dict[str, Any]) -> None:
    (tmp_path / "good.json").write_text(json.dumps(record))
    record["conversion"]["points"]["converted"]["needle"] = damage
    (tmp_path / "bad.json").write_text(json.dumps(record | {"seed": 2}))
    with pytest.raises(DataError, match=r"^\S*bad\.json: damaged"):
        main(["needle", str(tmp_path), "--out", str(tmp_path / "out")])

"""Decoding over the context: the records of mode=bench that stand for a mechanism; the numbers: test_committed.py."""

import json
from pathlib import Path
from typing import Any

import pytest

from attnlab.config.build import CONF
from attnlab.report import bench
from attnlab.report.render import write_table
from attnlab.report.spec import read_spec
from attnlab.run.store import collect
from tests.report.conftest import committed, set_values

FOLDER = CONF.parent / "experiments" / "t6"
SPEC = read_spec(FOLDER / "figure_context.yaml")
RECORD = "t6/bench/decoding_context_epyc_2threads.json"
COMMAND = "python -m src.run experiment=t6/bench_context"


def times(record: dict[str, Any], folder: Path) -> dict[str, set[str]]:
    """The times of each mechanism in the figure."""
    folder.mkdir(exist_ok=True)
    (folder / "record.json").write_text(json.dumps(record))
    points = bench.over_the_context(SPEC, collect([folder]))
    return {str(name): set(rows["ms"]) for name, rows in points.groupby("mechanism")}


@pytest.mark.parametrize(
    "change", [{"config__bench__batch": 8}, {"config__task__model__d_model": 1024}, {"status": "failed"}, {}]
)
def test_records_of_another_shape_do_not_count(change: dict[str, Any], tmp_path: Path) -> None:
    record = committed(RECORD)
    set_values(record, change)
    if not change:  # a length less
        record["bench"]["rows"] = [row for row in record["bench"]["rows"] if row["context"] != 256]
    assert all(cells == {"not run"} for cells in times(record, tmp_path).values())


def test_what_was_not_measured_has_its_command(tmp_path: Path) -> None:
    record = committed(RECORD)
    for row in record["bench"]["rows"]:
        row["variants"]["tpa"] = {"not run": "too large"}
    assert [name for name, cells in times(record, tmp_path).items() if "not run" in cells] == ["TPA"]
    (missing,) = [note for note in bench.context_table(SPEC, collect([tmp_path])).notes if note.startswith("not run")]
    assert missing == f"not run: TPA: `{COMMAND}`"
    paths = write_table(SPEC, [], tmp_path / "figure_context")
    assert [path.suffix for path in paths] == [".md", ".tex", ".csv"]  # nothing to draw

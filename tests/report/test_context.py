"""Decoding over the context from records of mode=bench."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from attnlab.config.build import CONF
from attnlab.report import bench
from attnlab.report.match import composed
from attnlab.report.render import write_table
from attnlab.report.spec import read_spec
from attnlab.run import record as records
from attnlab.run.store import SavedRecord, collect

SPEC = read_spec(CONF.parent / "experiments" / "t6" / "figure_context.yaml")
LENGTHS = (256, 1024, 4096, 16384, 32768)
COMMAND = "python -m src.run experiment=t6/bench_context"


@pytest.fixture(scope="module")
def template() -> dict[str, Any]:
    """A record of the figure's command in which a step takes `context` microseconds, and MQA a tenth of it."""
    cfg = composed(*SPEC.overrides(SPEC.rows[0]))
    record = copy.deepcopy(records.new(cfg, COMMAND)) | {"status": "finished"}
    record["environment"] |= {"device": "cpu: one", "threads": 1, "git": "abc"}
    record["bench"] = {"protocol": {"rounds": 5}, "checks": {}, "rows": []}
    for length in LENGTHS:
        row: dict[str, Any] = {"what": "decoding", "batch": 1, "steps": 32, "context": length, "prefix": 0}
        row |= {"reorder": False, "ratios": []}
        times = {name: 32e-6 * length * share for name, share in (("mha", 1.0), ("mqa", 0.1))}
        row["variants"] = {
            name: {
                "seconds": {"median": second, "min": second / 2, "max": 2 * second},
                "cpu_seconds": {"median": 2 * second, "min": second, "max": 3 * second},
                "peak_memory_mib": 7.5 if name == "mha" else "not run",
                "cache_bytes": {"measured": 1024 * length, "predicted": 1024 * length},
            }
            for name, second in times.items()
        } | {"tpa": {"not run": "too large"}}
        record["bench"]["rows"].append(row)
    return record


def write(record: dict[str, Any], folder: Path) -> list[SavedRecord]:
    folder.mkdir(exist_ok=True)
    (folder / "record.json").write_text(json.dumps(record))
    return collect([folder])


def test_what_was_measured_and_what_was_not(template: dict[str, Any], tmp_path: Path) -> None:
    saved = write(template, tmp_path / "run")
    rows = {(row[0], row[1]): row[2:] for row in bench.over_the_context(SPEC, saved).to_numpy().tolist()}
    assert len(rows) == len(SPEC.rows) * len(LENGTHS)
    assert rows["MHA", 4096] == ["4.096", "2.048", "8.192", "8.192", "4", "7.5"]
    assert rows["MQA", 4096] == ["0.4096", "0.2048", "0.8192", "0.8192", "4", "not run"]
    assert rows["TPA", 256] == rows["MLA", 256] == ["not run", "", "", "", "not run", "not run"]
    grid = bench.context_table(SPEC, saved)
    assert grid.rows[1][:2] == ["MQA", "0.0256 (0.0128–0.0512)"]
    (missing,) = [note for note in grid.notes if note.startswith("not run")]
    assert "TPA" in missing and "MHA" not in missing and missing.endswith(f"`{COMMAND}`")
    page = bench.context_plot(bench.over_the_context(SPEC, saved))
    assert [axes.get_ylabel() for axes in page.axes] == list(bench.PANELS.values())
    assert [text.get_text() for text in page.legends[0].texts] == ["MHA", "MQA"]
    assert [len(axes.containers) for axes in page.axes] == [2, 2, 1]  # MHA alone has a peak


def test_records_of_another_shape_do_not_count(template: dict[str, Any], tmp_path: Path) -> None:
    other = copy.deepcopy(template)
    other["config"]["bench"]["batch"] = 8
    fewer = copy.deepcopy(template)
    fewer["bench"]["rows"].pop()
    failed = template | {"status": "failed"}
    wider = copy.deepcopy(template)
    wider["config"]["task"]["model"]["d_model"] = 1024
    for number, record in enumerate((other, fewer, failed, wider)):
        saved = write(record, tmp_path / f"{number}")
        assert set(bench.over_the_context(SPEC, saved)["ms"]) == {"not run"}
    paths = write_table(SPEC, [], tmp_path / "figure_context")
    assert [path.suffix for path in paths] == [".md", ".tex", ".csv"]  # nothing to draw

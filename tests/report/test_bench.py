"""Benchmarks as tables and plots."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from attnlab.errors import DataError
from attnlab.report.command import main
from tests.report.conftest import Run


def measured(seconds: float, memory: float | str) -> dict[str, Any]:
    spread = {"median": seconds, "min": 0.9 * seconds, "max": 1.1 * seconds}
    return {"seconds": spread, "tokens_per_second": 1 / seconds, "peak_memory_mib": memory}


def training(text: int, faster: float) -> dict[str, Any]:
    pair = {"of": "mtla", "against": "mha", "peak_memory": 1.5}
    pair |= {"seconds": {"median": faster, "min": faster / 2, "max": 2 * faster}}
    return {
        "what": "training", "batch": 2, "prefix": 0, "text": text,
        "variants": {
            "mtla": measured(0.01, 10.0), "mha": measured(0.02, "not run"), "published": {"not run": "no room"},
        },
        "ratios": [pair, {"of": "mtla", "against": "published", "not run": "no room"}],
    }  # fmt: skip


DECODING = {
    "what": "decoding", "batch": 8, "prefix": 4, "steps": 2,
    "variants": {"mtla": measured(0.01, 1.0) | {"cache_bytes": {"measured": 2**20, "predicted": 2**20}}},
    "ratios": [],
}  # fmt: skip


def bench(run: Run, name: str, rows: list[dict[str, Any]]) -> Path:
    protocol = {"device": "cpu", "rounds": 5, "time": "a long explanation that would fill the whole line of a table"}
    content = {"protocol": protocol, "checks": {}, "rows": rows}
    return run(name, "experiment=mtla/bench_training", bench=content, corpus="none: random inputs")


def test_table_and_plot(tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    first = bench(run, "a", [training(512, 1.2), training(1024, 2.4), DECODING])
    second = bench(run, "b", [training(512, 1.1)])
    out = tmp_path / "out"
    assert main(["bench", str(first), str(second), "--out", str(out)]) == 0
    assert len(capsys.readouterr().out.split()) == 5
    rows = list(csv.DictReader((out / "bench.csv").open()))
    assert [row["Variant"] for row in rows] == 2 * ["mtla", "mha", "published"] + ["mtla", "mtla", "mha", "published"]
    assert (rows[1]["ms"], rows[1]["Times faster"], rows[1]["Peak MiB"]) == ("20", "1.2", "not run")
    assert (rows[2]["ms"], rows[2]["Times faster"]) == ("not run", "not run")
    assert rows[6]["Cache MiB"] == "1"
    assert "no room" in (out / "bench.md").read_text() and f"in `{tmp_path}/runs`" in (out / "bench.md").read_text()
    listed = list(csv.DictReader((out / "bench_records.csv").open()))
    assert [row["File"] for row in listed] == [str(first), str(second)]
    assert listed[0]["Protocol"] == "device cpu, rounds 5"  # without the long explanation
    curve = list(csv.DictReader((out / "training.csv").open()))
    assert [(row["record"], row["text"], row["seconds"], row["least"]) for row in curve] == [
        ("R1", "512", "1.2", "0.6"), ("R1", "1024", "2.4", "1.2"), ("R2", "512", "1.1", "0.55"),
    ]  # fmt: skip
    assert (out / "training.png").read_bytes().startswith(b"\x89PNG")


def test_no_plot_without_training(tmp_path: Path, run: Run) -> None:
    path = bench(run, "a", [DECODING])
    assert main(["bench", str(path)]) == 0
    assert sorted(file.name for file in path.parent.iterdir()) == [
        "bench.csv",
        "bench.md",
        "bench_records.csv",
        "config.yaml",
        "record.json",
    ]


@pytest.mark.parametrize("kind", ["bench", "speed", "compressed", "needle"])
def test_nothing_to_show(kind: str, run: Run) -> None:
    path = run("a", "task=mustc scale=paper attention=mha")
    with pytest.raises(DataError, match="no finished record"):
        main([kind, str(path)])
    path.write_text(json.dumps({}))
    with pytest.raises(DataError, match="no readable record"):
        main([kind, str(path)])

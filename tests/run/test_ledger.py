"""The runs in an outputs folder."""

import json
from pathlib import Path
from typing import Any

from attnlab.run import store
from attnlab.run.directory import locked
from attnlab.run.record import NOT_RUN, SECTIONS
from attnlab.run.store import LedgerEntry


def write(directory: Path, **values: Any) -> Path:
    """A run directory with a record; sections in `values` are completed."""
    sections = {name: dict.fromkeys(keys.split(), NOT_RUN) for name, keys in SECTIONS.items()}
    record: dict[str, Any] = sections | {
        "schema": 2, "command": "c", "status": "finished", "mode": "train", "task": "mustc", "attention": "mtla",
        "compress": "none", "scale": "sample", "experiment": None, "seed": 1, "stride": 2, "rank": None,
        "tags": ["a", "b"], "started": "2026-01-02T03:04:05+00:00", "corpus": "sample",
        "quality": {"signature": "s", "bleu": 20.5},
    }  # fmt: skip
    record["identity"]["weights"] = {}
    record["kv_cache"]["elements_per_token_per_layer"] = 144
    if "environment" in values:
        values["environment"] = record["environment"] | values["environment"]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "record.json").write_text(json.dumps(record | values))
    return directory


def runs(root: Path) -> dict[str, LedgerEntry]:
    return {run.directory.relative_to(root).as_posix(): run for run in store.entries(root)}


def test_strange_records(tmp_path: Path) -> None:
    write(tmp_path / "text", task="a\udcff")  # of a file's name that is not UTF-8
    write(tmp_path / "numbers", seed=2**70, quality={"ppl": 10**400, "bleu": 2.0})
    write(tmp_path / "identity", identity=None)
    for name, content in {"deep": "[" * 100_000, "half": '{"status": "fini', "list": "[]"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.json").write_text(content)
    (tmp_path / "lost").mkdir()
    (tmp_path / "lost" / "record.json").symlink_to("nowhere")
    entries = runs(tmp_path)
    broken = ("identity", "deep", "half", "list")
    good = dict.fromkeys(("text", "numbers"), "finished")
    assert {name: run.status for name, run in entries.items()} == good | dict.fromkeys(broken, "broken")
    assert (entries["numbers"].value("seed"), entries["numbers"].score) == (2**70, ("bleu", 2.0))
    assert all(entries[name].error for name in broken)


def test_a_run_whose_process_is_gone_was_interrupted(tmp_path: Path) -> None:
    dead, live = (write(tmp_path / name, status="running") for name in ("dead", "live"))
    with locked(live):
        entries = runs(tmp_path)
    assert (entries["dead"].status, entries["dead"].error) == ("interrupted", "its process is gone")
    assert entries["live"].status == "running"
    assert runs(tmp_path)["live"].status == "interrupted"
    assert json.loads((dead / "record.json").read_text())["status"] == "running"  # a list changes no record


def test_runs_below_runs_and_links(tmp_path: Path) -> None:
    """None is hidden by what lies above it, and none appears twice."""
    root = tmp_path / "outputs"
    write(root / "a" / "b")
    write(root / "a", status="failed", error="x")
    (root / "record.json").touch()
    write(tmp_path / "elsewhere" / "c")
    links = {"up": tmp_path, "loop": root, "again": root / "a", "l": tmp_path / "elsewhere", "m": root / "l" / "c"}
    for name, aim in links.items():
        (root / name).symlink_to(aim)
    assert sorted(runs(root)) == [".", "a", "a/b", "l/c"]

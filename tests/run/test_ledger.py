"""The index of an outputs folder."""

import errno
import json
import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from attnlab.run import ledger
from attnlab.run import record as records
from attnlab.run.ledger import FILE, Ledger, Run
from attnlab.run.lock import locked


def write(directory: Path, **values: Any) -> Path:
    record: dict[str, Any] = {
        "schema": 2, "command": "c", "status": "finished", "mode": "train", "task": "mustc", "attention": "mtla",
        "compress": "none", "scale": "sample", "experiment": None, "seed": 1, "stride": 2, "rank": None,
        "tags": ["a", "b"], "started": "2026-01-02T03:04:05+00:00", "corpus": "sample",
        "quality": {"signature": "s", "bleu": 20.5},
        "kv_cache": {"elements_per_token_per_layer": 144}, "environment": {"git": "abc"},
        "identity": {"recipe": "r", "run": "u", "corpus": "c", "weights": {}},
    }  # fmt: skip
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "record.json").write_text(json.dumps(record | values))
    return directory


def runs(root: Path) -> dict[str, Run]:
    return {run.directory.relative_to(root).as_posix(): run for run in Ledger(root).runs()}


def test_a_row_says_what_the_record_says(tmp_path: Path) -> None:
    write(tmp_path / "mustc" / "mtla" / "one")
    (run,) = Ledger(tmp_path).runs()
    assert run.directory == tmp_path / "mustc" / "mtla" / "one"
    assert (run.status, run.mode, run.task, run.mechanism, run.seed) == ("finished", "train", "mustc", "mtla s=2", 1)
    assert (run.metric, run.quality, run.cache, run.tags) == ("bleu", 20.5, 144, ("a", "b"))
    assert (run.recipe, run.run, run.content, run.commit, run.experiment) == ("r", "u", "c", "abc", "")


def test_only_what_has_changed_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    row = ledger._row

    def noted(path: Path) -> tuple[Any, ...]:
        read.append(path.parent.name)
        return row(path)

    monkeypatch.setattr(ledger, "_row", noted)
    write(tmp_path / "a")
    write(tmp_path / "b", started="2025")
    assert list(runs(tmp_path)) == ["b", "a"]  # by time
    assert sorted(read) == ["a", "b"]
    write(tmp_path / "a", status="failed", error="disk full")
    (tmp_path / "b" / "record.json").unlink()
    write(tmp_path / "sweep" / "c")
    found = runs(tmp_path)
    assert sorted(read) == ["a", "a", "b", "c"]
    assert {name: run.status for name, run in found.items()} == {"a": "failed", "sweep/c": "finished"}


def test_the_index_can_be_deleted_damaged_and_made_by_other_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(ledger.log, "warning", lambda text, *about: warnings.append(text % about))
    write(tmp_path / "a")
    before = runs(tmp_path)
    (tmp_path / FILE).unlink()
    assert runs(tmp_path) == before
    (tmp_path / FILE).write_bytes(b"no database at all" * 100)
    assert runs(tmp_path) == before
    with sqlite3.connect(tmp_path / FILE) as index:  # what another version would have written
        index.execute("UPDATE runs SET status = 'failed'")
    assert runs(tmp_path)["a"].status == "failed"
    monkeypatch.setattr(ledger, "FORMAT", ledger.FORMAT + 1)
    assert runs(tmp_path) == before
    assert not warnings
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).mkdir()  # nothing can be written there
    assert runs(tmp_path) == before
    assert "cannot be used" in warnings[0]
    assert Ledger(tmp_path / "nowhere").runs() == []


def test_what_only_one_question_reads_is_damaged(tmp_path: Path) -> None:
    """Of an index whose first pages are whole."""
    write(tmp_path / "a")
    asked = ("", "train", 1, "mustc")
    assert [run.directory.name for run in Ledger(tmp_path).alike(*asked)] == ["a"]
    for statement in ("DROP TABLE runs", "ALTER TABLE runs DROP COLUMN key"):
        with sqlite3.connect(tmp_path / FILE) as index:
            index.execute("DROP INDEX jobs")
            index.execute(statement)
        assert [run.directory.name for run in Ledger(tmp_path).alike(*asked)] == ["a"]
        assert sqlite3.connect(tmp_path / FILE).execute("SELECT path, key FROM runs").fetchall() == [("a", "")]
    with sqlite3.connect(tmp_path / FILE) as index:
        root = index.execute("SELECT rootpage FROM sqlite_master WHERE name = 'jobs'").fetchone()[0]
        size = index.execute("PRAGMA page_size").fetchone()[0]
    with (tmp_path / FILE).open("r+b") as file:
        file.seek((root - 1) * size)
        file.write(b"\xff" * size)
    assert [run.directory.name for run in Ledger(tmp_path).alike(*asked)] == ["a"]
    assert len(Ledger(tmp_path).runs()) == 1


def test_a_damaged_index_that_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk that is read-only."""
    write(tmp_path / "a")
    (tmp_path / FILE).write_bytes(b"no database at all" * 100)

    def refused(self: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "unlink", refused)
    assert list(runs(tmp_path)) == ["a"]


def test_code_that_changes_beside_a_multirun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are those of the code that was read; another version's process makes the index again at any moment."""
    write(tmp_path / "a")
    runs(tmp_path)
    refresh = Ledger._refresh

    def and_another(self: Ledger, index: sqlite3.Connection) -> None:
        refresh(self, index)
        if index.execute("PRAGMA database_list").fetchone()[2]:
            with sqlite3.connect(tmp_path / FILE) as other:
                other.execute("DELETE FROM runs")
                other.execute("PRAGMA user_version = 5")

    monkeypatch.setattr(Ledger, "_refresh", and_another)
    assert list(runs(tmp_path)) == ["a"]


def test_records_that_no_database_holds(tmp_path: Path) -> None:
    strange = "a\udcff"  # of a file's name that is not UTF-8
    write(tmp_path / "text", error=strange, tags=[strange, 5], task="a")
    write(tmp_path / "numbers", seed=2**70, stride=True, quality={"ppl": 10**400, "bleu": float("nan")}, task="b")
    write(tmp_path / "tags", tags=5, quality=[1], identity=None, task="c")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "record.json").write_text("[" * 100_000)
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "record.json")
    (tmp_path / "folder" / "record.json").mkdir(parents=True)
    (tmp_path / "lost").mkdir()
    (tmp_path / "lost" / "record.json").symlink_to("nowhere")
    (tmp_path / "itself").symlink_to("itself")
    write(Path(f"{tmp_path}/{strange}"))
    found = runs(tmp_path)
    assert {name: run.status for name, run in found.items()} == {
        **dict.fromkeys(("text", "numbers", "tags"), "finished"),
        **dict.fromkeys(("deep", "pipe", "folder"), "broken"),
    }
    assert (found["text"].error, found["text"].tags) == ("a?", (strange, "5"))
    assert (found["numbers"].seed, found["numbers"].metric, found["tags"].tags) == (None, "bleu", ())


def test_a_record_with_a_name_that_is_no_text(tmp_path: Path) -> None:
    records.write({"status": "failed", "error": "a\udcff: not found"}, tmp_path)
    assert records.read(tmp_path)["error"] == "a\udcff: not found"


def test_a_run_whose_process_is_gone_was_interrupted(tmp_path: Path) -> None:
    dead, live = (write(tmp_path / name, status="running") for name in ("dead", "live"))
    with locked(live):
        found = runs(tmp_path)
    assert (found["dead"].status, found["dead"].error) == ("interrupted", "its process is gone")
    assert found["live"].status == "running"
    assert runs(tmp_path)["live"].status == "interrupted"
    assert json.loads((dead / "record.json").read_text())["status"] == "running"  # a list changes no record


def test_what_is_no_record_and_what_has_none(tmp_path: Path) -> None:
    write(tmp_path / "good" / "run")
    (tmp_path / "good" / "run.log").touch()  # above a run: not a run without a record
    for name in ("half", "list"):
        (tmp_path / name).mkdir()
    (tmp_path / "half" / "record.json").write_text('{"status": "fini')
    (tmp_path / "list" / "record.json").write_text("[]")
    (tmp_path / "begun" / "checkpoints").mkdir(parents=True)
    (tmp_path / "begun" / "config.yaml").touch()
    (tmp_path / "begun" / "run.log").touch()
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "config.yaml").touch()  # anybody's
    (tmp_path / "loop").symlink_to(tmp_path)
    index = Ledger(tmp_path)
    assert {run.directory.name: run.status for run in index.runs()} == {
        "half": "broken",
        "list": "broken",
        "run": "finished",
    }
    assert index.unrecorded == [tmp_path / "begun"]


def test_runs_below_runs_and_links(tmp_path: Path) -> None:
    """None is hidden by what lies above it, and none appears twice."""
    root = tmp_path / "outputs"
    write(root / "a" / "b")
    write(root / "a", status="failed", error="x")
    (root / "record.json").touch()
    write(tmp_path / "elsewhere" / "c")
    for name, aim in (("up", tmp_path), ("again", root / "a"), ("l", tmp_path / "elsewhere"), ("m", root / "l" / "c")):
        (root / name).symlink_to(aim)
    found = sorted(runs(root))
    assert found[:3] == [".", "a", "a/b"] and len(found) == 4 and found[3] in ("l/c", "m")


@pytest.mark.parametrize("value", ["'{'", "5", "NULL", "'[1]'"])
def test_a_row_of_the_index_that_no_record_gives(value: str, tmp_path: Path) -> None:
    write(tmp_path / "a")
    before = runs(tmp_path)
    for name in ("tags", "started"):
        with sqlite3.connect(tmp_path / FILE) as index:
            index.execute(f"UPDATE runs SET tags = {value}")
            index.execute(f"UPDATE runs SET {name} = {value}")
        assert runs(tmp_path) == before


def test_an_index_that_another_process_keeps_locked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The runs are listed without it, after a moment and with a line that names it."""
    write(tmp_path / "a")
    Ledger(tmp_path).runs()
    with closing(sqlite3.connect(tmp_path / FILE)) as other:
        other.execute("BEGIN EXCLUSIVE")
        began = time.monotonic()
        assert [run.directory.name for run in Ledger(tmp_path).runs()] == ["a"]
    assert time.monotonic() - began < 5
    assert [str(tmp_path / FILE) in message for message in caplog.messages] == [True]


def test_an_index_that_is_a_link_to_another_database(tmp_path: Path) -> None:
    write(tmp_path / "outputs" / "a")
    with sqlite3.connect(tmp_path / "mine.sqlite") as mine:
        mine.execute("CREATE TABLE runs (x)")
        mine.execute("INSERT INTO runs VALUES (1)")
    (tmp_path / "outputs" / FILE).symlink_to(tmp_path / "mine.sqlite")
    assert list(runs(tmp_path / "outputs")) == ["a"]
    assert sqlite3.connect(tmp_path / "mine.sqlite").execute("SELECT x FROM runs").fetchall() == [(1,)]
    assert (tmp_path / "outputs" / FILE).is_symlink()


@pytest.mark.slow
def test_ten_thousand_records_are_listed_in_two_seconds(tmp_path: Path) -> None:
    """CPU seconds: what else the machine does is not ours."""
    for number in range(10_000):
        write(tmp_path / str(number % 50) / str(number), seed=number)
    assert len(Ledger(tmp_path).runs()) == 10_000
    began = time.process_time()
    assert len(Ledger(tmp_path).runs()) == 10_000
    assert time.process_time() - began < 2

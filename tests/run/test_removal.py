"""`attnlab runs prune` removes runs, and nothing else."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from attnlab.errors import DataError
from attnlab.report.runs import main
from attnlab.run import removal
from attnlab.run.lock import locked
from tests.run.test_ledger import write

KEYS = "mode task choices attention hardware seed data_root cache_dir"


def begun(directory: Path) -> Path:
    """A run that was ended before it could write a record."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.yaml").write_text("".join(f"{key}: null\n" for key in KEYS.split()))
    (directory / "run.log").touch()
    return directory


def failed(directory: Path, **values: Any) -> Path:
    return write(directory, **{"status": "failed", "error": "x"} | values)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    return Path("outputs")


def pruned(capsys: pytest.CaptureFixture[str], what: str, *more: str) -> str:
    """What is said of the folders that are left; without --yes the same is said and nothing removed."""
    before = {path for path in Path().rglob("*") if ".ledger" not in path.name}
    main(["prune", *what.split(), *more])
    said = capsys.readouterr().err
    assert {path for path in Path().rglob("*") if ".ledger" not in path.name} == before
    main(["prune", *what.split(), *more, "--yes"])
    done = capsys.readouterr().err
    assert done == re.sub("would be removed: the same command with --yes removes (it|them)", "removed", said)
    return said


def test_what_lies_below_a_run_stays(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A finished run, in a hidden folder too; a live one with and without a record; a multirun's locks."""
    for name in "abcdef":
        failed(root / name)
    write(root / "a" / "b")
    write(root / "b" / ".hidden" / "deep" / "run")
    for live in (write(root / "c" / "run", status="running"), root / "d" / "run"):
        live.mkdir(exist_ok=True)
    (root / "e" / ".jobs").mkdir()
    with locked(root / "c" / "run"), locked(root / "d" / "run"):
        said = pruned(capsys, "failed")
    assert sorted(path.name for path in root.iterdir() if path.is_dir()) == list("abcde")
    assert "outputs/b: left: it holds what no run has written: .hidden\n" in said
    assert said.endswith("1 folder would be removed: the same command with --yes removes it; 5 left, see above\n")
    assert (root / "d" / "run").is_dir() and (root / "a" / "b" / "record.json").is_file()


def test_a_live_run_without_a_record_stays(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live = begun(begun(root / "s") / "0_x")
    with locked(live):
        pruned(capsys, "unrecorded")
    assert (live / "config.yaml").is_file()
    pruned(capsys, "unrecorded")
    assert (root / "s").is_dir() and not live.exists()


def test_the_folder_that_was_named_stays(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root.rmdir()
    begun(root)
    assert "it is the folder that was named" in pruned(capsys, "unrecorded")
    (root / "record.json").touch()
    write(root / ".hidden" / "run")
    write(root / "good")
    assert "it is the folder that was named" in pruned(capsys, "broken unrecorded failed interrupted")
    failed(root)
    assert "it is the folder that was named" in pruned(capsys, "failed", "outputs/../outputs")
    assert (root / "record.json").is_file() and (root / ".hidden" / "run" / "record.json").is_file()


def test_folders_of_others_stay(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contents = {
        "config.yaml": {"config.yaml": "k: 1", "run.log": ""},
        "song": {"record.json": '{"song": 1}'},
        "status": {"record.json": '{"status": "failed", "error": "x", "song": 1}'},
        "empty": {"record.json": "", "run.log": ""},
        "log": {"run.log": ""},
        "deep": {"config.yaml": "[" * 3000, "run.log": "", "record.json": "[" * 100_000},
    }
    for name, files in contents.items():
        (root / name).mkdir()
        for file, text in files.items():
            (root / name / file).write_text(text)
    assert pruned(capsys, "broken unrecorded failed").count("left: not a run for sure") == 5
    assert {path.name for path in root.iterdir() if path.is_dir()} == set(contents)
    (begun(root / "half") / "record.json").write_text('{"status": "fini')
    pruned(capsys, "broken")
    assert not (root / "half").exists()


def test_links_are_not_followed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere, text = failed(Path("elsewhere") / "run"), Path("text")
    text.touch()
    (root / "l").symlink_to(Path("elsewhere").absolute())
    (root / "run").symlink_to(failed(Path("other") / "run").absolute())
    failed(root / "z")
    (root / "z" / "checkpoints").symlink_to(Path("elsewhere").absolute())
    (root / "z" / "curves.png").symlink_to(text.absolute())
    assert pruned(capsys, "failed").count("left: it is reached through a link") == 2
    assert elsewhere.is_dir() and Path("other/run").is_dir() and text.is_file() and not (root / "z").exists()
    Path("linked").symlink_to(root.absolute())  # the folder that was named may be one
    failed(root / "z")
    pruned(capsys, "failed", "linked")
    assert not (root / "z").exists()


def test_the_lock_is_held_while_a_run_is_removed(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that begins, or that has finished, after the list was made stays; the others are removed."""
    for name in "abc":
        failed(root / name)
    take = removal.lock.locked

    @contextmanager
    def first(directory: Path, wait: float = 0) -> Iterator[Path]:
        if directory == root / "a":
            write(root / "a")  # continued, and finished
        with take(directory, wait) as held:
            yield held
        assert not directory.exists() or list(directory.iterdir()) == [] or directory == root / "a"

    monkeypatch.setattr(removal.lock, "locked", first)
    monkeypatch.setattr(removal.lock, "refuse_live", lambda directory: None)
    with take(root / "b"):
        main(["prune", "failed", "--yes"])
        said = capsys.readouterr().err
    assert "outputs/a: left: it is finished now\noutputs/b: left: outputs/b: a run is in progress there: " in said
    assert not (root / "c").exists()
    assert json.loads((root / "a" / "record.json").read_text())["status"] == "finished" and (root / "b").is_dir()


def test_a_run_that_another_one_uses_stays(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "abcd":
        failed(root / name)
    write(root / "by", config={"checkpoint": "outputs/a/checkpoints/last.ckpt", "x": [{"y": "outputs/b/"}]})
    write(root / "far", config={"baseline": os.path.abspath("outputs/c/record.json")})
    failed(root / "d", config={"resume": "outputs/d"})  # its own
    said = pruned(capsys, "failed")
    assert [line for line in said.splitlines() if "left:" in line] == [
        f"outputs/{name}: left: outputs/{user} uses it: its configuration names it"
        for name, user in (("a", "by"), ("b", "by"), ("c", "far"))
    ]
    assert not (root / "d").exists()


def test_what_cannot_be_removed_is_said_and_the_rest_is_removed(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "ab":
        (failed(root / name) / "curves").mkdir()
    remove = Path.rmdir

    def refused(path: Path) -> None:
        if path.parent.name == "a":
            raise PermissionError(13, "Permission denied", str(path))
        remove(path)

    monkeypatch.setattr(Path, "rmdir", refused)
    with pytest.raises(DataError, match="1 folder could not be removed"):
        main(["prune", "failed", "--yes"])
    assert "outputs/a: left: outputs/a/curves: cannot be removed (Permission denied)\n" in capsys.readouterr().err
    assert (root / "a" / "record.json").is_file() and not (root / "b").exists()


OWN = (
    "checkpoints/last.ckpt",
    "checkpoints/.last.ckpt." + "a" * 32 + ".partial",
    "curves-2/metrics.csv",
    "config.yaml",
)


OTHERS = {  # a path, and what is named of it
    ".git/HEAD": ".git",
    "main.py": "main.py",
    "mine/": "mine",
    "checkpoints/mine.pt": "checkpoints/mine.pt",
    "checkpoints/step_best.ckpt": "checkpoints/step_best.ckpt",
    "curves/mine/a.csv": "curves/mine",
    "curves_mine/metrics.csv": "curves_mine",
    "compressed/thesis.tex": "compressed/thesis.tex",
    "compressed/inner/record.json": "compressed/inner",
    "exported/.git/HEAD": "exported/.git",
    "pretraining/deep/a.docx": "pretraining/deep",
    "fit-profile-notes.md": "fit-profile-notes.md",
    ".hydra/config.yaml": ".hydra",
}


@pytest.mark.parametrize("other", [*OTHERS, None])
def test_a_directory_with_anything_else_stays_as_it_is(
    root: Path, capsys: pytest.CaptureFixture[str], other: str | None
) -> None:
    run = failed(root / "a")
    for name in (*OWN, *([other] if other else [])):
        (run / name).parent.mkdir(exist_ok=True, parents=True)
        (run / name).mkdir() if name.endswith("/") else (run / name).touch()
    said = pruned(capsys, "failed")
    assert run.exists() == bool(other)
    if other:
        assert f"left: it holds what no run has written: {OTHERS[other]}\n" in said
        assert all((run / name).exists() for name in (*OWN, other))

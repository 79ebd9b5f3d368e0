"""`attnlab runs prune` removes runs, and nothing else."""

import re
from pathlib import Path
from typing import Any

import pytest

from attnlab.errors import DataError, LockedError
from attnlab.report.runs import main
from attnlab.run import store
from attnlab.run.directory import locked
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


def pruned(capsys: pytest.CaptureFixture[str], what: str) -> str:
    """The output for folders that stay; without --yes it is the same and nothing is removed."""
    before = set(Path().rglob("*"))
    main(["prune", *what.split()])
    printed = capsys.readouterr().err
    assert set(Path().rglob("*")) == before
    main(["prune", *what.split(), "--yes"])
    done = capsys.readouterr().err
    assert done == re.sub("would be removed: the same command with --yes removes what is listed", "removed", printed)
    return printed


def test_what_lies_below_a_run_stays(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A finished run, in a hidden folder too, and a live one."""
    for name in "abcd":
        failed(root / name)
    write(root / "a" / "b")
    write(root / "b" / ".hidden" / "deep" / "run")
    with locked(write(root / "c" / "run", status="running")):
        printed = pruned(capsys, "failed")
    assert sorted(path.name for path in root.iterdir() if path.is_dir()) == list("abc")
    assert "outputs/b: left: it holds what no run has written: .hidden/deep/run/record.json\n" in printed
    assert "1 folder would be removed" in printed and "3 left" in printed
    assert (root / "a" / "b" / "record.json").is_file()


def test_only_what_was_named_is_removed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, task in (("a", "ptb"), ("b", "mustc")):
        failed(root / name, task=task)
    write(root / "dead", status="running")
    write(root / "good")
    for what, left in (
        ("failed task=ptb", ["b", "dead", "good"]),
        ("interrupted", ["b", "good"]),
        ("failed", ["good"]),
    ):
        assert "1 folder would be removed: the same command with --yes removes" in pruned(capsys, what)
        assert sorted(path.name for path in root.iterdir() if path.is_dir()) == left


def test_the_folder_that_was_named_stays(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed(root)
    assert "it is the folder that was named" in pruned(capsys, "failed outputs/../outputs")
    assert (root / "record.json").is_file()


def test_folders_of_others_stay(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contents = {
        "song": {"record.json": '{"song": 1}'},
        "status": {"record.json": '{"status": "failed", "error": "x", "song": 1}'},
        "empty": {"record.json": "", "run.log": ""},
    }
    for name, files in contents.items():
        (root / name).mkdir()
        for file, text in files.items():
            (root / name / file).write_text(text)
    assert pruned(capsys, "broken failed").count("left: not a run for sure") == len(contents)
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


def test_a_run_that_changed_after_the_list_was_made_stays(root: Path) -> None:
    run = failed(root / "a")
    with locked(run), pytest.raises(LockedError):
        store.remove(run, root, ["failed"])
    write(run)  # continued, and finished
    with pytest.raises(DataError, match="finished now"):
        store.remove(run, root, ["failed"])
    store.remove(failed(run), root, ["failed"])
    assert not run.exists()


WRITTEN = (
    "checkpoints/last.ckpt", f"checkpoints/.last.ckpt.{'a' * 32}.partial", "curves-2/metrics.csv",
    "exported/model.safetensors", "config.yaml",
)  # fmt: skip
OTHERS = (
    ".git/HEAD", "checkpoints/step_best.ckpt", "curves/custom/a.csv", "compressed/inner/record.json",
    "exported/notes.md",
)  # fmt: skip


def test_a_directory_with_anything_else_stays_as_it_is(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i, other in enumerate([*OTHERS, None]):
        run = failed(root / str(i))
        for name in (*WRITTEN, *([other] if other else [])):
            (run / name).parent.mkdir(exist_ok=True, parents=True)
            (run / name).touch()
    printed = pruned(capsys, "failed")
    for i, other in enumerate(OTHERS):
        assert f"outputs/{i}: left: it holds what no run has written: {other}\n" in printed
        assert all((root / str(i) / path).exists() for path in (*WRITTEN, other))
    assert not (root / str(len(OTHERS))).exists()

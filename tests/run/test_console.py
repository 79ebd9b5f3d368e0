"""Text of files and their names on a terminal: no control character, and no line of its own, gets there."""

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnlab.callbacks.summary import show
from attnlab.config.check import compose
from attnlab.config.compose import one_line
from attnlab.report import runs
from attnlab.run import job
from attnlab.run import record as records
from attnlab.run.console import StderrHandler
from tests.report.conftest import finished

EVIL = "a\x1b[2J\x1b]0;title\x07\rb\x9b\u202ec"
LINES = f"{EVIL}\nerror: forged"


def told(folder: Path) -> None:
    log = logging.getLogger("attnlab.tests.console")
    log.addHandler(handler := StderrHandler())
    try:
        log.warning(f"{EVIL}: %s and %s: %d", folder, ValueError(LINES), 3)
    finally:
        log.removeHandler(handler)


WAYS: dict[str, Callable[[Path], object]] = {
    "runs": lambda folder: runs.main([str(folder)]),
    "runs of nothing": lambda folder: runs.main([str(folder), "task=nothing"]),
    "runs compare": lambda folder: runs.main(["compare", *(str(path.parent) for path in folder.rglob("record.json"))]),
    "runs prune": lambda folder: runs.main(["prune", "failed", str(folder)]),
    "the end of a run": lambda folder: show(records.read(next(folder.rglob("record.json")).parent), folder),
    "a log line": told,
    "an error": lambda folder: print(f"error: {one_line(ValueError(f'{folder}: {LINES}'))}"),
}


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return finished(compose("task=mustc", "attention=mha"), ["task=mustc"])


@pytest.mark.parametrize("way", WAYS)
def test_control_characters_of_files_do_not_reach_the_terminal(
    way: str, record: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = record | {"attention": LINES, "task": LINES, "scale": EVIL, "corpus": LINES, "started": EVIL}
    for name, status in {"one": {}, "two": {"status": "failed", "error": LINES}}.items():
        folder = tmp_path / f"{name}{LINES}"
        folder.mkdir()
        records.write(hostile | {"parameters": {"total": 1, "attention": 1, "trainable": 1}} | status, folder)
    WAYS[way](tmp_path)
    printed = "".join(capsys.readouterr())
    assert printed
    assert not set(printed) & {*map(chr, range(32)), "\x7f", "\x9b", "\u202e"} - {"\n"}
    assert not [line for line in printed.splitlines() if line.startswith("error: forged")]


@pytest.mark.parametrize("terminal", [False, True])
def test_describe_gives_a_terminal_a_table_and_a_pipe_the_record(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    assert job.run(compose("mode=describe"), "command", None) == 0
    out = capsys.readouterr().out
    if not terminal:
        assert json.loads(out)["parameters"]["total"] == 2374716
        return
    for words in ("mustc · mtla · sample", "2,374,716", "per token per layer", "4,900,608"):
        assert words in out
    assert "not run" not in out

"""Output on a terminal: no control characters of files, one bar, complete lines, and an immediate Ctrl-C."""

import io
import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attnlab.callbacks.summary import show
from attnlab.config.check import compose
from attnlab.config.compose import one_line
from attnlab.data.text.tokenizer import Tokenizer
from attnlab.report import runs
from attnlab.run import console, job
from attnlab.run import record as records
from attnlab.run.console import StderrHandler, each, progress, waited
from tests.report.conftest import finished

EVIL = "a\x1b[2J\x1b]0;title\x07\rb\x9b\u202ec"
LINES = f"{EVIL}\nerror: forged"


def logged(folder: Path) -> None:
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
    "a log line": logged,
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


# --- how far a pass over many rows is ----------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    state = SimpleNamespace(now=100.0)
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: state.now))
    return state


def test_without_a_terminal_there_is_a_line_every_thirty_seconds(clock: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for _ in each("speaking", range(8)):
        clock.now += 10
    assert caplog.messages == ["speaking: 3 of 8", "speaking: 6 of 8"]
    caplog.clear()
    with progress("reading", None) as advance:
        clock.now += 31
        advance(5)
        clock.now += 31
        advance(0, what="writing", total=9)
    assert caplog.messages == ["reading: 5", "writing: 5 of 9"]


def test_on_a_terminal_lines_of_the_log_are_not_glued_to_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    log = logging.Logger("tests")
    log.addHandler(StderrHandler())
    with progress("outer", 2) as outer:
        for row in each("inner", range(2)):
            log.info("a line about %d", row)
            outer(1)
    shown = terminal.getvalue()
    assert "outer" in shown and "inner" in shown
    for row in range(2):  # on separate lines: the bar is erased first, and drawn again below
        before, _, after = shown.partition(f"a line about {row}")
        assert before.endswith(("\x1b[2K", "\n")) and after.startswith("\n")
    assert shown.count("\x1b[?25l") == 1  # the cursor is hidden once: one bar, not two


def test_ctrl_c_does_not_wait_for_a_library() -> None:
    """The function returns only long after; so does SentencePiece, which looks for no signals."""
    release = threading.Event()
    timer = threading.Timer(0.1, lambda: signal.raise_signal(signal.SIGINT))
    timer.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        waited("standing", lambda: release.wait(20))
    assert time.monotonic() - began < 5
    release.set()
    timer.join()


def test_texts_that_are_encoded_in_parts_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"the {word} one {i}" for i, word in enumerate(["red", "green", "blue"] * 5)]
    tokenizer = Tokenizer.train(texts, 26)
    expected = tokenizer.encode_all(texts)
    monkeypatch.setattr("attnlab.data.text.tokenizer.BLOCK", 4)
    assert tokenizer.encode_all(texts) == expected == [tokenizer.encode_all([text])[0] for text in texts]

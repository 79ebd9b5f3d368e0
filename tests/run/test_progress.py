"""How far a pass is: lines without a terminal, one bar on a terminal, and nothing that Ctrl-C has to wait for."""

import io
import logging
import signal
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from attnlab.data.text.tokenizer import Tokenizer
from attnlab.run import console as module
from attnlab.run.console import StderrHandler, each, progress, waited


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    state = SimpleNamespace(now=100.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: state.now))
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


def test_what_is_waited_for_gives_its_result_or_its_error() -> None:
    assert waited("adding", lambda: 1 + 1) == 2
    with pytest.raises(RuntimeError, match="no"):
        waited("failing", lambda: (_ for _ in ()).throw(RuntimeError("no")))


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
    assert tokenizer.encode_all(texts) == expected == [tokenizer.encode(text) for text in texts]

"""espeak-ng as this package uses it: the same samples for the same words, and clear errors."""

import signal
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from attnlab.config.check import compose
from attnlab.data.samples.speech import VOICES, Synthesizer, Voice
from attnlab.data.samples.spoken import write_speech_translation
from attnlab.errors import ConfigError, DataError


def speak(text: str, voice: Voice) -> tuple[np.ndarray, int]:
    with Synthesizer() as synthesizer:
        return synthesizer.speak(text, voice), synthesizer.sample_rate


@pytest.mark.parametrize("voice", VOICES, ids=lambda voice: voice.name)
def test_same_words_give_the_same_samples(voice: Voice) -> None:
    samples, rate = speak("The old key is in the house.", voice)
    assert samples.dtype == np.int16
    assert samples.ndim == 1
    assert 1 < len(samples) / rate < 3
    assert np.abs(samples).max() > 5000
    speak("Something else in between.", voice)
    np.testing.assert_array_equal(speak("The old key is in the house.", voice)[0], samples)


def test_synthesizers_do_not_disturb_each_other() -> None:
    voice = VOICES[0]
    with Synthesizer() as alone:
        expected = [alone.speak(text, voice) for text in ("One.", "Two.")]
    with Synthesizer() as first, Synthesizer() as second:
        before = first.speak("One.", voice)
        second.speak("Something else.", VOICES[2])
        after = first.speak("Two.", voice)
    np.testing.assert_array_equal(before, expected[0])
    np.testing.assert_array_equal(after, expected[1])


@pytest.mark.parametrize("name", ["en-us+nobody", "xx-nowhere"])
def test_unknown_voice(name: str) -> None:
    with pytest.raises(DataError, match=f"no voice '{name}'".replace("+", r"\+")):
        speak("Hello.", Voice(name))


def test_missing_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)  # its import fails
    for act in (lambda: speak("Hello.", VOICES[0]), lambda: write_speech_translation(tmp_path)):
        with pytest.raises(DataError, match=r"pip install 'attnlab\[samples\]', or give data_root="):
            act()


def test_a_run_without_the_package_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    for task in ("mustc", "ami", "slurp"):
        with pytest.raises(ConfigError, match=r"^task=\w+: .*pip install 'attnlab\[samples\]', or give data_root="):
            compose(f"task={task}")
    compose("task=mustc", f"data_root={tmp_path}")
    compose("task=mustc", "mode=describe")
    compose("task=wmt16")


def test_interrupt_is_not_lost() -> None:
    """Ctrl-C comes out of `speak`, though nearly all the time is spent inside a callback-driven library call."""
    timer = threading.Timer(0.05, lambda: signal.raise_signal(signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        speak("Twenty-one red flowers. " * 400, VOICES[0])
    timer.join()


def test_broken_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "libespeak-ng.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr("espeakng_loader.get_library_path", lambda: str(broken))
    with pytest.raises(DataError, match="cannot be loaded"):
        speak("Hello.", VOICES[0])


def test_missing_voice_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("espeakng_loader.get_data_path", lambda: str(tmp_path))
    with pytest.raises(DataError, match="voice data"):
        speak("Hello.", VOICES[0])

"""espeak-ng as this package uses it: the same samples for the same words, and clear errors."""

import signal
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from attnlab.data import SLURP, MustC
from attnlab.data.samples.spoken import VOICES, Voice, synthesizer
from attnlab.errors import DataError


def speak(text: str, voice: Voice) -> tuple[np.ndarray, int]:
    with synthesizer() as (say, rate):
        return say(text, voice), rate


@pytest.mark.parametrize("voice", VOICES, ids=lambda voice: voice.name)
def test_same_words_give_the_same_samples(voice: Voice) -> None:
    samples, rate = speak("The old key is in the house.", voice)
    assert samples.dtype == np.int16 and samples.ndim == 1 and 1 < len(samples) / rate < 3
    assert np.abs(samples).max() > 5000
    speak("Something else in between.", voice)
    np.testing.assert_array_equal(speak("The old key is in the house.", voice)[0], samples)


def test_synthesizers_do_not_disturb_each_other() -> None:
    voice = VOICES[0]
    with synthesizer() as (alone, _):
        expected = [alone(text, voice) for text in ("One.", "Two.")]
    with synthesizer() as (first, _), synthesizer() as (second, _):
        before = first("One.", voice)
        second("Something else.", VOICES[2])
        after = first("Two.", voice)
    np.testing.assert_array_equal(before, expected[0])
    np.testing.assert_array_equal(after, expected[1])


def test_missing_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)  # its import fails
    install = r"pip install 'attnlab\[samples\]', or give data_root="
    with pytest.raises(DataError, match=install):
        MustC().sample(tmp_path)


def test_interrupt_is_not_lost(tmp_path: Path) -> None:
    """Ctrl-C ends the writing, though nearly all the time is spent inside a callback-driven library call."""
    timer = threading.Timer(1, lambda: signal.raise_signal(signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        SLURP().sample(tmp_path)
    timer.join()

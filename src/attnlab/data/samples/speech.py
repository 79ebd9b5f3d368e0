"""Synthetic speech by espeak-ng: ctypes on the shared library of the package espeakng-loader."""

from __future__ import annotations

import ctypes
import shutil
import tempfile
import wave
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

import numpy as np
import soxr

from attnlab.errors import DataError

# From espeak-ng's speak_lib.h, the same since 1.48.
SYNCHRONOUS = 2  # the callback runs in the calling thread: about ten times faster than the threaded mode
DONT_EXIT = 0x8000  # report broken data instead of ending the process
POSITION_CHARACTER, UTF8 = 1, 1
RATE, PITCH = 1, 3
UNAVAILABLE = "espeak-ng, the speech synthesizer of the sample corpus, cannot be loaded"
CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


@dataclass(frozen=True)
class Voice:
    """A voice of espeak-ng.

    Args:
        name: a language, optionally with "+variant" (en-us+f1).
        rate: words per minute.
        pitch: 0 to 99.
    """

    name: str
    rate: int = 175
    pitch: int = 50


VOICES = (
    Voice("en-us", rate=190, pitch=50),
    Voice("en-us+m3", rate=190, pitch=45),
    Voice("en-us+f1", rate=190, pitch=50),
    Voice("en-us+f2", rate=190, pitch=45),
)
SAMPLE_RATE = 16000
FRAME = 160  # samples; segments start and end on frames, hundredths of a second that are exact in the YAML
MARGIN = 4  # frames of silence that belong to a segment, on each side
PAUSE = (10, 30)  # frames between two segments: at least, at most
NOISE = 4.0  # standard deviation of the room noise, in 16-bit steps: no frame is all zero


def synthesizer_version() -> str:
    """The version of espeakng-loader.  Raises DataError where it is not installed."""
    try:
        if find_spec("espeakng_loader"):
            return version("espeakng-loader")
    except PackageNotFoundError:
        pass
    raise DataError(f"{UNAVAILABLE}: pip install 'attnlab[samples]', or give data_root=<the directory of a corpus>")


def libraries() -> list[str]:
    """The versions of the libraries that the samples depend on."""
    return [synthesizer_version(), np.__version__, soxr.__version__]


class Synthesizer:
    """An instance of espeak-ng in its initial state, as a context manager.

    espeak-ng keeps phases and flutter positions in static variables that no call resets, so its output depends on all
    calls before. Each synthesizer therefore loads another copy of the library: the same calls on a new synthesizer
    give the same samples, and synthesizers are independent. The copy also gives the voice data a short path
    (espeak-ng cuts paths at 160 bytes).

    Attributes:
        sample_rate: of the samples, in Hz.

    Raises:
        DataError: espeak-ng cannot be loaded.
    """

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="espeak-")
        # An exception inside a callback is lost. Ctrl-C becomes one, but only in the main thread.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="espeak")
        self._samples = bytearray()
        self._callback = CALLBACK(self._collect)  # a reference: the library has only its address
        try:
            self._library, self.sample_rate = self._load(Path(self._directory.name))
        except BaseException:
            self._directory.cleanup()
            raise

    def _load(self, directory: Path) -> tuple[ctypes.CDLL, int]:
        synthesizer_version()
        import espeakng_loader

        data = directory / "espeak-ng-data"
        try:
            library = str(shutil.copy(espeakng_loader.get_library_path(), directory))
            data.symlink_to(espeakng_loader.get_data_path())
            espeak = ctypes.CDLL(library)
        except (OSError, RuntimeError) as error:
            raise DataError(
                f"{UNAVAILABLE} ({error}): reinstall espeakng-loader, set TMPDIR to a directory without noexec, or set "
                "data_root"
            ) from error
        espeak.espeak_Synth.argtypes = [
            *(ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint, ctypes.c_int, ctypes.c_uint, ctypes.c_uint),
            *(ctypes.c_void_p, ctypes.c_void_p),
        ]
        rate = espeak.espeak_Initialize(SYNCHRONOUS, 0, bytes(data), DONT_EXIT)
        if rate <= 0:
            raise DataError(f"espeak-ng cannot read its voice data in {data.resolve()}: reinstall espeakng-loader")
        espeak.espeak_SetSynthCallback(self._callback)
        espeak.espeak_ng_SetRandSeed(ctypes.c_long(1))  # for the breath noise of some voices; by default from the clock
        return espeak, rate

    def _collect(self, samples: ctypes._Pointer[ctypes.c_short] | None, count: int, _events: int | None) -> int:
        if samples and count > 0:
            self._samples += ctypes.string_at(samples, 2 * count)
        return 0

    def speak(self, text: str, voice: Voice) -> np.ndarray:
        """(n,) int16 samples of a text at `self.sample_rate`, mono.

        Raises:
            DataError: there is no such voice, or espeak-ng fails.
        """
        _, _, variant = voice.name.partition("+")
        data = Path(self._directory.name, "espeak-ng-data")
        known = not variant or (data / "voices" / "!v" / variant).is_file()  # espeak-ng ignores an unknown variant
        if not known or self._library.espeak_SetVoiceByName(voice.name.encode()):
            raise DataError(f"espeak-ng {synthesizer_version()} has no voice {voice.name!r}")
        self._library.espeak_SetParameter(RATE, voice.rate, 0)
        self._library.espeak_SetParameter(PITCH, voice.pitch, 0)
        self._samples.clear()
        encoded = text.encode()
        arguments = (encoded, len(encoded) + 1, 0, POSITION_CHARACTER, 0, UTF8, None, None)
        status = self._thread.submit(self._library.espeak_Synth, *arguments).result()
        if status or not self._samples:
            raise DataError(f"espeak-ng could not speak {text!r} with voice {voice.name!r} (status {status})")
        return np.frombuffer(bytes(self._samples), np.int16)

    def close(self) -> None:
        """Unload the library.  Samples remain valid."""
        self._thread.shutdown()
        self._library.espeak_Terminate()
        ctypes.CDLL(None).dlclose(ctypes.c_void_p(self._library._handle))
        self._directory.cleanup()

    def __enter__(self) -> Synthesizer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def voice(number: int, rng: np.random.Generator) -> Voice:
    """The voice of speaker `number`: one of VOICES with a random change of rate and pitch."""
    base = VOICES[number % len(VOICES)]
    return replace(base, rate=base.rate + int(rng.integers(-8, 9)), pitch=base.pitch + int(rng.integers(-5, 6)))


def speak_all(
    voice: Voice, sentences: Sequence[str], rng: np.random.Generator
) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Speak sentences one after another, with pauses and noise, which `rng` draws.

    Returns:
        (n,) int16 samples at `SAMPLE_RATE`, and for each sentence its start and length in frames.

    Raises:
        DataError: espeak-ng cannot be loaded or fails.
    """
    pieces, spans, position = [], [], 0
    with Synthesizer() as synthesizer:
        for sentence in sentences:
            spoken = synthesizer.speak(sentence, voice)
            spoken = soxr.resample(np.trim_zeros(spoken), synthesizer.sample_rate, SAMPLE_RATE)
            pause = int(rng.integers(PAUSE[0], PAUSE[1] + 1))
            length = -(-len(spoken) // FRAME) + 2 * MARGIN
            piece = np.zeros((pause + length) * FRAME, np.int16)
            piece[(pause + MARGIN) * FRAME :][: len(spoken)] = spoken
            pieces.append(piece)
            spans.append((position + pause, length))
            position += pause + length
    talk = np.concatenate([*pieces, np.zeros(PAUSE[1] * FRAME, np.int16)])
    noisy = talk + np.rint(NOISE * rng.standard_normal(len(talk)))
    return np.clip(noisy, -(2**15), 2**15 - 1).astype(np.int16), spans


def write_wav(path: Path, samples: np.ndarray) -> None:
    """Write (n,) int16 `samples` at `SAMPLE_RATE` as mono WAV; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:  # unlike libsndfile, it raises OSError when the disk is full
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes(samples.astype("<i2").tobytes())

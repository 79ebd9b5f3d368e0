"""The sample corpora of synthetic speech, in the layouts of MuST-C v1.0, SLURP and AMI.

espeak-ng speaks them: ctypes on the shared library of the package espeakng-loader.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import wave
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar
from xml.sax.saxutils import escape

import numpy as np
import soundfile
import soxr

from attnlab.data.corpus import SEED
from attnlab.data.samples import draw_splits, sample_texts, write_lines
from attnlab.errors import DataError
from attnlab.run.console import each

# From espeak-ng's speak_lib.h, the same since 1.48.
SYNCHRONOUS = 2  # the callback runs in the calling thread: about ten times faster than the threaded mode
DONT_EXIT = 0x8000  # report broken data instead of ending the process
POSITION_CHARACTER, UTF8 = 1, 1
RATE, PITCH = 1, 3
UNAVAILABLE = "espeak-ng, the speech synthesizer of the sample corpus, cannot be loaded"
CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


class Voice(NamedTuple):
    """A voice of espeak-ng: language+variant, words per minute, pitch from 0 to 99."""

    name: str
    rate: int = 190
    pitch: int = 50


VOICES = (Voice("en-us"), Voice("en-us+m3", pitch=45), Voice("en-us+f1"), Voice("en-us+f2", pitch=45))
SAMPLE_RATE = 16000
FRAME = 160  # samples; segments start and end on frames, hundredths of a second that are exact in the YAML
MARGIN = 4  # frames of silence that belong to a segment, on each side
PAUSE = (10, 30)  # frames between two segments: at least, at most
NOISE = 4.0  # standard deviation of the room noise, in 16-bit steps: no frame is all zero

SEGMENTS = {"train": 2400, "dev": 100, "tst-COMMON": 200}
TALK = {"train": 50, "dev": 25, "tst-COMMON": 50}  # segments in one WAV, spoken by one speaker
PROMPTS = {"train": 1400, "devel": 80, "test": 160}  # one recording each
BLOCK = 40  # prompts of one speaker
MEETINGS = {"train": 24, "dev": 2, "eval": 3}  # of four people with a headset each
TURNS = 14  # of each person
AGENTS = "ABCD"

Key = TypeVar("Key")
Talk = tuple[np.ndarray, list[tuple[int, int]]]  # (n,) int16 samples, and start and length of each sentence in frames
Speak = Callable[[str, Voice], np.ndarray]  # (n,) int16 samples of a text, mono


@contextmanager
def synthesizer() -> Iterator[tuple[Speak, int]]:
    """espeak-ng in its initial state: what speaks, and its sample rate in Hz.

    espeak-ng keeps phases and flutter positions in static variables that no call resets, so its output depends on all
    calls before. Each synthesizer therefore loads another copy of the library: the same calls on a new synthesizer
    give the same samples, and synthesizers are independent. The copy also gives the voice data a short path
    (espeak-ng cuts paths at 160 bytes).

    Raises:
        DataError: espeak-ng cannot be loaded; of `Speak`: the voice is unknown, or espeak-ng fails.
    """
    import espeakng_loader

    spoken = bytearray()

    @CALLBACK
    def collect(samples: Any, count: int, _events: int | None) -> int:
        if samples and count > 0:
            spoken.extend(ctypes.string_at(samples, 2 * count))
        return 0

    def speak(text: str, voice: Voice) -> np.ndarray:
        if library.espeak_SetVoiceByName(voice.name.encode()):
            raise DataError(f"espeak-ng has no voice {voice.name!r}")
        library.espeak_SetParameter(RATE, voice.rate, 0)
        library.espeak_SetParameter(PITCH, voice.pitch, 0)
        spoken.clear()
        encoded = text.encode()
        status = library.espeak_Synth(encoded, len(encoded) + 1, 0, POSITION_CHARACTER, 0, UTF8, None, None)
        if status or not spoken:
            raise DataError(f"espeak-ng could not speak {text!r} with voice {voice.name!r} (status {status})")
        return np.frombuffer(bytes(spoken), np.int16)

    with TemporaryDirectory(prefix="espeak-") as directory:
        data = Path(directory, "espeak-ng-data")
        try:
            path = str(shutil.copy(espeakng_loader.get_library_path(), directory))
            data.symlink_to(espeakng_loader.get_data_path())
            library = ctypes.CDLL(path)
        except (OSError, RuntimeError) as error:
            advice = "reinstall espeakng-loader, set TMPDIR to a directory without noexec, or set data_root"
            raise DataError(f"{UNAVAILABLE} ({error}): {advice}") from error
        library.espeak_Synth.argtypes = [
            *(ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint, ctypes.c_int, ctypes.c_uint, ctypes.c_uint),
            *(ctypes.c_void_p, ctypes.c_void_p),
        ]
        rate: int = library.espeak_Initialize(SYNCHRONOUS, 0, bytes(data), DONT_EXIT)
        if rate <= 0:
            raise DataError(f"espeak-ng cannot read its voice data in {data.resolve()}: reinstall espeakng-loader")
        library.espeak_SetSynthCallback(collect)
        library.espeak_ng_SetRandSeed(ctypes.c_long(1))  # of the breath noise; by default from the clock
        try:
            yield speak, rate
        finally:
            library.espeak_Terminate()
            ctypes.CDLL(None).dlclose(ctypes.c_void_p(library._handle))


def speak_all(voice: Voice, sentences: Sequence[str], rng: np.random.Generator) -> Talk:
    """Speak sentences at `SAMPLE_RATE`, with pauses and noise drawn by `rng`.  DataError: espeak-ng fails."""
    pieces, spans, position = [], [], 0
    with synthesizer() as (speak, rate):
        for sentence in sentences:
            spoken = soxr.resample(np.trim_zeros(speak(sentence, voice)), rate, SAMPLE_RATE)
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


# --- corpora -------------------------------------------------------------------------------------------------------


def sentences() -> dict[str, list[list[str]]]:
    """[English, German] of each segment of the speech-translation corpus, by split."""
    return draw_splits(sample_texts("translations"), SEGMENTS, lambda pair: pair[0], _words)


def _words(texts: Sequence[str]) -> list[str]:
    return re.findall(r"\w+", " ".join(texts).lower())


def _spoken(groups: Sequence[tuple[Key, Sequence[str]]]) -> Iterator[tuple[int, Key, Talk]]:
    """The number from 1, the key and the speech of each group of sentences, each by another speaker."""

    def talk(number: int, texts: Sequence[str]) -> Talk:
        rng = np.random.default_rng([SEED, number])
        voice = VOICES[number % len(VOICES)]
        rate, pitch = voice.rate + int(rng.integers(-8, 9)), voice.pitch + int(rng.integers(-5, 6))
        return speak_all(Voice(voice.name, rate, pitch), texts, rng)

    pool = ThreadPoolExecutor(os.cpu_count())  # in a callback of the library, the main thread would lose Ctrl-C
    try:
        talks = pool.map(talk, range(1, len(groups) + 1), [texts for _, texts in groups])
        for number, (key, _) in enumerate(each("synthesizing the sample speech", groups), 1):
            yield number, key, next(talks)
    finally:
        pool.shutdown(cancel_futures=True)


def _blocks(items: Sequence[Key], size: int) -> Iterator[Sequence[Key]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _seconds(frames: int) -> float:
    return frames * FRAME / SAMPLE_RATE


def _write_mustc(root: Path) -> None:
    splits = sentences()
    segments: dict[str, list[str]] = {split: [] for split in splits}
    talks = [
        (split, [english for english, _ in talk]) for split in splits for talk in _blocks(splits[split], TALK[split])
    ]
    for number, split, (samples, spans) in _spoken(talks):
        name = f"ted_{number}.wav"
        write_wav(root / "en-de" / "data" / split / "wav" / name, samples)
        segments[split] += [
            f"- {{duration: {_seconds(length):.6f}, offset: {_seconds(start):.6f}, "
            f"speaker_id: spk.{number}, wav: {name}}}"
            for start, length in spans
        ]
    for split, lines in segments.items():
        text = root / "en-de" / "data" / split / "txt"
        write_lines(text / f"{split}.yaml", lines)
        for column, language in enumerate(("en", "de")):
            write_lines(text / f"{split}.{language}", [pair[column] for pair in splits[split]])


def _write_slurp(root: Path) -> None:
    audio = root / "audio" / "slurp_real"
    audio.mkdir(parents=True)
    prompts = sample_texts("commands")
    blocks = [(split, block) for split, count in PROMPTS.items() for block in _blocks([*islice(prompts, count)], BLOCK)]
    lines: dict[str, list[str]] = {split: [] for split in [*PROMPTS, "train_synthetic"]}
    metadata: dict[str, Any] = {}
    talks = [((split, block), [sentence for _, sentence in block]) for split, block in blocks]
    for block, (split, items), (samples, spans) in _spoken(talks):
        for (intent, sentence), (start, length) in zip(items, spans, strict=True):
            number = len(metadata) + 1
            file = f"audio-{number:06d}-headset.flac"
            part = samples[start * FRAME : (start + length) * FRAME]
            soundfile.write(audio / file, part, SAMPLE_RATE, "PCM_16", format="FLAC")
            scenario, _, action = intent.partition("_")
            prompt = {
                "slurp_id": number, "sentence": sentence, "sentence_annotation": sentence, "intent": intent,
                "action": action, "scenario": scenario, "entities": [],
                "tokens": [{"surface": word, "id": i} for i, word in enumerate(sentence.split())],
                "recordings": [{"file": file, "wer": 0, "ent_wer": 0, "status": "correct"}],
            }  # fmt: skip
            lines[split].append(json.dumps(prompt))
            recording = {"usrid": f"SY-{block:03d}", "recid": file[6:-5], "status": "correct"}
            metadata[str(number)] = {"recordings": {file: recording}, "sentence_normalised": sentence}
    for split, text in lines.items():
        write_lines(root / "dataset" / "slurp" / f"{split}.jsonl", text)
    write_lines(root / "dataset" / "slurp" / "metadata.json", [json.dumps(metadata)])


def _write_ami(root: Path) -> None:
    turns = (text for (text,) in sample_texts("turns"))
    headsets: list[tuple[tuple[str, int], list[str]]] = []
    for i, (split, count) in enumerate(MEETINGS.items()):
        meetings = [f"SM{i}{number:03d}a" for number in range(1, count + 1)]
        write_lines(root / "splits" / f"split_{split}.orig", meetings)
        headsets += [((name, channel), [*islice(turns, TURNS)]) for name in meetings for channel in range(len(AGENTS))]
    corpus = ["<meetings>"]
    for number, (meeting, channel), (samples, spans) in _spoken(headsets):
        agent, texts = AGENTS[channel], headsets[number - 1][1]
        write_wav(root / meeting / "audio" / f"{meeting}.Headset-{channel}.wav", samples)
        elements: dict[str, list[str]] = {"segments": [], "words": []}
        for i, (text, (first, length)) in enumerate(zip(texts, spans, strict=True)):
            start, end = _seconds(first), _seconds(first + length)
            place = f'transcriber_start="{start:.2f}" transcriber_end="{end:.2f}"'
            segment = f'<segment nite:id="{meeting}.{agent}.segment{i}" channel="{channel}" {place}/>'
            elements["segments"].append(segment)
            elements["words"] += _elements(text, start, end)
        for kind, lines in elements.items():
            root_element = f'<nite:root nite:id="{meeting}.{agent}.{kind}" xmlns:nite="http://nite.sourceforge.net/">'
            lines = ['<?xml version="1.0" encoding="UTF-8"?>', root_element, *lines, "</nite:root>"]
            write_lines(root / kind / f"{meeting}.{agent}.{kind}.xml", lines)
        corpus += [f'<meeting observation="{meeting}">'] if channel == 0 else []
        corpus += [f'<speaker nxt_agent="{agent}" global_name="SYN{number:03d}" channel="{channel}"/>']
        corpus += ["</meeting>"] if channel == len(AGENTS) - 1 else []
    write_lines(root / "corpusResources" / "meetings.xml", [*corpus, "</meetings>"])


def _elements(text: str, start: float, end: float) -> Iterator[str]:
    """The XML elements of the words and the full stop of a turn, whose time is divided by numbers of letters."""
    words, at = text.split(), start
    total = sum(map(len, words))
    for word in words:
        after = at + (end - start) * len(word) / total
        yield f'<w starttime="{at:.3f}" endtime="{min(after, end):.3f}">{escape(word)}</w>'
        at = after
    yield f'<w starttime="{end:.3f}" endtime="{end:.3f}" punc="true">.</w>'


WRITERS = {"speech-translation": _write_mustc, "spoken-commands": _write_slurp, "meetings": _write_ami}

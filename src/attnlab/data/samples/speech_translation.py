"""The embedded speech-translation corpus: sentences of `grammar`, spoken by espeak-ng, in the layout of MuST-C v1.0."""

from __future__ import annotations

import random
import wave
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import soxr

from attnlab.data.samples import grammar, keeping, speech
from attnlab.data.samples.grammar import Grammar, Sentence
from attnlab.data.samples.keeping import fingerprint, write_lines
from attnlab.data.samples.speech import Synthesizer, Voice
from attnlab.run.cache import stored_files
from attnlab.run.progress import each

SIZES = {"train": 2400, "dev": 100, "tst-COMMON": 200}  # segments
TALK_SIZE = {"train": 50, "dev": 25, "tst-COMMON": 50}  # segments in one WAV, spoken by one speaker
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


def write_speech_translation(cache_dir: Path, seed: int = 1) -> Path:
    """Write the corpus, unless it exists.  The same seed gives the same bytes.

    Args:
        cache_dir: the directory that samples are stored in.
        seed: of the sentences and voices.

    Returns:
        The directory that holds `en-de`.

    Raises:
        DataError: espeak-ng cannot be loaded, or the corpus cannot be written.
    """
    version = fingerprint([grammar, speech, keeping, __file__], seed)
    return stored_files(Path(cache_dir) / f"speech-translation-{version}", lambda root: _write(root, seed))


def split_sentences(seed: int) -> dict[str, list[Sentence]]:
    """The sentences of each split.

    No sentence occurs twice in all splits together; every word of dev and tst-COMMON, in both languages, is in train.

    Args:
        seed: of the sentences.
    """
    unseen = _distinct(Grammar(random.Random(seed)).sentences())
    splits = {"train": [next(unseen) for _ in range(SIZES["train"])]}
    known = {word for sentence in splits["train"] for word in _words(sentence)}
    for split in ("dev", "tst-COMMON"):
        fitting = (sentence for sentence in unseen if known.issuperset(_words(sentence)))
        splits[split] = [next(fitting) for _ in range(SIZES[split])]
    return splits


def _distinct(sentences: Iterator[Sentence]) -> Iterator[Sentence]:
    seen = set()
    for sentence in sentences:
        if sentence.english not in seen:
            seen.add(sentence.english)
            yield sentence


def _words(sentence: Sentence) -> Iterator[tuple[str, str]]:
    yield from (("en", word) for word in sentence.english_words)
    yield from (("de", word) for word in sentence.german_words)


# --- writing -------------------------------------------------------------------------------------------------------


def _write(root: Path, seed: int) -> None:
    splits = split_sentences(seed)
    talks = [
        (split, sentences[start : start + TALK_SIZE[split]])
        for split, sentences in splits.items()
        for start in range(0, len(sentences), TALK_SIZE[split])
    ]
    segments: dict[str, list[str]] = {split: [] for split in splits}
    for split in splits:
        for kind in ("wav", "txt"):
            (root / "en-de" / "data" / split / kind).mkdir(parents=True)
    for number, (split, sentences) in enumerate(speaking(talks), 1):
        rng = np.random.default_rng([seed, number])
        samples, spans = speak_all(speaker(number, rng), [sentence.english for sentence in sentences], rng)
        name = f"ted_{number}.wav"
        write_wav(root / "en-de" / "data" / split / "wav" / name, samples)
        segments[split] += [
            f"- {{duration: {length * FRAME / SAMPLE_RATE:.6f}, offset: {start * FRAME / SAMPLE_RATE:.6f}, "
            f"speaker_id: spk.{number}, wav: {name}}}"
            for start, length in spans
        ]
    for split, sentences in splits.items():
        text = root / "en-de" / "data" / split / "txt"
        write_lines(text / f"{split}.yaml", segments[split])
        write_lines(text / f"{split}.en", [sentence.english for sentence in sentences])
        write_lines(text / f"{split}.de", [sentence.german for sentence in sentences])


T = TypeVar("T")


def speaking(parts: Sequence[T]) -> Iterable[T]:
    """Iterate over `parts`, and show how far that is."""
    return each("synthesizing the sample speech", parts)


def speaker(number: int, rng: np.random.Generator) -> Voice:
    """The voice of speaker `number`: one of VOICES with a random change of rate and pitch.

    Args:
        number: from 0.
        rng: what the change is drawn with.
    """
    base = VOICES[number % len(VOICES)]
    return replace(base, rate=base.rate + int(rng.integers(-8, 9)), pitch=base.pitch + int(rng.integers(-5, 6)))


def speak_all(
    voice: Voice, sentences: Sequence[str], rng: np.random.Generator
) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Speak sentences one after another, with pauses and noise.

    Args:
        voice: the voice.
        sentences: the texts.
        rng: of pauses and noise.

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
    """Write (n,) int16 samples at `SAMPLE_RATE` as mono WAV.

    Args:
        path: the file.
        samples: (n,) int16.
    """
    with wave.open(str(path), "wb") as file:  # unlike libsndfile, it raises OSError when the disk is full
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes(samples.astype("<i2").tobytes())

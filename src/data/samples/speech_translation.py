"""The embedded speech-translation corpus: grammar, spoken by espeak-ng, written in the layout of MuST-C v1.0."""

from __future__ import annotations

import hashlib
import json
import random
import tempfile
import wave
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import soxr
from rich.console import Console
from rich.progress import track

from src.data.samples import grammar, speech
from src.data.samples.grammar import Grammar, Sentence
from src.data.samples.speech import Synthesizer, Voice, synthesizer_version
from src.errors import DataError

SIZES = {"train": 2400, "dev": 100, "tst-COMMON": 200}  # segments
TALK_SIZE = {"train": 50, "dev": 25, "tst-COMMON": 50}  # segments in one WAV, spoken by one speaker
VOICES = (
    Voice("en-us", rate=190, pitch=50),
    Voice("en-us+m3", rate=190, pitch=45),
    Voice("en-us+f1", rate=190, pitch=50),
    Voice("en-us+f2", rate=190, pitch=45),
)
SAMPLE_RATE = 16000
FRAME = 160  # samples; segments start and end on whole frames, hundredths of a second that the YAML writes exactly
MARGIN = 4  # frames of silence that belong to a segment, on each side
PAUSE = (10, 30)  # frames between two segments: at least, at most
NOISE = 4.0  # standard deviation of the room noise, in 16-bit steps: no stretch is digitally silent
MANIFEST = "manifest.json"


def write_speech_translation(cache_dir: Path, seed: int = 1) -> Path:
    """The directory that holds `en-de`, in the layout of MuST-C; written under `cache_dir` unless it is there already.

    The same seed gives the same bytes. A corpus that is incomplete or damaged is written anew; a half-written one is
    never seen under its name, also when several processes write at once.

    Raises DataError where espeak-ng cannot be loaded or the corpus cannot be written.
    """
    target = Path(cache_dir) / f"speech-translation-{_fingerprint(seed)}"
    try:
        if _is_intact(target):
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as directory:
            fresh = Path(directory, "fresh")
            _write(fresh, seed)
            _install(fresh, target, aside=Path(directory, "damaged"))
    except OSError as error:
        raise DataError(f"the sample corpus cannot be written to {target}: {error.strerror or error}") from error
    return target


def split_sentences(seed: int) -> dict[str, list[Sentence]]:
    """No sentence twice in all; every word of dev and tst-COMMON, English or German, occurs in train."""
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


def _fingerprint(seed: int) -> str:
    """Changes with everything that the bytes of the corpus depend on: this code, the synthesizer, the seed."""
    sources = [Path(str(module)).read_bytes() for module in (grammar.__file__, speech.__file__, __file__)]
    versions = [synthesizer_version(), np.__version__, soxr.__version__]
    return hashlib.sha256(repr((sources, versions, seed)).encode()).hexdigest()[:12]


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
    console = Console(stderr=True)
    progress = track(
        talks, "Speaking the sample corpus", console=console, transient=True, disable=not console.is_terminal
    )
    for number, (split, sentences) in enumerate(progress, 1):
        rng = np.random.default_rng([seed, number])
        base = VOICES[number % len(VOICES)]
        voice = replace(base, rate=base.rate + int(rng.integers(-8, 9)), pitch=base.pitch + int(rng.integers(-5, 6)))
        samples, spans = _speak_talk(voice, sentences, rng)
        name = f"ted_{number}.wav"
        _write_wav(root / "en-de" / "data" / split / "wav" / name, samples)
        segments[split] += [
            f"- {{duration: {length * FRAME / SAMPLE_RATE:.6f}, offset: {start * FRAME / SAMPLE_RATE:.6f}, "
            f"speaker_id: spk.{number}, wav: {name}}}"
            for start, length in spans
        ]
    for split, sentences in splits.items():
        text = root / "en-de" / "data" / split / "txt"
        _write_lines(text / f"{split}.yaml", segments[split])
        _write_lines(text / f"{split}.en", [sentence.english for sentence in sentences])
        _write_lines(text / f"{split}.de", [sentence.german for sentence in sentences])
    manifest = {file.relative_to(root).as_posix(): _state(file) for file in sorted(root.rglob("*")) if file.is_file()}
    (root / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def _speak_talk(
    voice: Voice, sentences: list[Sentence], rng: np.random.Generator
) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """int16 samples at `SAMPLE_RATE`, and for each sentence its start and length in frames."""
    pieces, spans, position = [], [], 0
    with Synthesizer() as synthesizer:
        for sentence in sentences:
            spoken = synthesizer.speak(sentence.english, voice)
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


def _write_wav(path: Path, samples: np.ndarray) -> None:
    with wave.open(str(path), "wb") as file:  # unlike libsndfile, it raises OSError when the disk is full
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes(samples.astype("<i2").tobytes())


def _write_lines(path: Path, lines: list[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")


# --- keeping -------------------------------------------------------------------------------------------------------


def _state(file: Path) -> dict[str, int | str]:
    """Size, and for the small text files the content as well."""
    state: dict[str, int | str] = {"size": file.stat().st_size}
    if file.suffix != ".wav":
        state["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    return state


def _is_intact(root: Path) -> bool:
    try:
        manifest = json.loads((root / MANIFEST).read_text(encoding="utf-8"))
        return bool(manifest) and all(_state(root / name) == state for name, state in manifest.items())
    except (FileNotFoundError, NotADirectoryError, ValueError, AttributeError):
        return False  # what is missing or garbled is written anew


def _install(fresh: Path, target: Path, aside: Path) -> None:
    """Puts `fresh` in the place of a missing or damaged `target`; a good one of another process stays."""
    if _is_intact(target):
        return
    if target.exists():
        target.rename(aside)
    try:
        fresh.rename(target)
    except OSError:
        if not _is_intact(target):  # not another process that was faster
            raise

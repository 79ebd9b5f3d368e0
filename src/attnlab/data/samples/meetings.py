"""The embedded corpus of meetings: four people with a headset each, spoken by espeak-ng, in the layout of AMI."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np

from attnlab.data.samples import commands, keeping, speech, speech_translation
from attnlab.data.samples.commands import fill
from attnlab.data.samples.keeping import fingerprint, write_lines
from attnlab.data.samples.speech_translation import FRAME, SAMPLE_RATE, speak_all, speaker, speaking, write_wav
from attnlab.run.cache import stored_files

MEETINGS = {"train": 24, "dev": 2, "eval": 3}
TURNS = 14  # of each speaker
AGENTS = "ABCD"

TEMPLATES = (
    "okay", "yeah", "right", "mm hmm", "uh huh", "yeah i think so", "so what about the {part}",
    "i think the {part} should be {look}", "we could make the {part} {look}", "the {part} is too {look}",
    "do we need a {part}", "people want a {look} {part}", "can you draw the {part}", "what does the {part} cost",
    "it costs {number} euros", "we have {number} minutes left", "{name} will present the {part}",
    "{name} said the {part} was {look}", "let us talk about the {part} now", "maybe a {look} {part} is better",
    "that is not {look} enough", "shall we move on", "i agree with {name}", "the next meeting is in {number} minutes",
)  # fmt: skip
WORDS = {
    "part": ("button", "remote", "case", "battery", "display", "price", "design", "wheel", "light", "logo"),
    "look": ("small", "yellow", "simple", "round", "cheap", "big", "soft", "new", "dark"),
    "number": ("two", "three", "five", "ten", "twelve", "twenty", "fifty"),
    "name": ("anna", "peter", "laura", "david"),
}


def write_meetings(cache_dir: Path, seed: int = 1) -> Path:
    """Write the corpus, unless it exists.

    Args:
        cache_dir: the directory that samples are stored in.
        seed: of the sentences and voices.

    Returns:
        The directory with `words`, `segments` and a folder of audio for each meeting.

    Raises:
        DataError: espeak-ng cannot be loaded, or the corpus cannot be written.
    """
    version = fingerprint([speech, speech_translation, commands, keeping, __file__], seed)
    return stored_files(Path(cache_dir) / f"meetings-{version}", lambda root: _write(root, seed))


def turns(rng: random.Random) -> Iterator[str]:
    """Sentences of a meeting, without end.

    Args:
        rng: what they are drawn with.
    """
    while True:
        yield fill(rng.choice(TEMPLATES), lambda name: rng.choice(WORDS[name]))


def _write(root: Path, seed: int) -> None:
    said = turns(random.Random(seed))
    names = {
        split: [f"SM{i}{n:03d}a" for n in range(1, count + 1)] for i, (split, count) in enumerate(MEETINGS.items())
    }
    corpus, number = [], 0
    headsets = [(m, channel) for meetings in names.values() for m in meetings for channel in range(len(AGENTS))]
    for number, (meeting, channel) in enumerate(speaking(headsets), 1):
        agent = AGENTS[channel]
        rng = np.random.default_rng([seed, number])
        texts = [next(said) for _ in range(TURNS)]
        samples, spans = speak_all(speaker(number, rng), texts, rng)
        (root / meeting / "audio").mkdir(parents=True, exist_ok=True)
        write_wav(root / meeting / "audio" / f"{meeting}.Headset-{channel}.wav", samples)
        segments, words = [], []
        for i, (text, (first, length)) in enumerate(zip(texts, spans, strict=True)):
            start, end = first * FRAME / SAMPLE_RATE, (first + length) * FRAME / SAMPLE_RATE
            place = f'transcriber_start="{start:.2f}" transcriber_end="{end:.2f}"'
            segments.append(f'<segment nite:id="{meeting}.{agent}.segment{i}" channel="{channel}" {place}/>')
            words += _words(text, start, end)
        for kind, lines in (("segments", segments), ("words", words)):
            write_lines(
                root / kind / f"{meeting}.{agent}.{kind}.xml",
                [
                    '<?xml version="1.0" encoding="UTF-8"?>',
                    f'<nite:root nite:id="{meeting}.{agent}.{kind}" xmlns:nite="http://nite.sourceforge.net/">',
                    *lines,
                    "</nite:root>",
                ],
            )
        if channel == 0:
            corpus.append(f'<meeting observation="{meeting}">')
        corpus.append(f'<speaker nxt_agent="{agent}" global_name="SYN{number:03d}" channel="{channel}"/>')
        if channel == len(AGENTS) - 1:
            corpus.append("</meeting>")
    write_lines(root / "corpusResources" / "meetings.xml", ["<meetings>", *corpus, "</meetings>"])
    for split, meetings in names.items():
        write_lines(root / "splits" / f"split_{split}.orig", meetings)


def _words(text: str, start: float, end: float) -> list[str]:
    """The XML elements of the words and the full stop of a turn, whose time is divided by numbers of letters."""
    words = text.split()
    total, at, found = sum(map(len, words)), start, []
    for word in words:
        after = at + (end - start) * len(word) / total
        found.append(f'<w starttime="{at:.3f}" endtime="{min(after, end):.3f}">{escape(word)}</w>')
        at = after
    return [*found, f'<w starttime="{end:.3f}" endtime="{end:.3f}" punc="true">.</w>']

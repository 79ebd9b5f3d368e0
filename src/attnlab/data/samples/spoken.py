"""The sample corpora of synthetic speech, in the layouts of MuST-C v1.0, SLURP and AMI."""

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from xml.sax.saxutils import escape

import numpy as np
import soundfile

from attnlab.data.samples import draw_splits, sample_corpus, write_lines
from attnlab.data.samples.grammar import Grammar, Sentence
from attnlab.data.samples.speech import FRAME, SAMPLE_RATE, libraries, speak_all, voice, write_wav
from attnlab.run.progress import each

SEGMENTS = {"train": 2400, "dev": 100, "tst-COMMON": 200}
TALK = {"train": 50, "dev": 25, "tst-COMMON": 50}  # segments in one WAV, spoken by one speaker
PROMPTS = {"train": 1400, "devel": 80, "test": 160}  # one recording each
BLOCK = 40  # prompts of one speaker
MEETINGS = {"train": 24, "dev": 2, "eval": 3}  # of four people with a headset each
TURNS = 14  # of each person
AGENTS = "ABCD"

COMMANDS = {
    "alarm_set": ("wake me up at {hour}", "set an alarm for {hour} {day}", "i need an alarm at {hour}"),
    "alarm_remove": ("remove my alarm for {hour}", "cancel the alarm {day}", "turn off the {hour} alarm"),
    "weather_query": ("what is the weather in {city}", "will it rain {day}", "how cold is it in {city} {day}"),
    "play_music": ("play some {music} music", "i want to hear {music}", "put on a {music} song"),
    "iot_hue_lightoff": ("turn off the light in the {room}", "make the {room} dark", "lights out in the {room}"),
    "iot_hue_lighton": ("turn on the light in the {room}", "i need light in the {room}", "switch the {room} lights on"),
    "lists_createoradd": ("add {thing} to my list", "put {thing} on the shopping list", "remember to buy {thing}"),
    "lists_remove": ("take {thing} off my list", "delete {thing} from the shopping list", "i do not need {thing} now"),
    "calendar_set": ("meet {person} {day} at {hour}", "add a meeting with {person} {day}", "plan lunch with {person}"),
    "email_sendemail": ("send an email to {person}", "write to {person} about {thing}", "email {person} {day}"),
    "transport_taxi": ("book a taxi to {city}", "i need a cab at {hour}", "get me a taxi to {city} {day}"),
    "cooking_recipe": ("how do i cook {thing}", "find a recipe with {thing}", "what can i make from {thing}"),
}
COMMAND_WORDS = {
    "hour": ("six", "seven", "eight", "nine", "ten", "noon"),
    "day": ("today", "tomorrow", "on monday", "on friday", "this evening"),
    "city": ("london", "paris", "berlin", "boston", "rome"),
    "music": ("jazz", "rock", "piano", "dance", "folk"),
    "room": ("kitchen", "bedroom", "garage", "bathroom", "hall"),
    "thing": ("milk", "rice", "eggs", "bread", "apples", "cheese"),
    "person": ("anna", "peter", "mary", "john", "my sister"),
}
TURN_TEMPLATES = (
    "okay", "yeah", "right", "mm hmm", "uh huh", "yeah i think so", "so what about the {part}",
    "i think the {part} should be {look}", "we could make the {part} {look}", "the {part} is too {look}",
    "do we need a {part}", "people want a {look} {part}", "can you draw the {part}", "what does the {part} cost",
    "it costs {number} euros", "we have {number} minutes left", "{name} will present the {part}",
    "{name} said the {part} was {look}", "let us talk about the {part} now", "maybe a {look} {part} is better",
    "that is not {look} enough", "shall we move on", "i agree with {name}", "the next meeting is in {number} minutes",
)  # fmt: skip
TURN_WORDS = {
    "part": ("button", "remote", "case", "battery", "display", "price", "design", "wheel", "light", "logo"),
    "look": ("small", "yellow", "simple", "round", "cheap", "big", "soft", "new", "dark"),
    "number": ("two", "three", "five", "ten", "twelve", "twenty", "fifty"),
    "name": ("anna", "peter", "laura", "david"),
}

Key = TypeVar("Key")
Talk = tuple[np.ndarray, list[tuple[int, int]]]  # (n,) int16 samples, and start and length of each sentence in frames


def write_speech_translation(cache_dir: Path, seed: int = 1) -> Path:
    """The directory that holds `en-de`, MuST-C's layout, written unless it exists."""
    return sample_corpus(cache_dir, "speech-translation", [seed, libraries()], lambda root: _write_mustc(root, seed))


def write_commands(cache_dir: Path, seed: int = 1) -> Path:
    """The directory with `dataset` and `audio`, SLURP's layout, written unless it exists."""
    return sample_corpus(cache_dir, "spoken-commands", [seed, libraries()], lambda root: _write_slurp(root, seed))


def write_meetings(cache_dir: Path, seed: int = 1) -> Path:
    """The directory with `words`, `segments` and audio of meetings, AMI's layout, written unless it exists."""
    return sample_corpus(cache_dir, "meetings", [seed, libraries()], lambda root: _write_ami(root, seed))


def sentences(seed: int) -> dict[str, list[Sentence]]:
    """The sentences of the speech-translation corpus by split."""
    drawn = Grammar(random.Random(seed)).sentences()
    return draw_splits(drawn, SEGMENTS, lambda sentence: sentence.english, _both_languages)


def _both_languages(sentence: Sentence) -> list[tuple[str, str]]:
    return [("en", word) for word in sentence.english_words] + [("de", word) for word in sentence.german_words]


def prompts(seed: int) -> dict[str, list[tuple[str, str]]]:
    """(class, sentence) pairs by split; a few thousand exist, some with a polite word before or after."""
    rng = random.Random(seed)

    def drawn() -> Iterator[tuple[str, str]]:
        while True:
            intent = rng.choice(list(COMMANDS))
            sentence = _filled(rng.choice(COMMANDS[intent]), COMMAND_WORDS, rng)
            yield (
                intent,
                rng.choice(("", "", "please ", "hey ")) + sentence + rng.choice(("", "", " please", " thanks")),
            )

    return draw_splits(drawn(), PROMPTS, lambda prompt: prompt[1], lambda prompt: prompt[1].split())


def _filled(template: str, words: Mapping[str, Sequence[str]], rng: random.Random) -> str:
    """`template` with one of `words` for each {name}."""
    return re.sub(r"\{(\w+)\}", lambda match: rng.choice(words[match[1]]), template)


def _spoken(groups: Sequence[tuple[Key, Sequence[str]]], seed: int) -> Iterator[tuple[int, Key, Talk]]:
    """The number from 1, the key and the speech of each group of sentences, each by another speaker."""
    for number, (key, texts) in enumerate(each("synthesizing the sample speech", groups), 1):
        rng = np.random.default_rng([seed, number])
        yield number, key, speak_all(voice(number, rng), texts, rng)


def _blocks(items: Sequence[Key], size: int) -> Iterator[Sequence[Key]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _seconds(frames: int) -> float:
    return frames * FRAME / SAMPLE_RATE


def _write_mustc(root: Path, seed: int) -> None:
    splits = sentences(seed)
    segments: dict[str, list[str]] = {split: [] for split in splits}
    talks = [(split, [x.english for x in talk]) for split in splits for talk in _blocks(splits[split], TALK[split])]
    for number, split, (samples, spans) in _spoken(talks, seed):
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
        write_lines(text / f"{split}.en", [sentence.english for sentence in splits[split]])
        write_lines(text / f"{split}.de", [sentence.german for sentence in splits[split]])


def _write_slurp(root: Path, seed: int) -> None:
    audio = root / "audio" / "slurp_real"
    audio.mkdir(parents=True)
    blocks = [(split, block) for split, items in prompts(seed).items() for block in _blocks(items, BLOCK)]
    lines: dict[str, list[str]] = {split: [] for split in PROMPTS}
    metadata: dict[str, Any] = {}
    talks = [((split, block), [sentence for _, sentence in block]) for split, block in blocks]
    for block, (split, items), (samples, spans) in _spoken(talks, seed):
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
    for split, text in (lines | {"train_synthetic": []}).items():
        write_lines(root / "dataset" / "slurp" / f"{split}.jsonl", text)
    write_lines(root / "dataset" / "slurp" / "metadata.json", [json.dumps(metadata)])


def _write_ami(root: Path, seed: int) -> None:
    rng = random.Random(seed)
    headsets: list[tuple[tuple[str, int], list[str]]] = []
    for i, (split, count) in enumerate(MEETINGS.items()):
        meetings = [f"SM{i}{number:03d}a" for number in range(1, count + 1)]
        write_lines(root / "splits" / f"split_{split}.orig", meetings)
        for meeting in meetings:
            for channel in range(len(AGENTS)):
                turns = [_filled(rng.choice(TURN_TEMPLATES), TURN_WORDS, rng) for _ in range(TURNS)]
                headsets.append(((meeting, channel), turns))
    corpus = ["<meetings>"]
    for number, (meeting, channel), (samples, spans) in _spoken(headsets, seed):
        agent, turns = AGENTS[channel], headsets[number - 1][1]
        write_wav(root / meeting / "audio" / f"{meeting}.Headset-{channel}.wav", samples)
        elements: dict[str, list[str]] = {"segments": [], "words": []}
        for i, (text, (first, length)) in enumerate(zip(turns, spans, strict=True)):
            start, end = _seconds(first), _seconds(first + length)
            place = f'transcriber_start="{start:.2f}" transcriber_end="{end:.2f}"'
            segment = f'<segment nite:id="{meeting}.{agent}.segment{i}" channel="{channel}" {place}/>'
            elements["segments"].append(segment)
            elements["words"] += _words(text, start, end)
        for kind, lines in elements.items():
            root_element = f'<nite:root nite:id="{meeting}.{agent}.{kind}" xmlns:nite="http://nite.sourceforge.net/">'
            lines = ['<?xml version="1.0" encoding="UTF-8"?>', root_element, *lines, "</nite:root>"]
            write_lines(root / kind / f"{meeting}.{agent}.{kind}.xml", lines)
        corpus += [f'<meeting observation="{meeting}">'] if channel == 0 else []
        corpus += [f'<speaker nxt_agent="{agent}" global_name="SYN{number:03d}" channel="{channel}"/>']
        corpus += ["</meeting>"] if channel == len(AGENTS) - 1 else []
    write_lines(root / "corpusResources" / "meetings.xml", [*corpus, "</meetings>"])


def _words(text: str, start: float, end: float) -> Iterator[str]:
    """The XML elements of the words and the full stop of a turn, whose time is divided by numbers of letters."""
    words, at = text.split(), start
    total = sum(map(len, words))
    for word in words:
        after = at + (end - start) * len(word) / total
        yield f'<w starttime="{at:.3f}" endtime="{min(after, end):.3f}">{escape(word)}</w>'
        at = after
    yield f'<w starttime="{end:.3f}" endtime="{end:.3f}" punc="true">.</w>'

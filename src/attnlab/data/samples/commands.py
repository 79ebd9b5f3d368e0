"""The embedded corpus of spoken commands: a dozen classes, spoken by espeak-ng, written in the layout of SLURP."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import soundfile

from attnlab.data.samples import keeping, speech, speech_translation
from attnlab.data.samples.keeping import fingerprint, write_lines
from attnlab.data.samples.speech_translation import FRAME, SAMPLE_RATE, speak_all, speaker, speaking
from attnlab.run.cache import stored_files

SIZES = {"train": 1400, "devel": 80, "test": 160}  # prompts, one recording each
BLOCK = 40  # prompts of one speaker

TEMPLATES = {
    "alarm_set": ("wake me up at {hour}", "set an alarm for {hour} {day}", "i need an alarm at {hour}"),
    "alarm_remove": ("remove my alarm for {hour}", "cancel the alarm {day}", "turn off the {hour} alarm"),
    "weather_query": ("what is the weather in {city}", "will it rain {day}", "how cold is it in {city} {day}"),
    "play_music": ("play some {music} music", "i want to hear {music}", "put on a {music} song"),
    "iot_hue_lightoff": ("turn off the light in the {room}", "make the {room} dark", "lights out in the {room}"),
    "iot_hue_lighton": ("turn on the light in the {room}", "i need light in the {room}", "switch the {room} lights on"),
    "lists_createoradd": ("add {thing} to my list", "put {thing} on the shopping list", "remember to buy {thing}"),
    "lists_remove": ("take {thing} off my list", "delete {thing} from the shopping list", "i do not need {thing} now"),
    "calendar_set": (
        "meet {person} {day} at {hour}",
        "add a meeting with {person} {day}",
        "plan lunch with {person}",
    ),
    "email_sendemail": ("send an email to {person}", "write to {person} about {thing}", "email {person} {day}"),
    "transport_taxi": ("book a taxi to {city}", "i need a cab at {hour}", "get me a taxi to {city} {day}"),
    "cooking_recipe": ("how do i cook {thing}", "find a recipe with {thing}", "what can i make from {thing}"),
}
WORDS = {
    "hour": ("six", "seven", "eight", "nine", "ten", "noon"),
    "day": ("today", "tomorrow", "on monday", "on friday", "this evening"),
    "city": ("london", "paris", "berlin", "boston", "rome"),
    "music": ("jazz", "rock", "piano", "dance", "folk"),
    "room": ("kitchen", "bedroom", "garage", "bathroom", "hall"),
    "thing": ("milk", "rice", "eggs", "bread", "apples", "cheese"),
    "person": ("anna", "peter", "mary", "john", "my sister"),
}


def write_commands(cache_dir: Path, seed: int = 1) -> Path:
    """Write the corpus, unless it exists.

    Args:
        cache_dir: the directory that samples are stored in.
        seed: of the sentences and voices.

    Returns:
        The directory with `dataset` and `audio`.

    Raises:
        DataError: espeak-ng cannot be loaded, or the corpus cannot be written.
    """
    version = fingerprint([speech, speech_translation, keeping, __file__], seed)
    return stored_files(Path(cache_dir) / f"spoken-commands-{version}", lambda root: _write(root, seed))


def split_prompts(seed: int) -> dict[str, list[tuple[str, str]]]:
    """(class, sentence) pairs of each split.

    No sentence occurs twice in all splits together; every class and word of devel and test occurs in train.

    Args:
        seed: of the sentences.
    """
    drawn = _distinct(random.Random(seed))
    train = [next(drawn) for _ in range(SIZES["train"])]
    known = {word for _, sentence in train for word in sentence.split()}
    fitting = ((intent, sentence) for intent, sentence in drawn if known.issuperset(sentence.split()))
    return {"train": train} | {split: [next(fitting) for _ in range(SIZES[split])] for split in ("devel", "test")}


def _distinct(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Distinct commands, some with a polite word before or after; a few thousand exist."""
    seen = set()
    while True:
        intent = rng.choice(list(TEMPLATES))
        sentence = fill(rng.choice(TEMPLATES[intent]), lambda name: rng.choice(WORDS[name]))
        before, after = rng.choice(("", "", "please ", "hey ")), rng.choice(("", "", " please", " thanks"))
        sentence = before + sentence + after
        if sentence not in seen:
            seen.add(sentence)
            yield intent, sentence


def fill(template: str, choose: Callable[[str], str]) -> str:
    """`template` with each {name} replaced by choose(name).

    Args:
        template: a sentence with names in braces.
        choose: gives the words for a name.
    """
    return re.sub(r"\{(\w+)\}", lambda match: choose(match[1]), template)


def _write(root: Path, seed: int) -> None:
    audio = root / "audio" / "slurp_real"
    audio.mkdir(parents=True)
    blocks = [
        (split, prompts[start : start + BLOCK])
        for split, prompts in split_prompts(seed).items()
        for start in range(0, len(prompts), BLOCK)
    ]
    lines: dict[str, list[str]] = {split: [] for split in SIZES}
    metadata = {}
    number = 0
    for block, (split, prompts) in enumerate(speaking(blocks), 1):
        rng = np.random.default_rng([seed, block])
        samples, spans = speak_all(speaker(block, rng), [sentence for _, sentence in prompts], rng)
        for (intent, sentence), (start, length) in zip(prompts, spans, strict=True):
            number += 1
            file = f"audio-{number:06d}-headset.flac"
            part = samples[start * FRAME : (start + length) * FRAME]
            soundfile.write(audio / file, part, SAMPLE_RATE, "PCM_16", format="FLAC")
            scenario, _, action = intent.partition("_")
            lines[split].append(
                json.dumps(
                    {
                        "slurp_id": number, "sentence": sentence, "sentence_annotation": sentence, "intent": intent,
                        "action": action, "scenario": scenario, "entities": [],
                        "tokens": [{"surface": word, "id": i} for i, word in enumerate(sentence.split())],
                        "recordings": [{"file": file, "wer": 0, "ent_wer": 0, "status": "correct"}],
                    }
                )
            )  # fmt: skip
            recording = {"usrid": f"SY-{block:03d}", "recid": file[6:-5], "status": "correct"}
            metadata[str(number)] = {"recordings": {file: recording}, "sentence_normalised": sentence}
    for split, text in lines.items():
        write_lines(root / "dataset" / "slurp" / f"{split}.jsonl", text)
    write_lines(root / "dataset" / "slurp" / "train_synthetic.jsonl", [])
    write_lines(root / "dataset" / "slurp" / "metadata.json", [json.dumps(metadata)])

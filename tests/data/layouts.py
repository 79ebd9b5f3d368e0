"""Small corpora in the published layouts, for readers and for tests of what is wrong with their files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from attnlab.data import AMI, AN4, SLURP, Kaldi, MustC, Parallel, Picovoice, Table, XSum
from attnlab.data.corpus import Kind, Reader, Utterance
from attnlab.data.text.pairs import SPLIT_FILE
from tests.data.conftest import RATE, write_corpus


def write(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def audio(path: Path, seconds: float = 2.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(1).normal(0, 0.1, int(seconds * RATE))
    soundfile.write(path, noise, RATE, "PCM_16", format="NIST" if path.suffix == ".sph" else None)
    return path


def read(reader: Reader, root: Path, split: str, kind: Kind, drop_empty: bool = False) -> list[Any]:
    reader.check(root, [split], kind)
    return list(reader.read(root, split, kind, drop_empty))


def texts(utterances: list[Utterance]) -> list[str]:
    return [x.target for x in utterances]


def word(start: float, end: float, text: str, mark: str = "") -> str:
    """A word in AMI's XML."""
    return f'<w starttime="{start}" endtime="{end}"{mark}>{text}</w>'


def prompt(id: int, sentence: str, *files: str, **more: Any) -> str:
    """A line of SLURP."""
    record = {"slurp_id": id, "sentence": sentence, "intent": "other", "scenario": "alarm", "action": "set"}
    return json.dumps(record | {"recordings": [{"file": file} for file in files]} | more)


def ami(root: Path) -> None:
    for meeting in ("ES2002a", "ES2011a", "EN2002a"):
        audio(root / meeting / "audio" / f"{meeting}.Headset-1.wav", 6)
        write(
            root / "segments" / f"{meeting}.B.segments.xml",
            '<nite:root xmlns:nite="http://nite.sourceforge.net/">',
            '<segment transcriber_start="0.5" transcriber_end="2.0"/>',
            '<segment transcriber_start="2.5" transcriber_end="3.5"/>',
            '<segment transcriber_start="4.0" transcriber_end="5.0"/>',
            "</nite:root>",
        )
        write(
            root / "words" / f"{meeting}.B.words.xml",
            '<nite:root xmlns:nite="http://nite.sourceforge.net/">',
            word(0.5, 0.8, "Mm"), word(0.8, 1.0, "hmm"), word(1.0, 1.0, ",", ' punc="true"'),
            word(1.0, 1.6, "the L_C_D"),
            word(1.6, 2.0, "on-off", ' trunc="true"'), word(2.0, 2.0, ".", ' punc="true"'),
            '<vocalsound starttime="2.5" endtime="3.0" type="laugh"/>', word(2.6, 3.6, "outside"),
            word(4.1, 4.6, "it&apos;s"), "<w>timeless</w>", "</nite:root>",
        )  # fmt: skip
    meetings = [
        f'<meeting observation="{m}"><speaker nxt_agent="A" global_name="FEE041" channel="0"/>'
        '<speaker nxt_agent="B" global_name="MEE042" channel="1"/></meeting>'
        for m in ("ES2002a", "ES2011a", "EN2002a")
    ]
    write(root / "corpusResources" / "meetings.xml", "<meetings>", *meetings, "</meetings>")


def kaldi(root: Path) -> None:
    write(root / "train" / "text", "b ONE TWO", "a THREE")
    write(root / "train" / "wav.scp", "a a.wav", f"b {audio(root / 'b.wav')}")
    audio(root / "a.wav", 1)


def an4(root: Path, kind: str = "audio", training: tuple[str, ...] = ("aa/u1-aa-b", "bb/u2-bb-b")) -> None:
    for split, names in {"train": training, "test": ("zz/t1-zz-b",)}.items():
        write(root / "etc" / f"an4_{split}.fileids", *names)
        write(root / "etc" / f"an4_{split}.transcription", *(f"<s> YES </s> ({Path(n).name})" for n in names))
        for name in names:
            audio(root / "wav" / f"{name}.sph", 0.5) if kind == "audio" else write(root / "feat" / f"{name}.mfc")


def slurp(root: Path) -> None:
    folder = root / "dataset" / "slurp"
    write(folder / "train.jsonl", prompt(1, "wake me @ eight, ok.", "audio--11-headset.flac", "audio-12.flac"))
    write(folder / "train_synthetic.jsonl", prompt(2, "Wake ME", "audio-13.flac"))
    write(folder / "devel.jsonl", prompt(3, "hello", "audio-12.flac", "audio-14.flac", scenario="iot", action="hue on"))
    write(folder / "test.jsonl", prompt(4, "bye", "audio-15.flac"))
    people = {"1": {"recordings": {"audio--11-headset.flac": {"usrid": "FO-460"}, "audio-12.flac": {"usrid": "MO-1"}}}}
    write(folder / "metadata.json", json.dumps(people))
    for name in ("audio--11-headset", "audio-12", "audio-14", "audio-15"):
        audio(root / "audio" / "slurp_real" / f"{name}.flac", 0.5)
    audio(root / "audio" / "slurp_synth" / "audio-13.flac", 0.5)


def picovoice(root: Path) -> None:
    write(root / "label.json", json.dumps({"a.wav": {"slots": {"coffeeDrink": "iced coffee"}}}))
    write(root / "selection.tsv", "file\tcoffeeDrink\tsuggested_split", "a.wav\ticed coffee\ttrain")
    audio(root / "speech" / "a.wav", 0.5)


def xsum_original(root: Path) -> None:
    write(
        root / "bbc-summary-data" / "7.summary",
        "[SN]URL[SN]\nx\n\n[SN]TITLE[SN]\nT\n\n[SN]FIRST-SENTENCE[SN]\nThe summary.\n\n[SN]RESTBODY[SN]",
        "Line one.\n\nShare this with\nLine two.",
    )
    write(root / SPLIT_FILE, json.dumps({"train": ["7"], "validation": [], "test": []}))


def xsum_records(root: Path) -> None:
    write(root / "train.json", json.dumps({"document": "Line one.\nLine two.", "summary": "The  summary."}, indent=1))


def xsum_pairs(root: Path) -> None:
    write(root / "train.raw.source", "Line one.  Line two.")
    write(root / "train.raw.target", "The summary.")


def plain_text(root: Path) -> None:
    for name in ("train", "dev", "test"):
        for language in ("en", "de"):
            write(root / f"{name}.{language}", "one", "two")


def table(root: Path) -> None:
    """No file: each case writes its own."""


LAYOUTS: dict[str, tuple[Callable[[Path], Any], Callable[[], Reader], Kind]] = {
    "ami": (ami, AMI, "audio"),
    "kaldi": (kaldi, Kaldi, "audio"),
    "an4": (an4, AN4, "audio"),
    "slurp": (slurp, SLURP, "audio"),
    "picovoice": (picovoice, Picovoice, "audio"),
    "mustc": (lambda root: write_corpus(root, ("train",)), MustC, "audio"),
    "xsum original": (xsum_original, XSum, "text"),
    "xsum records": (xsum_records, XSum, "text"),
    "xsum pairs": (xsum_pairs, XSum, "text"),
    "plain text": (plain_text, Parallel, "text"),
    "table": (table, Table, "text"),
}

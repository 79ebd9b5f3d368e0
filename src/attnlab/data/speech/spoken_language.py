"""Readers of spoken commands with a class: SLURP, and Picovoice's coffee orders.

<root>/dataset/slurp/{train,train_synthetic,devel,test}.jsonl    one prompt per line, with its recordings
<root>/dataset/slurp/metadata.json                               speakers; optional
<root>/audio/slurp_real/<file>.flac, audio/slurp_synth/<file>.flac

<root>/label.json               {"<file>.wav": {"intent": ..., "slots": {"coffeeDrink": ...}}}
<root>/selection.tsv            file, class, train or test
<root>/speech/<file>.wav
"""

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge

from attnlab.data.corpus import (
    Kind,
    Reader,
    Segment,
    Utterance,
    field,
    read_lines,
    read_records,
    read_text,
    refuse_empty,
    whole,
)
from attnlab.errors import ConfigError, DataError


class SLURP(Reader):
    """SLURP.  The target is the class <scenario>_<action>, then the transcript.

    The class is not the field `intent`, which differs for some prompts.  A recording that several lines name counts
    once, at the first of them, as in the published preparation.  As text, an utterance is a prompt, and its input is
    the sentence itself.

    Args:
        train, devel, test: the names of the .jsonl files of each split; None: train and train_synthetic, devel, test.
        dev_every: every `dev_every`-th line of the training files is held out as devel, whose own files are not read.
    """

    name = "SLURP"
    splits = ("train", "devel", "test")
    kinds = ("audio", "text")
    layout = "data_root must hold dataset/slurp/*.jsonl and, for audio, audio/slurp_real and audio/slurp_synth"

    def __init__(
        self,
        train: list[str] | None = None,
        devel: list[str] | None = None,
        test: list[str] | None = None,
        dev_every: Annotated[int, Ge(2)] | None = None,
    ) -> None:
        if dev_every is not None and devel is not None:
            raise ConfigError("task.data.reader.dev_every holds a part of train out as devel: leave devel= out")
        train = train or ["train", "train_synthetic"]
        self.files = {
            "train": train,
            "devel": train if dev_every else devel or ["devel"],
            "test": test or ["test"],
        }
        self.dev_every = dev_every
        self._taken: dict[str, tuple[Path, int]] = {}  # recording -> the first line that names it

    def paths(self, root: Path, split: str) -> list[Path]:
        """The .jsonl files of a split."""
        return [root / "dataset" / "slurp" / f"{name}.jsonl" for name in self.files[split]]

    def find(self, root: Path, split: str, kind: Kind) -> None:
        self.need(*self.paths(root, split), folder=root / "audio" if kind == "audio" else None)

    def read(self, root: Path, split: str, kind: Kind, drop_empty: bool) -> Sequence[Utterance]:
        speakers = _speakers(root / "dataset" / "slurp" / "metadata.json") if kind == "audio" else {}
        prompts = [(path, *read) for path in self.paths(root, split) for read in read_records(path)]
        if self.dev_every and split != "test":
            every = self.dev_every
            prompts = [prompt for i, prompt in enumerate(prompts, 1) if (i % every == 0) == (split == "devel")]
        return [x for prompt in prompts for x in self._prompt(root, split, kind, drop_empty, *prompt, speakers)]

    def _prompt(
        self,
        root: Path,
        split: str,
        kind: Kind,
        drop_empty: bool,
        path: Path,
        line: int,
        record: dict[str, Any],
        speakers: dict[str, str],
    ) -> Iterator[Utterance]:
        synthetic = "synthetic" in path.stem
        text = clean(field(record, "sentence", str, path, line), synthetic)
        refuse_empty(text, f"{path} line {line}", drop_empty, "sentence")
        parts = {key: field(record, key, str, path, line) for key in ("scenario", "action")}
        for key, value in parts.items():
            if not value.strip():
                raise DataError(f"{path} line {line}: empty {key}; expected the class of the sentence")
        label = "_".join(parts.values())
        shared: dict[str, Any] = {"source": text, "target": text, "label": label.replace(" ", "_")}
        if kind == "text":
            id = field(record, "slurp_id", int, path, line)
            yield Utterance(id=f"slurp_{split}_{line}_{id}", **shared)
            return
        recordings = field(record, "recordings", list, path, line)
        if not recordings:
            raise DataError(f"{path} line {line}: no recordings; expected at least one")
        for recording in recordings:
            if not isinstance(recording, dict) or not isinstance(recording.get("file"), str):
                raise DataError(f"{path} line {line}: a recording has no `file`; expected the name of its file")
            file = recording["file"]
            if self._taken.setdefault(file, (path, line)) != (path, line):
                continue
            folder = "slurp_synth" if synthetic else "slurp_real"
            audio = whole(root / "audio" / folder / file, f"{path} line {line}")
            key = file.removeprefix("audio-").removesuffix(".flac")
            yield Segment(id=f"slurp_{speakers.get(file, 'unknown')}_{key}", **shared, **audio)

    def sample(self, cache_dir: Path) -> Path:
        from attnlab.data.samples import write_commands

        return write_commands(cache_dir)


class Picovoice(Reader):
    """Picovoice's coffee orders.  The class is the drink; there are no transcripts.

    Args:
        slot: the slot of label.json that is the class.
        dev_every: every `dev_every`-th training file is held out for validation; at least 2.

    Raises:
        ConfigError: `dev_every` is less than 2.
    """

    name = "Picovoice coffee orders"
    layout = "data_root must hold label.json, selection.tsv and speech/*.wav"

    def __init__(self, slot: str = "coffeeDrink", dev_every: Annotated[int, Ge(2)] = 5) -> None:
        if dev_every < 2:
            raise ConfigError(f"task.data.reader.dev_every={dev_every}: expected at least 2")
        self.slot, self.dev_every = slot, dev_every

    def find(self, root: Path, split: str, kind: Kind) -> None:
        self.need(root / "label.json", root / "selection.tsv", folder=root / "speech")

    def read(self, root: Path, split: str, kind: Kind, drop_empty: bool) -> Sequence[Utterance]:
        path = root / "label.json"
        try:
            labels = json.loads(read_text(path))
        except json.JSONDecodeError as error:
            raise DataError(f"{path} line {error.lineno}: malformed JSON ({error.msg})") from error
        except RecursionError as error:
            raise DataError(f"{path}: JSON nested too deeply; expected the slots of each file") from error
        if not isinstance(labels, dict):
            raise DataError(f"{path}: expected a JSON object with the slots of each file")
        table = root / "selection.tsv"
        try:
            rows = list(csv.reader(read_lines(table), delimiter="\t"))
        except csv.Error as error:
            raise DataError(f"{table}: not a table of file, class and split, separated by tabs ({error})") from error
        if not rows or len(rows[0]) != 3:
            raise DataError(f"{table} line 1: expected the names of three columns, file, {self.slot} and split")
        wanted = "test" if split == "test" else "train"
        found: list[Utterance] = []
        for number, row in enumerate(rows[1:], 2):
            if len(row) != 3:
                raise DataError(f"{table} line {number}: expected file, class and split, separated by tabs")
            if row[2] not in ("train", "test"):
                raise DataError(f"{table} line {number}: split {row[2]!r}; expected train or test")
            if row[2] != wanted:
                continue
            try:
                label = str(labels[row[0]]["slots"][self.slot])
            except (LookupError, TypeError) as error:
                raise DataError(f"{path}: {row[0]} has no slot {self.slot}; expected its class") from error
            if rows[0][1] == self.slot and row[1] != label:
                raise DataError(f"{table} line {number}: {row[0]} is {row[1]!r}, but {label!r} in {path.name}")
            audio = whole(root / "speech" / row[0], f"{table} line {number}")
            found.append(Segment(id=Path(row[0]).stem, source="", target="", label=label.replace(" ", "_"), **audio))
        if split == "test":
            return found
        return [x for i, x in enumerate(found) if ((i + 1) % self.dev_every == 0) == (split == "dev")]


def clean(sentence: str, lower: bool) -> str:
    """The transcript as the published preparation writes it.

    Args:
        sentence: as the corpus has it.
        lower: whether it is put into lower case.
    """
    text = sentence.replace("@", " at ").replace("#", " hashtag ").replace(",", "").replace(".", "")
    return " ".join((text.lower() if lower else text).replace("<unk>", "unknown").split())


def _speakers(path: Path) -> dict[str, str]:
    """File to speaker; empty where there is no metadata.json."""
    if not path.is_file():
        return {}
    try:
        prompts = json.loads(read_text(path))
        return {
            file: str(entry["usrid"]) for prompt in prompts.values() for file, entry in prompt["recordings"].items()
        }
    except json.JSONDecodeError as error:
        raise DataError(f"{path} line {error.lineno}: malformed JSON ({error.msg})") from error
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path}: a prompt has no recordings or a recording no usrid; expected both") from error

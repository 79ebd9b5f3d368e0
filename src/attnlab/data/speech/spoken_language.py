"""Readers of spoken commands with a class: SLURP, and Picovoice's coffee orders.

<root>/dataset/slurp/{train,train_synthetic,devel,test}.jsonl    one prompt per line, with its recordings
<root>/dataset/slurp/metadata.json                               speakers; optional
<root>/audio/slurp_real/<file>.flac, audio/slurp_synth/<file>.flac

<root>/label.json               {"<file>.wav": {"intent": ..., "slots": {"coffeeDrink": ...}}}
<root>/selection.tsv            file, class, train or test
<root>/speech/<file>.wav
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge

from attnlab.data.corpus import (
    Kind,
    Reader,
    Row,
    Segment,
    Utterance,
    read_json,
    reading,
    recording,
    refuse_empty,
    rows,
    spoken_sample,
)
from attnlab.data.report import left_out
from attnlab.errors import ConfigError, DataError


class SLURP(Reader):
    """SLURP.  The target is the class <scenario>_<action>, then the transcript.

    The class is not the field `intent`, which differs for some prompts.  A recording that several lines name counts
    once, at the first of them, as in the published preparation.  As text, an utterance is a prompt, and its input is
    the sentence itself.

    Args:
        train, devel, test: the names of the .jsonl files of each split; None: train and train_synthetic, devel, test.
        dev_every: every `dev_every`-th line of the training files is held out as devel, whose files are not read.
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
        self.files = {"train": train, "devel": train if dev_every else devel or ["devel"], "test": test or ["test"]}
        self.dev_every = dev_every
        self._taken: dict[str, str] = {}  # recording -> the first line that names it

    def paths(self, root: Path, split: str) -> list[Path]:
        """The .jsonl files of a split."""
        return [root / "dataset" / "slurp" / f"{name}.jsonl" for name in self.files[split]]

    def find(self, root: Path, split: str, kind: Kind) -> None:
        self.need(*self.paths(root, split), folders=[root / "audio"] * (kind == "audio"))

    def read(self, root: Path, split: str, kind: Kind, drop_empty: bool) -> Sequence[Utterance]:
        speakers = _speakers(root / "dataset" / "slurp" / "metadata.json") if kind == "audio" else {}
        prompts = [row for path in self.paths(root, split) for row in rows(path)]
        if self.dev_every and split != "test":
            every = self.dev_every
            prompts = [prompt for i, prompt in enumerate(prompts, 1) if (i % every == 0) == (split == "devel")]
        if empty := [row.where for row in prompts if not _texts(row)["target"]]:
            refuse_empty(empty, drop_empty)
            left_out("empty text", empty[0], len(empty))
            prompts = [row for row in prompts if _texts(row)["target"]]
        if kind == "text":
            return [
                Utterance(id=f"slurp_{split}_{row.number}_{row.value('slurp_id', int)}", **_texts(row))
                for row in prompts
            ]
        return [segment for row in prompts for segment in self._recordings(row, root, speakers)]

    def _recordings(self, row: Row, root: Path, speakers: dict[str, str]) -> Iterator[Segment]:
        texts = _texts(row)
        folder = root / "audio" / ("slurp_synth" if _synthetic(row) else "slurp_real")
        with reading(row.path, f"recordings, each with its `file`: line {row.number}"):
            files = [str(entry["file"]) for entry in row.value("recordings", list)]
        if not files:
            raise DataError(f"{row.where}: no recordings; expected at least one")
        for file in files:
            if self._taken.setdefault(file, row.where) != row.where:
                left_out("recording of an earlier line", row.where)
            else:
                key = file.removeprefix("audio-").removesuffix(".flac")
                id = f"slurp_{speakers.get(file, 'unknown')}_{key}"
                yield Segment(id=id, **texts, **recording(folder / file, row.where))

    def sample(self, cache_dir: Path) -> Path:
        return spoken_sample(cache_dir, "spoken-commands")


class Picovoice(Reader):
    """Picovoice's coffee orders.  The class is the drink; there are no transcripts.

    Args:
        slot: the slot of label.json that is the class.
        dev_every: every `dev_every`-th training file is held out for validation; at least 2.
    """

    name = "Picovoice coffee orders"
    layout = "data_root must hold label.json, selection.tsv and speech/*.wav"

    def __init__(self, slot: str = "coffeeDrink", dev_every: Annotated[int, Ge(2)] = 5) -> None:
        self.slot, self.dev_every = slot, dev_every

    def find(self, root: Path, split: str, kind: Kind) -> None:
        self.need(root / "label.json", root / "selection.tsv", folders=[root / "speech"])

    def read(self, root: Path, split: str, kind: Kind, drop_empty: bool) -> Sequence[Utterance]:
        path = root / "label.json"
        labels = read_json(path)
        segments: list[Utterance] = []
        for row in rows(root / "selection.tsv"):
            file = row.value("file", str)
            if (row.text("suggested_split") == "test") != (split == "test"):
                continue
            with reading(path, f"an object with the slot {self.slot} of {file}"):
                label = str(labels[file]["slots"][self.slot]).replace(" ", "_")
            audio = recording(root / "speech" / file, row.where)
            segments.append(Segment(id=Path(file).stem, source="", target="", label=label, **audio))
        if split == "test":
            return segments
        return [x for i, x in enumerate(segments, 1) if (i % self.dev_every == 0) == (split == "dev")]


def _synthetic(row: Row) -> bool:
    return "synthetic" in row.path.stem


def _texts(row: Row) -> dict[str, Any]:
    """Transcript and class of a prompt."""
    text = clean(row.text("sentence", optional=True), _synthetic(row))
    scenario, action = row.value("scenario", str), row.value("action", str)
    if not scenario.strip() or not action.strip():
        raise DataError(f"{row.where}: empty {'action' if scenario.strip() else 'scenario'}; expected the class")
    return {"source": text, "target": text, "label": f"{scenario}_{action}".replace(" ", "_")}


def clean(sentence: str, lower: bool) -> str:
    """The transcript as the published preparation writes it; `lower` puts it into lower case."""
    text = sentence.replace("@", " at ").replace("#", " hashtag ").replace(",", "").replace(".", "")
    return " ".join((text.lower() if lower else text).replace("<unk>", "unknown").split())


def _speakers(path: Path) -> dict[str, str]:
    """File to speaker; empty without metadata.json."""
    if not path.is_file():
        return {}
    prompts = read_json(path)
    with reading(path, "prompts with recordings, each with a usrid"):
        return {
            file: str(entry["usrid"]) for prompt in prompts.values() for file, entry in prompt["recordings"].items()
        }

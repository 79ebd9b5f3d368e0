"""The examples that readers of corpora give, and functions that readers share. Imports no torch.

A reader reads one layout on disk.  It checks all that it can before anything is computed.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import soundfile
from omegaconf import DictConfig

from attnlab.config.build import instantiate
from attnlab.data.files import check_folder, contents, reading, squeeze
from attnlab.errors import DataError

Item = TypeVar("Item")
Kind = Literal["audio", "stored", "text"]  # what a front end reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Utterance:
    """One example.  Of this base class, the input is the text `source`.

    Attributes:
        id: unique in its split.
        source: the transcript, sentence or document; CTC's text, and shown beside the output.
        target: what the decoder writes.
        label: the class that it writes first, as one piece; empty: none.
        others: further references.
    """

    id: str
    source: str
    target: str
    label: str = ""
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment(Utterance):
    """Input: `num_samples` samples of a recording from `start` on, at its own `rate` (Hz), `speed` times faster.

    Args:
        num_samples: before the speed is changed.
        speed: factor of the tempo, above 0.
    """

    audio: Path
    rate: int
    start: int
    num_samples: int
    speed: float = 1.0

    @property
    def seconds(self) -> float:
        return self.num_samples / self.rate / self.speed


def at_speed(segment: Segment, speed: float) -> Segment:
    """A segment played at another speed, which its id names."""
    return segment if speed == 1.0 else replace(segment, id=f"sp{speed:g}-{segment.id}", speed=speed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored(Utterance):
    """Input: a file of features."""

    path: Path


class Reader(ABC):
    """One layout of a corpus on disk.

    Attributes:
        name: of the corpus, for messages.
        unit: what an example is called.
        splits: the training, validation and test splits.
        layout: what data_root must hold, for messages.
    """

    name: str
    unit: str = "utterances"
    splits: tuple[str, str, str] = ("train", "dev", "test")
    kinds: tuple[Kind, ...] = ("audio",)
    layout: str = ""

    @abstractmethod
    def read(self, root: Path, split: str, kind: Kind, drop_empty: bool) -> Sequence[Utterance]:
        """The utterances of a split, in the corpus's order; inputs of one of `kinds`.

        Raises DataError: missing or malformed files, and text that is empty, unless `drop_empty`: the caller then
        leaves such utterances out and counts them.
        """

    def check(self, root: Path, splits: Sequence[str], kind: Kind) -> None:
        """Check that the files of `splits` exist.

        Raises:
            DataError: one is missing; the message names the file and what it must hold.
        """
        check_folder(root, self.layout)
        with reading(root, "a readable folder"):
            for split in splits:
                self.find(root, split, kind)

    def find(self, root: Path, split: str, kind: Kind) -> None:  # noqa: B027
        """Check that the files of one split exist.  Raises DataError where one is missing."""

    def need(self, *files: Path, folders: Sequence[Path] = ()) -> None:
        """Raise DataError where one of these files or folders is missing."""
        for path in (*files, *folders):
            if not (path.is_dir() if path in folders else path.is_file()):
                self.missing(path)

    def missing(self, path: Path) -> NoReturn:
        """Raise the error of a file or folder that is missing, or that is the other of the two."""
        if path.exists():
            kinds = ("a directory", "a file") if path.is_dir() else ("a file", "a directory")
            raise DataError(f"{path}: {kinds[0]}; expected {kinds[1]}; {self.layout}")
        there = contents(path.parent) if path.parent.is_dir() else "no such folder"
        raise DataError(f"{path} is missing (found {there}); {self.layout}")

    def plain(self, text: str) -> str:
        """A source text that stands in no corpus, as :meth:`read` would give it."""
        return squeeze(text)

    def sample(self, cache_dir: Path) -> Path:
        """The directory of the embedded sample corpus in this layout, which is written if it does not exist."""
        raise DataError(f"there is no sample corpus in the layout of {self.name}: set data_root; {self.layout}")


def check_layout(root: Path, data: DictConfig) -> None:
    """Check that the files of a corpus exist that a :class:`Reader` reads.  `data` is the node `task.data`."""
    reader: Reader = instantiate(data.reader, path="task.data.reader")
    kind = instantiate(data.features, path="task.data.features").kind
    if kind in reader.kinds:
        reader.check(root, reader.splits, kind)


def inspect_audio(path: Path, where: str) -> tuple[int, int]:
    """(samples per second, samples) of a recording, from its header; `where`: the file and line that name it."""
    if not path.is_file():
        raise DataError(f"{path}: missing recording, named in {where}")
    with reading(path, f"a recording, named in {where}"):
        info = soundfile.info(path)
    return info.samplerate, info.frames


def excerpt(
    audio: Path, header: tuple[int, int], first: int, last: int, where: str, tolerance: float = 0
) -> dict[str, Any]:
    """What a Segment needs to be samples `first` to `last` (exclusive) of a recording; it is cut at the end.

    Args:
        header: as :func:`inspect_audio` gives it.
        where: the file and line of the segment, for the error.
        tolerance: seconds that a segment may end after its recording, because times are rounded.

    Raises:
        DataError: the segment has no samples, or ends later.
    """
    rate, length = header
    if not 0 <= first < min(last, length) or last > length + tolerance * rate:
        times = f"a segment from {first / rate:.3f} to {last / rate:.3f} s"
        raise DataError(f"{where}: {times}; expected a part of the {length / rate:.3f} s of {audio.name}")
    return {"audio": audio, "rate": rate, "start": first, "num_samples": min(last, length) - first}


def recording(audio: Path, where: str) -> dict[str, Any]:
    """What a Segment needs to be a complete recording; `where` names the recording, for the error."""
    rate, length = inspect_audio(audio, where)
    return excerpt(audio, (rate, length), 0, length, where)


def refuse_empty(text: str, where: str, drop_empty: bool) -> None:
    """Raise DataError where a text, read from the file and line `where`, is empty and may not be left out."""
    if not text and not drop_empty:
        raise DataError(f"{where}: empty text; task.data.drop_empty=true leaves such utterances out")


def held_out(items: Iterable[Item], split: str, missing: Sequence[str], every: int) -> Iterator[Item]:
    """The training items that are used as `split`, where some splits have no files.

    Args:
        split: one of `missing`, or the training split, which gets the others.
        missing: the splits without files; each takes every `every`-th item.
    """
    for i, item in enumerate(items):
        place = i % every
        if (missing[place] if place < len(missing) else None) == (split if split in missing else None):
            yield item


def statistics(utterances: Sequence[Utterance]) -> dict[str, float]:
    """The size of a split: utterances, words of both sides with their means, hours of recordings, number of classes."""
    count = len(utterances)
    words = {
        "source_words": sum(len(x.source.split()) for x in utterances),
        "target_words": sum(len(x.target.split()) for x in utterances),
    }
    sizes: dict[str, float] = {"utterances": count}
    segments = [x for x in utterances if isinstance(x, Segment)]
    if segments and len(segments) == count:
        sizes["hours"] = round(sum(x.seconds for x in segments) / 3600, 4)
    sizes |= words | {f"mean_{key}": round(value / count, 2) for key, value in words.items()}
    classes = {x.label for x in utterances} - {""}
    return sizes | ({"classes": len(classes)} if classes else {})


# --- folders of images ---

IMAGE_SPLITS = {"train": ("train", "training"), "val": ("val", "valid", "validation", "eval", "evaluation")}
IMAGES = (".png", ".jpg", ".jpeg")  # those that timm reads


def check_images(root: Path, data: DictConfig) -> None:
    """Raise DataError unless both splits have a folder of images for each class."""
    for split in IMAGE_SPLITS:
        image_folder(root, split)


def image_folder(root: Path, split: str) -> Path:
    """The folder of a split.  DataError: it is missing, or has not one folder of images for each class."""
    expected = f"expected {split}/<class>/*.jpg"
    check_folder(root, f"{expected} below it")
    place = next((root / name for name in IMAGE_SPLITS[split] if (root / name).is_dir()), None)
    if place is None:
        raise DataError(f"{root}: there is no folder {split}; {expected} below it")
    folders = sorted(path for path in place.iterdir() if path.is_dir())
    if not folders:
        raise DataError(f"{place}: no class folders; {expected} (ImageNet's val is shipped flat)")
    for folder in folders:
        if not any(path.suffix.lower() in IMAGES for path in folder.rglob("*")):
            raise DataError(f"{folder}: a class folder without images; add images, or remove it from train and val")
    return place

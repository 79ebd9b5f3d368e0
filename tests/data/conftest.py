"""A corpus of two synthetic talks in MuST-C's layout."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before lightning, in whichever test comes first)

import numpy as np
import pytest
import soundfile
import torch

from attnlab.data import FilterBank
from attnlab.data.base import Data

RATE = 8000
BANK = FilterBank(sample_rate=RATE, num_mels=20)
Edit = Callable[[str, str, str], Path]
Segments = Sequence[tuple[str, float, float, str, str]]  # recording, start and seconds, English, German
# offsets 9.5 and 100.2 of one talk (as strings they sort the other way round), one segment under 0.2 s
SEGMENTS = [
    ("ted_1.wav", 100.2, 1.5, "seven three", "sieben drei"),
    ("ted_1.wav", 9.5, 0.9, "one", "eins"),
    ("ted_2.wav", 0.0, 1.1, "two one", "zwei eins"),
    ("ted_1.wav", 16.0, 0.15, "three", "drei"),
    ("ted_2.wav", 1.25, 2.0, "seven two one", "sieben zwei eins"),
]


def write_split(folder: Path, recordings: Mapping[str, np.ndarray], segments: Segments, counts: str = "") -> None:
    """A split in MuST-C's layout; its folder has its name."""
    (folder / "txt").mkdir(parents=True)
    (folder / "wav").mkdir()
    for wav, samples in recordings.items():
        soundfile.write(folder / "wav" / wav, samples, RATE, "PCM_16")
    lines = [
        f"- {{duration: {duration:.6f}, offset: {offset:.6f}, {counts}speaker_id: spk.7, wav: {wav}}}\n"
        for wav, offset, duration, _, _ in segments
    ]
    (folder / "txt" / f"{folder.name}.yaml").write_text("".join(lines))
    for column, language in ((3, "en"), (4, "de")):
        (folder / "txt" / f"{folder.name}.{language}").write_text("".join(f"{s[column]}\n" for s in segments))


def write_corpus(root: Path, splits: tuple[str, ...] = ("train", "dev", "tst-COMMON"), version: int = 1) -> Path:
    random = np.random.default_rng(1)
    for split in splits:
        recordings = {}
        for wav, seconds in {"ted_1.wav": 102, "ted_2.wav": 4}.items():
            time = np.arange(seconds * RATE) / RATE
            tone = 0.3 * np.sin(2 * np.pi * (300 + 40 * time) * time) * (time % 0.5 < 0.4)
            recordings[wav] = tone + random.normal(0, 0.01, len(time))
        counts = "rW: 9, uW: 0, " if version == 2 else ""
        write_split(root / "en-de" / "data" / split, recordings, SEGMENTS, counts)
    return root


def attach(data: Data, device: str = "cpu", **values: Any) -> None:
    """As much of a trainer as the loaders look at."""
    about = {"current_epoch": 0, "global_rank": 0, "world_size": 1, "testing": False} | values
    data.trainer = SimpleNamespace(  # type: ignore[assignment]
        strategy=SimpleNamespace(root_device=torch.device(device)), **about
    )


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("template"))


@pytest.fixture
def corpus(template: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(template, tmp_path / "corpus")


@pytest.fixture
def edit(corpus: Path) -> Edit:
    """edit("train.yaml", old, new) changes the file and returns its path."""

    def change(name: str, old: str, new: str) -> Path:
        path = corpus / "en-de" / "data" / name.partition(".")[0] / "txt" / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))
        return path

    return change

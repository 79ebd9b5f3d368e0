"""A corpus of two synthetic talks in MuST-C's layout."""

import shutil
from collections.abc import Callable
from pathlib import Path

import attnlab.torchvision_schemas  # noqa: F401  (before lightning, in whichever test comes first)

import numpy as np
import pytest
import soundfile

RATE = 8000
# offsets 9.5 and 100.2 of one talk (as strings they sort the other way round), one segment under 0.2 s
SEGMENTS = [
    ("ted_1.wav", 100.2, 1.5, "seven three", "sieben drei"),
    ("ted_1.wav", 9.5, 0.9, "one", "eins"),
    ("ted_2.wav", 0.0, 1.1, "two one", "zwei eins"),
    ("ted_1.wav", 16.0, 0.15, "three", "drei"),
    ("ted_2.wav", 1.25, 2.0, "seven two one", "sieben zwei eins"),
]


def write_corpus(root: Path, splits: tuple[str, ...] = ("train", "dev", "tst-COMMON"), version: int = 1) -> Path:
    random = np.random.default_rng(1)
    for split in splits:
        folder = root / "en-de" / "data" / split
        (folder / "txt").mkdir(parents=True)
        (folder / "wav").mkdir()
        for wav, seconds in {"ted_1.wav": 102, "ted_2.wav": 4}.items():
            time = np.arange(seconds * RATE) / RATE
            tone = 0.3 * np.sin(2 * np.pi * (300 + 40 * time) * time) * (time % 0.5 < 0.4)
            soundfile.write(folder / "wav" / wav, tone + random.normal(0, 0.01, len(time)), RATE, "PCM_16")
        counts = "rW: 9, uW: 0, " if version == 2 else ""
        lines = [
            f"- {{duration: {duration:.6f}, offset: {offset:.6f}, {counts}speaker_id: spk.7, wav: {wav}}}\n"
            for wav, offset, duration, _, _ in SEGMENTS
        ]
        (folder / "txt" / f"{split}.yaml").write_text("".join(lines))
        (folder / "txt" / f"{split}.en").write_text("".join(s[3] + "\n" for s in SEGMENTS))
        (folder / "txt" / f"{split}.de").write_text("".join(s[4] + "\n" for s in SEGMENTS))
    return root


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("template"))


@pytest.fixture
def corpus(template: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(template, tmp_path / "corpus")


@pytest.fixture
def edit(corpus: Path) -> Callable[[str, str, str], Path]:
    """edit("train.yaml", old, new) changes the file and returns its path."""

    def change(name: str, old: str, new: str) -> Path:
        path = corpus / "en-de" / "data" / name.partition(".")[0] / "txt" / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))
        return path

    return change

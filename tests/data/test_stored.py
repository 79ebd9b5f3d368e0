"""Stored features: .npy, Sphinx's .mfc; text as input."""

import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from attnlab.data import AN4, SourceText, StoredFeatures, Tokenizer
from attnlab.data.corpus import Stored
from attnlab.data.speech.stored import slopes
from attnlab.errors import ConfigError, DataError

VALUES = np.arange(12, dtype=np.float32).reshape(4, 3)
PLAIN = StoredFeatures(3, normalize=False)


def sphinx(path: Path) -> Path:
    path.write_bytes(struct.pack(">i", VALUES.size) + VALUES.astype(">f4").tobytes())
    return path


def npy(path: Path) -> Path:
    np.save(path.with_suffix(".npy"), VALUES.astype(np.float16))
    return path.with_suffix(".npy")


@pytest.mark.parametrize("write", [sphinx, npy])
def test_every_format_gives_the_numbers(write: Callable[[Path], Path], tmp_path: Path) -> None:
    path = write(tmp_path / "x.mfc")
    assert PLAIN.frames(path) == 4
    np.testing.assert_array_equal(PLAIN(path), VALUES)
    with pytest.raises(DataError, match=rf"{path.name}: .*(expected \(frames, 5\)|5 for a frame)"):
        StoredFeatures(5).frames(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.mfc", b"\0\0\0\x0c" + bytes(46), "its header says 12 values"),
        ("x.mfc", None, "cannot be read"),
        ("x.npy", b"", "write it again"),
        ("x.npy", pickle.dumps([1.0]), "write it again .*magic string"),
        ("x.npy", b"PK\x03\x04 an archive", "write it again .*magic string"),
        ("x.npy", np.array([["a", "b"]]), "expected an array of numbers"),
        ("x.npy", np.array([{}], dtype=object), "expected a feature file"),  # nothing is unpickled
        ("x.npy", np.zeros((0, 3)), r"features of shape \(0, 3\), expected \(frames, 3\)"),
        ("x.npy", np.full((2, 3), np.nan), "contains NaN or infinity"),
    ],
)
def test_a_file_without_features(name: str, content: bytes | np.ndarray | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.save(path, content, allow_pickle=True)
    with pytest.raises(DataError, match=rf"{name}: .*{message}") as error:
        PLAIN(path)
    assert "\n" not in str(error.value)


def test_slopes_are_the_regression() -> None:
    line = np.stack([3.0 * np.arange(9), np.arange(9.0) ** 2], 1).astype(np.float32)
    slope = slopes(line)
    np.testing.assert_allclose(slope[2:-2, 0], 3.0)
    np.testing.assert_allclose(slope[2:-2, 1], 2 * np.arange(2, 7))
    assert slope[0, 0] == pytest.approx(3 * (1 * 1 + 2 * 2) / 10)  # the ends are repeated


def test_deltas_and_normalisation(tmp_path: Path) -> None:
    store = StoredFeatures(9, deltas=2).open([Stored(id="a", source="", target="", path=sphinx(tmp_path / "x.mfc"))])
    assert store.lengths.tolist() == [4]
    x = store[0]
    assert x.shape == (4, 9) and x.dtype == np.float32
    np.testing.assert_allclose(x.mean(0), 0, atol=1e-6)
    with pytest.raises(ConfigError, match="width=10, deltas=2"):
        StoredFeatures(10, deltas=2)


def test_real_stored_features(corpora: Path) -> None:
    test = AN4().read(corpora / "asr_an4_mfcc", "test", "stored", False)
    store = StoredFeatures(39, deltas=2).open(test)  # type: ignore[arg-type]
    assert len(store.lengths) == 130 and 150 < store.lengths.mean() < 600
    assert store[0].shape == (store.lengths[0], 39)


def test_long_texts_are_cut_and_counted() -> None:
    tokenizer = Tokenizer.train(["a b c d e f g"] * 3, 12, "char")
    inputs = SourceText(max_tokens=6).texts(["a b c d e", "a b"], tokenizer)
    assert inputs.lengths.tolist() == [6, 5] and inputs.truncated == 1  # "▁a▁b▁" and </s>
    assert inputs[0][-1] == inputs[1][-1] == Tokenizer.eos
    assert tokenizer.decode(inputs[0].tolist()).split() == ["a", "b"]

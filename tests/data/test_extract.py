"""Stored features of a whole corpus, with a stand-in for the pretrained model."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Wav2Vec2Config, Wav2Vec2Model

from attnlab.data import Kaldi, StoredFeatures
from attnlab.data.speech.extract import extract, pretrained
from attnlab.data.speech.features import Array
from attnlab.errors import DataError
from tests.data.test_readers import audio, write


def halves(samples: Array) -> Array:
    """Two numbers for each 20 ms."""
    return np.stack([samples[: len(samples) // 320 * 320 : 320]] * 2, 1)


def test_a_corpus_is_stored_and_read_back(tmp_path: Path) -> None:
    root, out = tmp_path / "in", tmp_path / "out"
    for split in Kaldi.splits:
        write(root / split / "text", "a ONE TWO")
        write(root / split / "wav.scp", f"a {audio(root / 'a.wav', 1)}")
    extract(Kaldi(), root, out, halves, speeds=(0.5, 1.0))
    train = Kaldi().read(out, "train", "stored", False)
    assert [(x.id, x.target) for x in train] == [("sp0.5-a", "ONE TWO"), ("a", "ONE TWO")]
    store = StoredFeatures(2).open(train)  # type: ignore[arg-type]
    assert store.lengths.tolist() == [100, 50] and store[0].shape == (100, 2)
    assert [x.id for x in Kaldi().read(out, "eval", "stored", False)] == ["a"]
    extract(Kaldi(), root, out, lambda _: pytest.fail("computed again"), speeds=(0.5, 1.0))


def test_an_id_that_leaves_the_directory_is_refused(tmp_path: Path) -> None:
    for split in Kaldi.splits:
        write(tmp_path / split / "text", "../../a ONE")
        write(tmp_path / split / "wav.scp", f"../../a {audio(tmp_path / 'a.wav', 1)}")
    with pytest.raises(DataError, match=r"'\.\./\.\./a' of train cannot be the name of a file"):
        extract(Kaldi(), tmp_path, tmp_path / "out", halves)


def test_without_the_extra_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(DataError, match=r"transformers is not installed: pip install 'attnlab\[hf\]'"):
        pretrained("any", "mean", "cpu")


def test_a_model_of_hugging_face_from_its_directory(tmp_path: Path) -> None:
    """A tiny wav2vec 2.0 with random weights: frames of 20 ms, one layer or the mean of all."""
    torch.manual_seed(0)
    config = Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        conv_dim=(8,) * 7, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
    )  # fmt: skip
    network = Wav2Vec2Model(config).eval()
    network.save_pretrained(tmp_path)
    samples = np.random.default_rng(0).normal(size=16000).astype(np.float32)
    layers = [pretrained(str(tmp_path), str(layer), "cpu")(samples) for layer in range(3)]
    assert [layer.shape for layer in layers] == [(49, 16)] * 3
    np.testing.assert_allclose(pretrained(str(tmp_path), "mean", "cpu")(samples), np.mean(layers, 0), atol=1e-5)
    normal = torch.nn.functional.layer_norm(torch.from_numpy(samples), (16000,))[None]
    with torch.inference_mode():
        np.testing.assert_allclose(layers[2], network(normal).last_hidden_state[0].numpy(), atol=1e-5)

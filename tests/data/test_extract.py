"""Stored features of a corpus, with a stand-in for the pretrained model."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import WavLMConfig, WavLMModel

from attnlab.data import Kaldi, StoredFeatures
from attnlab.data.speech.extract import extract, pretrained
from attnlab.data.speech.features import Array
from attnlab.errors import DataError
from tests.data.layouts import audio, write


def corpus(root: Path, *ids: str) -> Path:
    for split in Kaldi.splits:
        write(root / split / "text", *(f"{id} ONE" for id in ids))
        write(root / split / "wav.scp", *(f"{id} {audio(root / f'{id}.wav', 1)}" for id in ids))
    return root


def halves(samples: Array) -> Array:
    """Two numbers for each 20 ms."""
    return np.stack([samples[: len(samples) // 320 * 320 : 320]] * 2, 1)


def test_a_corpus_is_stored_and_read_back(tmp_path: Path) -> None:
    root, out = corpus(tmp_path / "in", "a"), tmp_path / "out"
    extract(Kaldi(), root, out, halves, (0.5, 1.0), {})
    train = Kaldi().read(out, "train", "stored", False)
    assert [(x.id, x.target) for x in train] == [("sp0.5-a", "ONE"), ("a", "ONE")]
    store = StoredFeatures(2).open(train)  # type: ignore[arg-type]
    assert store.lengths.tolist() == [100, 50] and store[0].shape == (100, 2)
    assert [x.id for x in Kaldi().read(out, "eval", "stored", False)] == ["a"]
    extract(Kaldi(), root, out, lambda _: pytest.fail("computed again"), (0.5, 1.0), {})


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("the file ran code",)


def test_weights_in_a_bin_file_are_read_and_cannot_run_code(tmp_path: Path) -> None:
    """WavLM Large was published as pytorch_model.bin."""
    network = tiny(tmp_path)
    samples = np.random.default_rng(0).normal(size=4000).astype(np.float32)
    wanted = pretrained(str(tmp_path), "all", "cpu")(samples)
    (tmp_path / "model.safetensors").unlink()
    torch.save(network.state_dict(), tmp_path / "pytorch_model.bin")
    np.testing.assert_array_equal(pretrained(str(tmp_path), "all", "cpu")(samples), wanted)
    torch.save(network.state_dict() | {"x": Harmful()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(DataError, match=r"--model=.*: cannot be read .*tensors alone"):
        pretrained(str(tmp_path), "all", "cpu")
    with pytest.raises(DataError, match=r"--model=.*: cannot be read .*config\.json and model\.safetensors"):
        pretrained(str(tmp_path / "none"), "all", "cpu")


def tiny(folder: Path) -> WavLMModel:
    """Stores a WavLM of two layers with random weights."""
    config = WavLMConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        conv_dim=(8,) * 7, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, num_buckets=8,
    )  # fmt: skip
    network = WavLMModel(config).eval()
    network.save_pretrained(folder)
    return network


def test_one_layer_the_mean_or_all_of_a_model(tmp_path: Path) -> None:
    """Frames of 20 ms. The last layer is the output of the model."""
    network = tiny(tmp_path)
    samples = np.random.default_rng(0).normal(size=16000).astype(np.float32)
    layers = [pretrained(str(tmp_path), str(layer), "cpu")(samples) for layer in range(3)]
    together = pretrained(str(tmp_path), "all", "cpu")(samples)
    assert together.shape == (49, 3, 16)
    np.testing.assert_array_equal(together, np.stack(layers, 1))
    np.testing.assert_allclose(pretrained(str(tmp_path), "mean", "cpu")(samples), np.mean(layers, 0), atol=1e-5)
    normal = torch.nn.functional.layer_norm(torch.from_numpy(samples), (16000,))[None]
    with torch.inference_mode():
        np.testing.assert_allclose(layers[2], network(normal).last_hidden_state[0].numpy(), atol=1e-5)
    with pytest.raises(DataError, match="--layer=3: .* has the layers 0 to 2"):
        pretrained(str(tmp_path), "3", "cpu")
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    with pytest.raises(DataError, match=r"its weights lack encoder\.layers\.2\..*another architecture"):
        pretrained(str(tmp_path), "3", "cpu")


@pytest.mark.slow
def test_the_command_needs_no_import_before_it(tmp_path: Path) -> None:
    """transformers reads WavLM through torchvision, which a CPU build of torch imports only with attnlab's schemas."""
    tiny(tmp_path / "model")
    root, out = corpus(tmp_path / "in", "a"), tmp_path / "out"
    words = ["--root", root, "--output", out, "--reader", "Kaldi", "--model", tmp_path / "model", "--layer", "all"]
    command = [sys.executable, "-m", "attnlab.data.speech.extract", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    assert np.load(out / "train" / "feats" / "a.npy").shape[1:] == (3, 16)


def test_an_interrupted_extraction_goes_on_and_mixes_nothing(tmp_path: Path) -> None:
    root, out = corpus(tmp_path / "in", "a", "b"), tmp_path / "out"
    about, computed = {"model": "m", "layer": "all"}, 0

    def interrupted(samples: Array) -> Array:
        nonlocal computed
        if computed == 3:
            raise KeyboardInterrupt
        computed += 1
        return halves(samples)

    with pytest.raises(KeyboardInterrupt):
        extract(Kaldi(), root, out, interrupted, (1.0,), about)
    assert len(list(out.rglob("*.npy"))) == 3 and not list(out.rglob("*.part"))
    with pytest.raises(DataError, match=r"extraction.json: the features here are of .*'all'.*not of .*'mean'"):
        extract(Kaldi(), root, out, halves, (1.0,), about | {"layer": "mean"})
    again: list[int] = []
    extract(Kaldi(), root, out, lambda samples: again.append(1) or halves(samples), (1.0,), about)  # type: ignore[func-returns-value]
    assert len(again) == 3 and len(list(out.rglob("*.npy"))) == 6
    assert all(len(Kaldi().read(out, split, "stored", False)) == 2 for split in Kaldi.splits)


def test_what_is_not_stored(tmp_path: Path) -> None:
    root = corpus(tmp_path / "in", "a", "b")

    def refused(message: str, source: Path = root, output: Path = tmp_path / "out", scale: float = 1.0) -> None:
        with pytest.raises(DataError, match=message):
            extract(Kaldi(), source, output, lambda samples: scale * np.ones((3, 2), np.float32), (1.0,), {})
        assert not list(tmp_path.rglob("*.npy"))

    refused(r"a has features that are NaN or beyond float16", scale=1e6)
    refused(r"--output=.*: the corpus itself", output=tmp_path / "in" / ".." / "in")
    assert (root / "train" / "text").read_text() == "a ONE\nb ONE\n"
    outside = corpus(tmp_path / "other" / "x" / "y", "../../a")
    refused(r"'\.\./\.\./a' of train cannot be the name of a file", source=outside)

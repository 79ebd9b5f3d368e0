"""The sample of a pretrained decoder: trained once, stored, and trained to recall on request."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from attnlab.conversion import sample
from attnlab.data import WikiText


@pytest.mark.slow
def test_a_model_that_recalls_begins_with_the_one_that_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample, "STEPS", 1)
    monkeypatch.setattr(sample, "WINDOW", 32)
    monkeypatch.setattr(sample, "FARTHEST", 20)
    for split in ("train", "valid", "test"):
        (tmp_path / f"wiki.{split}.tokens").write_text(" one two three four five \n" * 40)
    arguments = (WikiText(), tmp_path, tmp_path / "cache", 1)
    taught = sample.sample_model(*arguments, facts=2)
    folders = list((tmp_path / "cache" / "pretrained").glob("bytes-*"))
    plain = sample.sample_model(*arguments)
    assert {taught, plain} == set(folders), "the plain model was trained for it, and stored"
    assert sample.sample_model(*arguments, facts=2) == taught
    weights = [load_file(folder / "model.safetensors") for folder in (plain, taught)]
    assert not torch.equal(*(one["model.layers.0.self_attn.q_proj.weight"] for one in weights))
    keyed = load_file(sample.sample_model(*arguments, facts=2, keys=2) / "model.safetensors")
    assert not torch.equal(*(one["model.embed_tokens.weight"] for one in (weights[1], keyed)))
    assert len(list((tmp_path / "cache" / "pretrained").glob("bytes-*"))) == 3, "it begins with the stored one"

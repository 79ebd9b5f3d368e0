"""The sample of a pretrained decoder: trained once, stored, and taught to recall where a run asks for that."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from attnlab.conversion import sample
from attnlab.data import WikiText


@pytest.fixture
def text() -> torch.Tensor:
    return torch.randint(97, 123, (4000,), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("far", "known"), [(sample.NEAREST, 1), (sample.FARTHEST, 2)])
def test_rows_have_facts_that_are_said_again(text: torch.Tensor, far: int, known: int) -> None:
    draw, told, again = np.random.default_rng(0), 0, 0
    for _ in range(50):
        row = sample._with_facts(text, draw, far)
        assert row.shape == (sample.WINDOW + 1,)
        numbers = re.findall(r"(\d{5})\.", bytes(row.tolist()).decode())
        for place, number in enumerate(numbers):
            told += 1
            again += number in numbers[:place]
            assert number not in list(dict.fromkeys(numbers[:place]))[:-known], (
                "a fact is repeated that is not among the last ones"
            )
    assert 0.15 < again / told < sample.AGAIN


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

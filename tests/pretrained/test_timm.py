"""Weights of timm's hub: from the cache without a network, else refused within seconds."""

import time
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

from attnlab.errors import DataError
from attnlab.pretrained.timm import Timm

NAME = "deit_tiny_patch16_224.fb_in1k"


def test_the_cache_needs_no_network(cache: Path) -> None:
    place = cache / f"models--timm--{NAME}"
    (place / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0" * 40)
    published, actual = (timm.create_model(NAME.partition(".")[0]) for _ in range(2))
    torch.nn.init.normal_(published.get_parameter("head.weight"))
    save_file(published.state_dict(), place / "snapshots" / ("0" * 40) / "model.safetensors")
    Timm().load(actual, NAME)
    assert all(torch.equal(value, published.state_dict()[name]) for name, value in actual.state_dict().items())
    (place / "snapshots" / ("0" * 40) / "model.safetensors").write_bytes(b"short")
    with pytest.raises(DataError, match=rf"model={NAME}: timm cannot load .*model.safetensors"):
        Timm().load(actual, NAME)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (NAME, r"the hub cannot be reached \(.*\); download it on a machine with a network, and give the file"),
        ("deit_tiny_patch16_224.fb_in2k", r"neither a local file nor weights that timm knows \(Invalid pretrained tag"),
        ("no_such_model", r"neither a local file nor weights that timm knows"),
    ],
)
def test_no_such_weights(source: str, message: str) -> None:
    model, began = timm.create_model(NAME.partition(".")[0], depth=1), time.perf_counter()
    with pytest.raises(DataError, match=f"model={source}: .*{message}"):
        Timm().load(model, source)
    assert time.perf_counter() - began < 5

"""Promises of every family, by discovery; a new one adds a tiny model here."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from attnlab.errors import ConfigError
from attnlab.pretrained import ATTENTION, Projection, families, family_of, huggingface
from tests.compression.llama import llama, words
from tests.compression.models import images, vit
from tests.pretrained import tiny

TINY: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "timm": (vit, images),
    "test-llama": (llama, words),
    **{kind: (partial(tiny.tiny, kind), tiny.ids) for kind in tiny.OPTIONS},
}


def test_every_family_has_a_tiny_model() -> None:
    assert {family_of(make()).name for make, _ in TINY.values()} == set(families())
    assert set(tiny.OPTIONS) == set(huggingface.language_families())


@pytest.mark.parametrize("name", TINY)
def test_layers(name: str) -> None:
    make, inputs = TINY[name]
    model = make()
    family = family_of(model)
    assert family.name == name or name in getattr(family, "classes", {})
    layers = family.layers(model)
    assert layers and all(set(ATTENTION) <= set(layer.projections) and layer.matrices for layer in layers)
    assert family.layers(make().to("meta")) == layers  # sizes need no weights
    with torch.no_grad():
        expected = tiny.logits(model, inputs())
        for layer in layers:
            for place in layer.projections.values():
                weight, bias = place.read(model).clone(), place.read_bias(model)
                assert tuple(weight.shape) == place.shape and (bias is not None) == place.bias
                before = {key: value.clone() for key, value in model.state_dict().items()}
                old = None if bias is None else bias.clone()
                place.write(model, 2 * weight, None if old is None else 2 * old)
                after = model.state_dict()
                assert {key for key in after if not torch.equal(after[key], before[key])} == {
                    f"{place.path}.{part}" for part in ("weight", *(["bias"] if place.bias else []))
                }
                torch.testing.assert_close(place.read(model), 2 * weight)
                assert not torch.equal(tiny.logits(model, inputs()), expected)
                place.write(model, weight, old)
                assert torch.equal(tiny.logits(model, inputs()), expected)
                if place.axis:
                    parts = place.split(weight)
                    width = place.shape[1 if place.axis == "out" else 0]
                    assert parts.shape == (place.heads, width, place.width)
                    assert torch.equal(place.join(parts), weight)


def test_a_model_of_no_family() -> None:
    with pytest.raises(ConfigError, match=r"Linear is of no known family of models \(.*timm\); a new one is a file in"):
        family_of(nn.Linear(2, 2))


def test_a_bias_where_there_is_none() -> None:
    model = nn.Module()
    model.one = nn.Linear(2, 3, bias=False)
    place = Projection("one", (3, 2))
    place.write(model, torch.ones(3, 2), torch.zeros(3))
    with pytest.raises(ConfigError, match="one has no bias"):
        place.write(model, torch.ones(3, 2), torch.ones(3))

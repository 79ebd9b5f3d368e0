"""Memoized tables stay real and usable, whatever mode first needed them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from attnlab.attention import MHA, MTLA, Attention

WIDTHS = iter(range(24, 4000, 8))  # each test takes widths whose tables nothing else has needed


def export(attention: Attention, x: Tensor) -> None:
    torch.export.export(attention, (x,), strict=False)


def fake(attention: Attention, x: Tensor) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        attention(mode.from_tensor(x))


def compiled(attention: Attention, x: Tensor) -> None:
    torch._dynamo.reset()
    torch.compile(attention, backend="eager")(x)


def inference(attention: Attention, x: Tensor) -> None:
    with torch.inference_mode():
        attention(x)


def transformed(attention: Attention, x: Tensor) -> None:
    torch.func.vmap(torch.func.grad(lambda x: attention(x).sum()))(x[None])


@pytest.mark.parametrize("mode", [export, fake, compiled, inference, transformed], ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", [MHA, MTLA])
def test_a_mode_leaves_no_tensors_behind(kind: Callable[..., Attention], mode: Callable[..., None]) -> None:
    width = next(WIDTHS)
    x = torch.randn(1, 6, 2 * width)
    with torch.no_grad():
        mode(kind(2 * width, 2).eval(), x)
    attention = kind(2 * width, 2)
    y = attention(x)
    y.sum().backward()
    assert type(y) is Tensor and y.isfinite().all()
    cache = attention.new_cache(1, 6)
    assert (attention.extend(x, cache) - y).abs().max() < 1e-4

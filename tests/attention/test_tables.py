"""Memoized tables stay real and usable, whatever mode first needed them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from attnlab.attention import MHA, MTLA, Attention
from attnlab.attention.ops.backends import memoized

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


@pytest.mark.parametrize("mode", [export, fake, compiled, inference], ids=lambda f: f.__name__)
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


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, make_fx], ids=lambda f: f.__name__)
def test_transforms_get_tables_of_their_own(transform: Callable[..., Callable[[Tensor], object]]) -> None:
    made = []

    @memoized
    def table(size: int) -> Tensor:
        made.append(size)
        return torch.arange(float(size))

    def function(x: Tensor) -> Tensor:
        return (x * table(3)).sum()

    transform(function)(torch.ones(3) if transform is not torch.func.vmap else torch.ones(2, 3))
    plain = table(3)
    assert not torch._C._functorch.is_functorch_wrapped_tensor(plain) and type(plain) is Tensor
    assert table(3) is plain and made == [3, 3]
    transform(function)(torch.ones(3) if transform is not torch.func.vmap else torch.ones(2, 3))
    assert table(3) is plain

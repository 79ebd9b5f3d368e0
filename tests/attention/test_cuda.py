"""On a GPU: the CUDA kernels against float64 on the CPU, their dropout, and steps that never wait for the host."""

import copy

import pytest
import torch
from torch import Tensor

from attnlab.attention.ops.partial_softmax import Past, merged_attention
from tests.attention.mechanisms import EVERY, Mechanism, extend_by, prefix_lengths

DEVICE = "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
every = pytest.mark.parametrize("mechanism", EVERY, ids=str)


@every
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-3), (torch.bfloat16, 0.15)], ids=str
)
@pytest.mark.parametrize("ragged", [False, True], ids=["uniform", "ragged"])
def test_equals_float64_on_the_cpu(mechanism: Mechanism, dtype: torch.dtype, tolerance: float, ragged: bool) -> None:
    attention = mechanism.build(dtype=dtype)
    lengths, steps = prefix_lengths(mechanism.grid), 2 * mechanism.grid + 3
    x = torch.randn(len(lengths), steps, 32, dtype=dtype)
    prefix = torch.randn(len(lengths), int(lengths.max()), 32, dtype=dtype)
    g = torch.randn_like(x)
    results = []
    exact = copy.deepcopy(attention).double()
    for module, device, wide in ((exact, "cpu", torch.float64), (attention.to(DEVICE), DEVICE, dtype)):
        read = lengths.to(device) if ragged else None
        inputs = [t.to(device, wide).requires_grad_() for t in (x, prefix)]
        y = module(*inputs, prefix_lengths=read)
        grads = torch.autograd.grad(y, [*inputs, *module.parameters()], g.to(y))
        cache = module.new_cache(len(x), steps, prefix.shape[1])
        module.read_prefix(inputs[1].detach(), read, cache)
        stepped = extend_by(module, inputs[0].detach(), cache, [1, 1, 3, *[1] * (steps - 5)])
        results.append([t.cpu() for t in (y, stepped, *grads)])
    for want, got in zip(*results, strict=True):
        assert (got - want).double().norm() / want.norm().clamp(min=1e-3 * want.numel() ** 0.5) < tolerance


def draw(stride: int, draws: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same row `draws` times; queries, packed keys and values, a past shared by pairs of rows, its mask."""
    generator = torch.Generator().manual_seed(2)

    def repeated(count: int, *shape: int) -> Tensor:
        row = torch.randn(1, *shape, generator=generator)
        return row.repeat(count, *[1] * len(shape)).to(DEVICE).requires_grad_()

    mask = torch.tensor([[True, True, False, True, False]]).repeat(draws // 2, 1).to(DEVICE)
    return repeated(draws, 2 * stride, 2, 24), repeated(draws, 2 * stride, 2, 40), repeated(draws // 2, 5, 2, 40), mask


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_dropout_averages_out(stride: int) -> None:
    q, packed, past, mask = draw(stride, 4000)
    many = merged_attention(q, packed, 16, 0.2, stride=stride, past=[Past(past, mask)], dropout=0.25).double()
    want = merged_attention(q, packed, 16, 0.2, stride=stride, past=[Past(past, mask)])[0].double()
    assert ((many.mean(0) - want).abs() < 5 * many.std(0) / 4000**0.5 + 1e-5).all()
    assert (many.std(0) > 0).all()


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_dropout_backward_is_the_slope_of_its_forward(stride: int) -> None:
    """Along a random direction, with the same positions dropped."""
    inputs = list(draw(stride, 4)[:3])
    mask = draw(stride, 4)[3]
    g = torch.randn(4, 2 * stride, 2, 16, device=DEVICE)

    def loss(q: Tensor, packed: Tensor, past: Tensor) -> Tensor:
        torch.manual_seed(3)
        return (merged_attention(q, packed, 16, 0.2, stride=stride, past=[Past(past, mask)], dropout=0.25) * g).sum()

    grads = torch.autograd.grad(loss(*inputs), inputs)
    for n, grad in enumerate(grads):
        direction, eps = torch.randn_like(grad), 1e-2
        ends = [[t + sign * eps * direction if n == i else t for i, t in enumerate(inputs)] for sign in (1, -1)]
        slope = (loss(*ends[0]) - loss(*ends[1])) / (2 * eps)
        assert slope.item() == pytest.approx((grad * direction).sum().item(), rel=0.02, abs=0.02)


@every
@pytest.mark.parametrize("ragged", [False, True], ids=["uniform", "ragged"])
def test_a_step_never_waits_for_the_host(mechanism: Mechanism, ragged: bool) -> None:
    attention = mechanism.build(dtype=torch.float32).to(DEVICE)
    cache = attention.new_cache(4, 12, 5, prefix_batch=2)
    lengths = torch.tensor([5, 2], device=DEVICE) if ragged else None
    attention.read_prefix(torch.randn(2, 5, 32, device=DEVICE), lengths, cache)
    x, rows = torch.randn(4, 1, 32, device=DEVICE), torch.tensor([1, 0, 2, 2], device=DEVICE)
    attention.extend(x, cache)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(9):
            attention.extend(x, cache)
            cache.reorder(rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")

"""FlexAttention: the pattern of merged attention and windows, as torch computes it eagerly on a CPU, forward alone."""

import pytest
import torch

from attnlab.attention.ops.backends import Backend, prefer
from attnlab.attention.ops.flex import BLOCK, Part, block_mask
from attnlab.attention.ops.partial_softmax import Past, merged_attention
from tests.attention.mechanisms import Mechanism, error, prefix_lengths
from tests.attention.test_merged import VALUE, dense, draw

GPU = [pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize(
    ("stride", "kind"),
    [(2, "all"), *(pytest.param(s, k, marks=pytest.mark.slow) for s in (1, 3) for k in ("alone", "past", "all"))],
)
def test_forward_equals_one_dense_softmax(stride: int, kind: str) -> None:
    q, packed, past = draw(stride, 3, kind)
    with torch.no_grad(), prefer(Backend.FLEX):
        got = merged_attention(q, packed, VALUE, 0.7, stride=stride, past=past)
    assert error(got, dense(q, packed, 0.7, stride, past)[0]) < 1e-12


@pytest.mark.parametrize("name", ["mla_window", pytest.param("sliding_window", marks=pytest.mark.slow)])
def test_mechanisms_equal_their_default(name: str) -> None:
    """With ragged prefixes, and for windows several blocks of dense attention."""
    attention = Mechanism(name, window=3).build()
    lengths = prefix_lengths(3)
    x, prefix = torch.randn(len(lengths), 70, 32).double(), torch.randn(len(lengths), int(lengths.max()), 32).double()
    with torch.no_grad():
        want = attention(x, prefix, prefix_lengths=lengths)
        with prefer(Backend.FLEX):
            assert error(attention(x, prefix, prefix_lengths=lengths), want) < 1e-11


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (300, 300), (257, 129)])
@pytest.mark.parametrize("kind", ["window", "slots", "exists"])
def test_blocks_are_those_that_a_dense_mask_needs(rows: int, size: int, kind: str) -> None:
    """None of a block that is seen is left out, none that is seen in part is called whole, none unseen is listed."""
    i, j = torch.arange(rows)[:, None], torch.arange(size)
    low, high = (torch.arange(rows) - 140).clamp(min=0), torch.arange(rows) // (2 if kind == "slots" else 1) + 1
    exists = torch.arange(size) < torch.tensor([[0], [1], [min(size, 128)], [size]])
    keys = torch.zeros(4, 1, size, 16)
    part = {
        "window": Part(keys, keys, low, high),
        "slots": Part(keys, keys, high=high),
        "exists": Part(keys, keys, exists=exists),
    }[kind]
    seen = ((j >= low[:, None]) if kind == "window" else (j >= 0)) & (
        (j < high[:, None]) if kind != "exists" else i >= 0
    )
    seen = seen & (exists[:, None] if kind == "exists" else torch.ones(1, 1, size, dtype=torch.bool))
    result = block_mask(part, rows)
    assert result is not None and result.full_kv_num_blocks is not None and result.full_kv_indices is not None
    for b in range(len(seen)):
        for n, begin in enumerate(range(0, rows, BLOCK)):
            partly = result.kv_indices[b, 0, n, : int(result.kv_num_blocks[b, 0, n])].tolist()
            whole = result.full_kv_indices[b, 0, n, : int(result.full_kv_num_blocks[b, 0, n])].tolist()
            for m, first in enumerate(range(0, size, BLOCK)):
                tile = seen[b, begin : begin + BLOCK, first : first + BLOCK]
                assert (m in whole) == bool(tile.all())
                assert (m in partly) == bool(tile.any() and not tile.all())


def test_a_gradient_on_the_cpu_is_refused_by_name() -> None:
    q, packed, _ = draw(1, 3, "alone")
    with (
        prefer(Backend.FLEX),
        pytest.raises(ValueError, match="FLEX .* merged: FlexAttention has no gradient on a CPU"),
    ):
        merged_attention(q, packed, VALUE, 0.7)
    with prefer(Backend.FLEX), torch.no_grad(), pytest.raises(ValueError, match="dropout is 0.1"):
        merged_attention(q, packed, VALUE, 0.7, dropout=0.1)


@pytest.mark.parametrize("device", GPU)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_backward_on_a_gpu(device: str, dtype: torch.dtype, stride: int) -> None:
    """400 positions after a ragged prefix of 130 that two rows share; heads of 24 with values of 16."""
    exact = [torch.randn(n, t, 2, w, dtype=torch.float64) for n, t, w in ((4, 402, 24), (4, 402, 40), (2, 130, 40))]
    total = 402 // stride * stride
    exact = [t[:, :total] if t.shape[1] == 402 else t for t in exact]
    mask, g = torch.arange(130) < torch.tensor([[130], [3]]), torch.randn(4, total, 2, 16, dtype=torch.float64)
    results = []
    for backend, where, kind in ((Backend.FUSED_CPU, "cpu", torch.float64), (Backend.FLEX, device, dtype)):
        leaves = [t.to(where, dtype).to(kind).requires_grad_() for t in exact]
        with prefer(backend):
            past = [Past(leaves[2], mask.to(where))]
            out = merged_attention(leaves[0], leaves[1], 16, 0.2, stride=stride, past=past)
        results.append([t.cpu().double() for t in (out, *torch.autograd.grad(out, leaves, g.to(out)))])
    for want, got in zip(*results, strict=True):
        assert (got - want).norm() / want.norm() < (3e-2 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("device", GPU)
def test_a_wide_window_takes_it_on_a_gpu(device: str) -> None:
    attention = Mechanism("sliding_window").build("attention.window=512", "task.attention_heads=2", dtype=torch.float32)
    wide = attention.to(device)
    x = torch.randn(1, 1300, 32, device=device, requires_grad=True)
    with prefer(Backend.SDPA):
        want = torch.autograd.grad(wide(x).square().sum(), x)[0]
    got = torch.autograd.grad(wide(x).square().sum(), x)[0]
    assert (got - want).norm() / want.norm() < 2e-3

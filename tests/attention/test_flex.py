"""FlexAttention for windows, as torch computes it eagerly on a CPU, forward alone, and compiled on a GPU."""

import pytest
import torch

from attnlab.attention.ops.backends import Backend, choose, prefer
from attnlab.attention.ops.flex import BLOCK, SeenKeys, block_mask
from tests.attention.mechanisms import Mechanism, error, prefix_lengths


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
@pytest.mark.parametrize("kind", ["window", "causal", "exists"])
def test_blocks_are_those_that_a_dense_mask_needs(rows: int, size: int, kind: str) -> None:
    """No block that is seen is missing, no block that is seen in part is called full, no unseen block is listed."""
    i, j = torch.arange(rows)[:, None], torch.arange(size)
    keys, low, high = torch.zeros(4, 1, size, 16), (torch.arange(rows) - 140).clamp(min=0), torch.arange(rows) + 1
    exists = torch.arange(size) < torch.tensor([[0], [1], [min(size, 128)], [size]])
    part, seen = {
        "window": (SeenKeys(keys, keys, low, high), ((j >= low[:, None]) & (j <= i))[None]),
        "causal": (SeenKeys(keys, keys, high=high), (j <= i)[None]),
        "exists": (SeenKeys(keys, keys, exists=exists), exists[:, None].expand(-1, rows, -1)),
    }[kind]
    result = block_mask(part, rows)
    assert result is not None and result.full_kv_num_blocks is not None and result.full_kv_indices is not None
    for b in range(len(seen)):
        for n, begin in enumerate(range(0, rows, BLOCK)):
            partly = result.kv_indices[b, 0, n, : int(result.kv_num_blocks[b, 0, n])].tolist()
            full = result.full_kv_indices[b, 0, n, : int(result.full_kv_num_blocks[b, 0, n])].tolist()
            for m, first in enumerate(range(0, size, BLOCK)):
                tile = seen[b, begin : begin + BLOCK, first : first + BLOCK]
                assert (m in full) == bool(tile.all())
                assert (m in partly) == bool(tile.any() and not tile.all())


def test_what_it_lacks_on_a_cpu_is_refused() -> None:
    q = torch.randn(1, 2, 3, 16, requires_grad=True)
    with prefer(Backend.FLEX):
        with pytest.raises(ValueError, match="FLEX .* window: FlexAttention has no gradient on a CPU"):
            choose("window", q)
        with torch.no_grad(), pytest.raises(ValueError, match="dropout is 0.1"):
            choose("window", q, dropout=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sliding_window", "mla_window"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_and_backward_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    """1,300 positions after ragged prefixes; a window of 512 takes it by default where dense blocks would be wide."""
    attention = Mechanism(name).build("attention.window=512", "task.attention_heads=2", dtype=dtype).to("cuda")
    x = torch.randn(2, 1300, 32, device="cuda", dtype=dtype, requires_grad=True)
    prefix, lengths = torch.randn(2, 130, 32, device="cuda", dtype=dtype), torch.tensor([130, 3], device="cuda")
    gradients = []
    for backend in (Backend.SDPA, Backend.FLEX):
        with prefer(backend):
            y = attention(x, prefix, prefix_lengths=lengths)
        gradients.append(torch.autograd.grad(y.float().square().sum(), x)[0].float())
    want, got = gradients
    assert (got - want).norm() / want.norm() < (5e-2 if dtype == torch.bfloat16 else 2e-3)

"""One rotary convention in the house, and how the published ones are permutations of it."""

import copy

import pytest
import torch
from torch import Tensor, nn

from attnlab.attention import MHA, MLA, MTLA
from attnlab.attention.ops import kernels, naive
from attnlab.attention.ops.backends import Backend, prefer
from attnlab.attention.ops.rope import adjacent_to_half_split, rotary_table, rotate
from tests.attention.mechanisms import error

THETA = 10000.0


def turned(x: Tensor, theta: float = THETA) -> Tensor:
    """x (T, D) at positions 0 ... T - 1."""
    return rotate(x, *rotary_table(x.shape[1], theta, len(x), x.dtype, x.device))


def one_by_one(x: Tensor, turn: naive.Turn, theta: float = THETA) -> Tensor:
    return torch.stack([turn(v, position, theta) for position, v in enumerate(x)])


@pytest.mark.parametrize("width", [2, 6, 32, 64])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_half_split_pairs_with_llamas_sign(width: int, theta: float) -> None:
    x = torch.randn(50, width, dtype=torch.float64)
    assert error(turned(x, theta), one_by_one(x, naive.half_split, theta)) < 1e-12


def test_adjacent_pairs_are_a_permutation() -> None:
    x, p = torch.randn(50, 12, dtype=torch.float64), adjacent_to_half_split(12)
    assert sorted(p.tolist()) == list(range(12))
    assert error(turned(x[:, p]), one_by_one(x, naive.adjacent)[:, p]) < 1e-12
    assert error(turned(x), one_by_one(x, naive.adjacent)) > 0.1  # they do differ


def test_the_opposite_sign_is_the_halves_swapped() -> None:
    x, p = torch.randn(50, 12, dtype=torch.float64), torch.arange(12).roll(6)
    assert error(turned(x[:, p]), one_by_one(x, naive.opposite)[:, p]) < 1e-12
    assert error(turned(x), one_by_one(x, naive.opposite)) > 0.1


def permute_rows(linear: nn.Linear, heads: int, start: int, p: Tensor) -> None:
    """In each head's rows of `linear`, permute those from `start` on."""
    order = torch.cat((torch.arange(start), start + p))
    with torch.no_grad():
        for tensor in (linear.weight, linear.bias):
            if tensor is not None:
                rows = tensor.unflatten(0, (heads, -1))
                rows.copy_(rows[:, order].clone())


@pytest.mark.parametrize("turn", [naive.adjacent, naive.opposite], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "published",
    [MHA(32, 4), MHA(32, 4, 2), MHA(32, 4, 1), MLA(32, 4), MTLA(32, 4, stride=2), MTLA(32, 4, stride=3)],
    ids=["mha", "gqa", "mqa", "mla", "mtla-s2", "mtla-s3"],
)
def test_a_module_with_permuted_weights_is_the_published_one(published: MHA | MLA, turn: naive.Turn) -> None:
    published = copy.deepcopy(published).double()
    x, prefix = torch.randn(7, 32, dtype=torch.float64), torch.randn(5, 32, dtype=torch.float64)
    want = naive.attend(published, x, prefix, turn)
    ours = copy.deepcopy(published)
    assert error(ours(x[None], prefix[None])[0], want) > 1e-4  # unpermuted it is another function
    width = ours.head_dim if isinstance(ours, MHA) else ours.rope_dim
    p = adjacent_to_half_split(width) if turn is naive.adjacent else torch.arange(width).roll(width // 2)
    if isinstance(ours, MHA):
        permute_rows(ours.query, ours.num_heads, 0, p)
        permute_rows(ours.key, ours.num_kv_heads, 0, p)
    else:
        assert isinstance(ours.query, nn.Linear) and isinstance(ours.down, nn.Linear)
        permute_rows(ours.query, ours.num_heads, ours.head_dim, p)
        permute_rows(ours.down, 1, ours.latent_dim, p)
    assert error(ours(x[None], prefix[None])[0], want) < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_tables_are_float32_or_wider_and_exact_far_out(dtype: torch.dtype) -> None:
    positions = 40000
    cos, sin = rotary_table(64, THETA, positions, dtype, torch.device("cpu"))
    assert cos.dtype == sin.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert cos.shape == sin.shape == (positions, 32)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * THETA ** (
        -torch.arange(0, 64, 2, dtype=torch.float64) / 64
    )
    assert (cos - angles.cos()).abs().max() < 1e-7
    assert (sin - angles.sin()).abs().max() < 1e-7


def test_an_odd_width_is_an_error() -> None:
    with pytest.raises(ValueError, match="even"):
        rotary_table(7, THETA, 4, torch.float32, torch.device("cpu"))


@pytest.mark.skipif(not kernels.usable(torch.device("cpu")), reason="no interpreter")
def test_the_kernel_rotates_the_last_columns_and_back() -> None:
    x, angles, g = torch.randn(2, 5, 3, 24).requires_grad_(), torch.randn(1, 5, 1, 4), torch.randn(2, 5, 3, 24)
    want = rotate(x, angles.cos(), angles.sin())
    with prefer(Backend.TRITON):
        got = rotate(x, angles.cos(), angles.sin())
    assert torch.equal(got[..., :16], x[..., :16])
    for a, b in ((got, want), (torch.autograd.grad(got, x, g)[0], torch.autograd.grad(want, x, g)[0])):
        torch.testing.assert_close(a, b)

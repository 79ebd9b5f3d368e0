"""The fused kernels' merger against one dense softmax: outputs, gradients, dropout."""

import math
import shutil
import sys
from itertools import product

import pytest
import torch
from torch import Tensor

from attnlab.attention import MTLA, TPA
from attnlab.attention.ops import kernels, partial_softmax
from attnlab.attention.ops.backends import Backend, noting, prefer, used
from attnlab.attention.ops.library import library
from attnlab.attention.ops.partial_softmax import Past, merged_attention, rebuilt_attention, tiled_attention
from tests.attention.mechanisms import error

HEADS, WIDTH, VALUE = 2, 6, 4  # keys wider than values, as MLA has them


def visible(total: int, stride: int, past: list[Past], batch: int) -> Tensor:
    """(B, T, T + all past keys) bool: what each query sees."""
    i, j = torch.arange(total)[:, None], torch.arange(total)
    seen = ((j <= i) & ((j + 1) % stride == 0)) | (i == j)
    parts = [seen.expand(batch, -1, -1)]
    for p in past:
        mask = torch.ones(p.packed.shape[:2], dtype=torch.bool) if p.mask is None else p.mask
        parts.append(mask.repeat_interleave(batch // len(mask), 0)[:, None].expand(-1, total, -1))
    return torch.cat(parts, -1)


def dense(
    q: Tensor, packed: Tensor, scale: float, stride: int, past: list[Past], value_dim: int = VALUE
) -> tuple[Tensor, Tensor, Tensor]:
    """Output (B, T, H, Dv), probabilities (B, H, T, columns) and values (B, H, columns, Dv)."""
    batch = len(q)
    every = torch.cat([packed, *[p.packed.repeat_interleave(batch // len(p.packed), 0) for p in past]], 1)
    value, key = every.tensor_split([value_dim], -1)
    seen = visible(q.shape[1], stride, past, batch)
    logits = torch.einsum("bthd,bkhd->bhtk", q, key) * scale
    p = logits.masked_fill(~seen[:, None], -math.inf).softmax(-1)
    return torch.einsum("bhtk,bkhv->bthv", p, value), p, value.transpose(1, 2)


def draw(stride: int, chunks: int, kind: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, list[Past]]:
    """Two sentences of two rows: queries, packed keys and values, past parts."""

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype).requires_grad_()

    total, width = stride * chunks, VALUE + WIDTH
    per_row, shared = leaf(4, 3, HEADS, width), leaf(2, 5, HEADS, width)
    row_mask = torch.tensor([[True] * 3, [True, False, True], [False] * 3, [False, False, True]])
    past = {
        "alone": [],
        "past": [Past(per_row)],
        "masked": [Past(per_row, row_mask)],
        "shared": [Past(shared)],
        "all": [Past(shared, torch.tensor([[True, True, False, False, False], [False] * 5])), Past(per_row, row_mask)],
    }[kind]
    return leaf(4, total, HEADS, WIDTH), leaf(4, total, HEADS, width), past


KINDS = ["alone", "past", "masked", "shared", "all"]
cases = pytest.mark.parametrize(
    ("stride", "chunks", "kind"), [(s, n, kind) for s in (1, 2, 3) for n in (1, 3) for kind in KINDS]
)


@cases
def test_equals_one_dense_softmax(stride: int, chunks: int, kind: str) -> None:
    q, packed, past = draw(stride, chunks, kind)
    out = merged_attention(q, packed, VALUE, 0.7, stride=stride, past=past)
    want, _, _ = dense(q, packed, 0.7, stride, past)
    assert out.shape == want.shape and error(out, want) < 1e-13
    g, inputs = torch.randn_like(want), [q, packed, *[p.packed for p in past]]
    for got, exact in zip(torch.autograd.grad(out, inputs, g), torch.autograd.grad(want, inputs, g), strict=True):
        assert error(got, exact) < 1e-12


@pytest.mark.skipif(not kernels.usable(torch.device("cpu")), reason="no interpreter")
@pytest.mark.parametrize(("stride", "chunks", "kind"), [(2, 1, "all"), (2, 19, "alone"), (3, 4, "all")])
def test_one_call_and_kernels_equal_one_dense_softmax(stride: int, chunks: int, kind: str) -> None:
    q, packed, past = draw(stride, chunks, kind, torch.float32)
    inputs = [q, packed, *[p.packed for p in past]]
    with prefer(Backend.TRITON):
        out = merged_attention(q, packed, VALUE, 0.7, stride=stride, past=past)
        grads = torch.autograd.grad(out.sum(), inputs)
    want, _, _ = dense(q, packed, 0.7, stride, past)
    assert error(out, want) < 1e-5
    for got, exact in zip(grads, torch.autograd.grad(want.sum(), inputs), strict=True):
        assert error(got, exact) < 1e-4


@pytest.mark.parametrize(("stride", "total"), [(1, 700), (3, 1200)])
def test_lengths_beyond_the_blocks_of_a_kernel(stride: int, total: int) -> None:
    q, packed = (torch.randn(1, total, 1, n, dtype=torch.float64).requires_grad_() for n in (WIDTH, VALUE + WIDTH))
    past = Past(torch.randn(1, 600, 1, VALUE + WIDTH, dtype=torch.float64), torch.rand(1, 600) < 0.5)
    out = merged_attention(q, packed, VALUE, 0.7, stride=stride, past=[past])
    want, _, _ = dense(q, packed, 0.7, stride, [past])
    assert error(out, want) < 1e-12
    # A sum's gradient is one number seen everywhere: not laid out as kernels expect.
    for got, exact in zip(
        torch.autograd.grad(out.sum(), (q, packed)), torch.autograd.grad(want.sum(), (q, packed)), strict=True
    ):
        assert error(got, exact) < 1e-11


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="there is no g++")
def test_the_library_is_built() -> None:
    assert library() is not None


@pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize(("total", "stride"), [(4, 2), (1, 1)])
def test_cpp_reads_any_layout(total: int, stride: int) -> None:
    """Heads before positions, columns before rows, one row in memory for all, and gradients of one number."""

    def layouts(width: int) -> list[Tensor]:
        rows = torch.randn(2, HEADS, total, width).transpose(1, 2)
        columns = torch.randn(2, HEADS, width, total).permute(0, 3, 1, 2)
        return [
            rows,
            columns,
            rows.mT.contiguous().mT,
            rows[:, :1].expand(-1, total, -1, -1),
            torch.ones(1).expand_as(rows),
        ]

    for tensors in product(layouts(WIDTH), layouts(VALUE + WIDTH), layouts(VALUE)):
        q, packed, grad = (t.requires_grad_() for t in tensors)
        with prefer(Backend.NATIVE):
            out = merged_attention(q, packed, VALUE, 0.7, stride=stride)
        want, _, _ = dense(q, packed, 0.7, stride, [])
        assert error(out, want) < 1e-5
        grads = (torch.autograd.grad(t, (q, packed), grad) for t in (out, want))
        assert max(float((got - exact).abs().max()) for got, exact in zip(*grads, strict=True)) < 1e-5


@torch.no_grad()
def test_a_trace_computes_with_its_inputs() -> None:
    first, second = ((torch.randn(1, 3, 2, WIDTH), torch.randn(1, 3, 2, VALUE + WIDTH)) for _ in range(2))
    traced = torch.jit.trace(lambda q, packed: tiled_attention(q, packed, VALUE, 0.7, []), first)
    assert error(traced(*second), tiled_attention(*second, VALUE, 0.7, [])) < 1e-5


def test_what_is_built_may_be_wider_than_what_it_is_built_from() -> None:
    x, weight = torch.randn(2, 5, 16, dtype=torch.bfloat16).requires_grad_(), torch.ones(16).requires_grad_()

    def build(heads: slice, a: Tensor) -> tuple[Tensor, Tensor]:
        q = a.unflatten(-1, (-1, 8))[:, :, heads]
        return q, torch.cat((q, q), -1).bfloat16()

    out = rebuilt_attention(lambda x, weight: (x * weight,), build, (x, weight), 2, 8, 1.0)
    q, packed = build(slice(0, 2), x * weight)
    want, _, _ = dense(q, packed.float(), 1.0, 1, [], 8)
    grads = (torch.autograd.grad(t.sum(), (x, weight)) for t in (out, want))
    assert error(out, want) < 1e-5 and all(error(*pair) < 0.02 for pair in zip(*grads, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["mtla", "tpa"])
def test_heads_in_groups_equal_all_at_once(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_softmax, "SMALL", 0)
    monkeypatch.setattr(partial_softmax, "REBUILT_HEADS", 2)
    attention = (MTLA(40, 5, stride=3) if name == "mtla" else TPA(40, 5, q_rank=3)).to(dtype)
    x, prefix = (torch.randn(3, size, 40, dtype=dtype).requires_grad_() for size in (7, 4))
    inputs, results = [x, prefix, *attention.parameters()], []
    for backend in (Backend.NATIVE if dtype is torch.float32 and library() else Backend.FUSED_CPU, Backend.PLAIN):
        with prefer(backend):
            out = attention(x, prefix, prefix_lengths=torch.tensor([4, 1, 0]))
        results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    near = 1e-4 if dtype is torch.float32 else 1e-11
    assert all(error(got, want) < near for got, want in zip(*results, strict=True))


def test_without_a_compiler_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnlab.attention.ops.backends.library", lambda: None)
    q, packed, _ = draw(2, 3, "alone", torch.float32)
    with noting() as pairs:
        merged_attention(q, packed, VALUE, 0.7, stride=2)
    assert used(pairs) == {"merged": ["FUSED_CPU"]}
    with prefer(Backend.NATIVE), pytest.raises(ValueError, match="compiler"):
        merged_attention(q, packed, VALUE, 0.7, stride=2)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("kind", ["alone", "all"])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_gradcheck(stride: int, kind: str, dropout: float) -> None:
    q, packed, past = draw(stride, 2, kind)

    def function(q: Tensor, packed: Tensor, *others: Tensor) -> Tensor:
        torch.manual_seed(1)  # the same positions dropped each time
        parts = [Past(other, p.mask) for other, p in zip(others, past, strict=True)]
        return merged_attention(q, packed, VALUE, 0.7, stride=stride, past=parts, dropout=dropout)

    assert torch.autograd.gradcheck(function, (q, packed, *[p.packed for p in past]), fast_mode=True)


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_logits_of_bfloat16_inputs_are_summed_in_float32(stride: int) -> None:
    """Logits of 60 and some eighths: rounded to bfloat16 they would be off by up to an eighth."""
    q, packed, past = draw(stride, 3, "past")
    with torch.no_grad():
        q.zero_()[..., :2] = 1.0
        for t in (packed, past[0].packed):
            t[..., VALUE] = 60.0
            t[..., VALUE + 1] = torch.randint(8, t.shape[:3]) / 8
    low = [t.detach().bfloat16() for t in (q, packed, past[0].packed)]
    out = merged_attention(low[0], low[1], VALUE, 1.0, stride=stride, past=[Past(low[2])])
    want, _, _ = dense(low[0].double(), low[1].double(), 1.0, stride, [Past(low[2].double())])
    assert (out - want).norm() / want.norm() < 0.005


@pytest.mark.parametrize("kind", ["alone", "all"])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_dropout_hits_every_probability_once_and_independently(stride: int, kind: str) -> None:
    """Mean o and variance r/(1-r) sum_j P_j^2 v_j^2 of each output component at rate r."""
    rate, draws = 0.25, 3000
    q, packed, past = draw(stride, 2, kind)
    want, p, value = dense(q, packed, 0.7, stride, past)
    variance = rate / (1 - rate) * torch.einsum("bhtk,bhkv->bthv", p.square(), value.square())

    def many(t: Tensor) -> Tensor:
        return t.detach().repeat(draws, *[1] * (t.dim() - 1))

    parts = [Past(many(p.packed), None if p.mask is None else many(p.mask)) for p in past]
    out = merged_attention(many(q), many(packed), VALUE, 0.7, stride=stride, past=parts, dropout=rate)
    out = out.unflatten(0, (draws, -1))
    assert ((out.mean(0) - want).abs() < 5 * (variance / draws).sqrt()).all()
    assert ((out.var(0) / variance).detach() - 1).abs().max() < 0.25


def test_a_length_off_the_stride_is_an_error() -> None:
    q, packed, _ = draw(3, 2, "alone")
    with pytest.raises(ValueError, match="stride"):
        merged_attention(q[:, :5], packed[:, :5], VALUE, 1.0, stride=3)


def test_keeps_no_square_of_the_length() -> None:
    """What is saved for the backward pass grows linearly with T."""

    def saved_bytes(total: int) -> int:
        sizes: dict[int, int] = {}

        def pack(t: Tensor) -> Tensor:
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        q = torch.randn(1, total, HEADS, WIDTH, requires_grad=True)
        packed = torch.randn(1, total, HEADS, VALUE + WIDTH, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            merged_attention(q, packed, VALUE, 1.0, stride=2)
        return sum(sizes.values())

    assert saved_bytes(512) <= 2 * saved_bytes(256)

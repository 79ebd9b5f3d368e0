"""Kernels that merge attention to earlier chunks with each query's own key, forward and backward.

Each replaces a dozen small operations over all queries. `pattern.MergedPattern` calls the kernel of the earlier chunks.

Shapes: q (B, T, H, D), packed [value | key] (B, T, H, Dv + D), log-sum-exp (B, T, H). The results of earlier chunks are
those of all s places of a chunk, from the second chunk on: (B * s, T / s - 1, H, .).
"""

from typing import Any

from torch import Tensor

from .split import tl, triton

ROWS = 32  # queries of a program


def merge_own(
    q: Tensor, packed: Tensor, scale: float, stride: int, earlier: Tensor, earlier_lse: Tensor, out: Tensor, lse: Tensor
) -> None:
    """Fill out (B, T, H, Dv) and lse (B, T, H), from `earlier`, `earlier_lse` and each query's own key.

    Args:
        q, packed: as above.
        earlier, earlier_lse: output and log-sum-exp of earlier chunks.
    """
    _launch(merge_own_kernel, [q, packed, earlier, earlier_lse, out, lse], q, packed, scale, stride)


def merge_own_backward(
    grad: Tensor, q: Tensor, packed: Tensor, scale: float, stride: int, out: Tensor, lse: Tensor,
    earlier: tuple[Tensor, Tensor, Tensor], dq: Tensor, dpacked: Tensor,
) -> None:  # fmt: skip
    """Fill dq and dpacked, the gradients of q and packed.

    Args:
        q, packed: as above.
        dq, dpacked: of their shapes.
        grad: gradient of the output, (B, T, H, Dv).
        out, lse: of the full softmax.
        earlier: gradients of queries, keys and values from attention to earlier chunks. Those of keys and values are
            summed over the places.
    """
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()  # a sum's gradient is one number
    tensors = [grad, q, packed, out, lse, *earlier, dq, dpacked]
    _launch(merge_own_backward_kernel, tensors, q, packed, scale, stride)


def _launch(kernel: Any, tensors: list[Tensor], q: Tensor, packed: Tensor, scale: float, stride: int) -> None:
    batch, length, heads, width = q.shape
    value = packed.shape[-1] - width
    steps = [step for t in tensors for step in t.stride()[:3]]
    kernel[(triton.cdiv(length * heads, ROWS), batch)](
        *tensors, *steps, scale, length, length // stride, heads, stride, WIDTH=width, VALUE=value,
        WIDTH_BLOCK=triton.next_power_of_2(width), VALUE_BLOCK=triton.next_power_of_2(value), ROWS=ROWS, num_warps=4,
    )  # fmt: skip


@triton.jit
def _rows(length, heads, stride, ROWS: tl.constexpr):
    """Position, head, chunk and place of this program's queries, and whether they exist."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t = row // heads
    return t.to(tl.int64), (row % heads).to(tl.int64), (t // stride).to(tl.int64), (t % stride).to(tl.int64), t < length


@triton.jit
def _load(here, column, exists, WIDTH: tl.constexpr):
    """Rows of numbers in float32, zero where they do not exist."""
    return tl.load(here[:, None] + column, mask=exists[:, None] & (column < WIDTH), other=0.0).to(tl.float32)


@triton.jit
def _store(here, column, exists, rows, WIDTH: tl.constexpr):
    tl.store(here[:, None] + column, rows.to(here.dtype.element_ty), mask=exists[:, None] & (column < WIDTH))


@triton.jit(do_not_specialize=["length", "chunks"])
def merge_own_kernel(
    q, packed, earlier, earlier_lse, out, lse, q_b, q_t, q_h, packed_b, packed_t, packed_h, earlier_b, earlier_t,
    earlier_h, earlier_lse_b, earlier_lse_t, earlier_lse_h, out_b, out_t, out_h, lse_b, lse_t, lse_h, scale, length,
    chunks, heads, stride, WIDTH: tl.constexpr, VALUE: tl.constexpr, WIDTH_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """It takes the arguments of `merge_own`, and the steps of their first three axes."""
    batch = tl.program_id(1).to(tl.int64)
    t, head, chunk, place, exists = _rows(length, heads, stride, ROWS)
    column, of_value = tl.arange(0, WIDTH_BLOCK)[None, :], tl.arange(0, VALUE_BLOCK)[None, :]
    here = packed + batch * packed_b + t * packed_t + head * packed_h
    query = _load(q + batch * q_b + t * q_t + head * q_h, column, exists, WIDTH)
    own = tl.sum(query * _load(here + VALUE, column, exists, WIDTH), 1) * scale
    value = _load(here, of_value, exists, VALUE)
    row, seen = batch * stride + place, exists & (chunk > 0)
    before = earlier + row * earlier_b + (chunk - 1) * earlier_t + head * earlier_h
    at = earlier_lse + row * earlier_lse_b + (chunk - 1) * earlier_lse_t + head * earlier_lse_h
    other = tl.load(at, mask=seen, other=float("-inf")).to(tl.float32)
    top = tl.maximum(own, other)
    weight, rest = tl.exp(own - top), tl.exp(other - top)
    total = weight + rest
    read = weight[:, None] * value + rest[:, None] * _load(before, of_value, seen, VALUE)
    _store(out + batch * out_b + t * out_t + head * out_h, of_value, exists, read / total[:, None], VALUE)
    tl.store(lse + batch * lse_b + t * lse_t + head * lse_h, top + tl.log(total), mask=exists)


@triton.jit(do_not_specialize=["length", "chunks"])
def merge_own_backward_kernel(
    grad, q, packed, out, lse, from_q, from_k, from_v, dq, dpacked, grad_b, grad_t, grad_h, q_b, q_t, q_h, packed_b,
    packed_t, packed_h, out_b, out_t, out_h, lse_b, lse_t, lse_h, from_q_b, from_q_t, from_q_h, from_k_b, from_k_t,
    from_k_h, from_v_b, from_v_t, from_v_h, dq_b, dq_t, dq_h, dpacked_b, dpacked_t, dpacked_h, scale, length, chunks,
    heads, stride, WIDTH: tl.constexpr, VALUE: tl.constexpr, WIDTH_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """It takes the arguments of `merge_own_backward`, and the steps of their first three axes."""
    batch = tl.program_id(1).to(tl.int64)
    t, head, chunk, place, exists = _rows(length, heads, stride, ROWS)
    column, of_value = tl.arange(0, WIDTH_BLOCK)[None, :], tl.arange(0, VALUE_BLOCK)[None, :]
    here = packed + batch * packed_b + t * packed_t + head * packed_h
    query = _load(q + batch * q_b + t * q_t + head * q_h, column, exists, WIDTH)
    key = _load(here + VALUE, column, exists, WIDTH)
    g = _load(grad + batch * grad_b + t * grad_t + head * grad_h, of_value, exists, VALUE)
    read = _load(out + batch * out_b + t * out_t + head * out_h, of_value, exists, VALUE)
    sums = tl.load(lse + batch * lse_b + t * lse_t + head * lse_h, mask=exists, other=0.0)
    p = tl.exp(tl.sum(query * key, 1) * scale - sums)
    ds = (tl.sum(g * (_load(here, of_value, exists, VALUE) - read), 1) * p * scale)[:, None]
    seen = exists & (chunk > 0)
    before = from_q + (batch * stride + place) * from_q_b + (chunk - 1) * from_q_t + head * from_q_h
    d_query = ds * key + _load(before, column, seen, WIDTH)
    _store(dq + batch * dq_b + t * dq_t + head * dq_h, column, exists, d_query, WIDTH)
    d_key, d_value = ds * query, p[:, None] * g
    slot = exists & (place == stride - 1) & (chunk < chunks - 1)  # read by all later chunks
    for i in range(stride):
        row = batch * stride + i
        d_key += _load(from_k + row * from_k_b + chunk * from_k_t + head * from_k_h, column, slot, WIDTH)
        d_value += _load(from_v + row * from_v_b + chunk * from_v_t + head * from_v_h, of_value, slot, VALUE)
    there = dpacked + batch * dpacked_b + t * dpacked_t + head * dpacked_h
    _store(there, of_value, exists, d_value, VALUE)
    _store(there + VALUE, column, exists, d_key, WIDTH)

"""Kernel of the rotary position embedding, in place of a dozen small operations over all queries or keys."""

from torch import Tensor

from .split import tl, triton

ROWS = 32  # rows of a program


def rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: int = 1) -> Tensor:
    """Rotate the last 2 P columns of x (B, T, H, D) by cos, sin (B, T, H, P), which may be expanded.

    Args:
        sign: -1 rotates back, which is the gradient.
    """
    batch, length, heads, width = x.shape
    x, pairs = x if x.stride(-1) == 1 else x.contiguous(), cos.shape[-1]
    out, rest = x.new_empty(x.shape), width - 2 * pairs
    rotary_kernel[(triton.cdiv(length * heads, ROWS), batch)](
        x, cos, sin, out, *x.stride()[:3], *cos.stride(), *sin.stride(), *out.stride()[:3], length, heads, sign,
        REST=rest, PAIRS=pairs, REST_BLOCK=triton.next_power_of_2(max(1, rest)),
        PAIRS_BLOCK=triton.next_power_of_2(pairs), ROWS=ROWS, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["length", "sign"])
def rotary_kernel(
    x, cos, sin, out, x_b, x_t, x_h, cos_b, cos_t, cos_h, cos_p, sin_b, sin_t, sin_h, sin_p, out_b, out_t, out_h,
    length, heads, sign, REST: tl.constexpr, PAIRS: tl.constexpr, REST_BLOCK: tl.constexpr, PAIRS_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Write `out`. It takes the arguments of `rotated`, and their steps."""
    batch, row = tl.program_id(1).to(tl.int64), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    exists, pair = (t < length)[:, None], tl.arange(0, PAIRS_BLOCK)[None, :]
    here = (x + batch * x_b + t * x_t + head * x_h)[:, None]
    there = (out + batch * out_b + t * out_t + head * out_h)[:, None]
    if REST > 0:
        column = tl.arange(0, REST_BLOCK)[None, :]
        kept = exists & (column < REST)
        tl.store(there + column, tl.load(here + column, mask=kept), mask=kept)
    turned = exists & (pair < PAIRS)
    u = tl.load(here + REST + pair, mask=turned, other=0.0).to(tl.float32)
    v = tl.load(here + REST + PAIRS + pair, mask=turned, other=0.0).to(tl.float32)
    c = tl.load((cos + batch * cos_b + t * cos_t + head * cos_h)[:, None] + pair * cos_p, mask=turned, other=0.0)
    s = tl.load((sin + batch * sin_b + t * sin_t + head * sin_h)[:, None] + pair * sin_p, mask=turned, other=0.0)
    c, s = c.to(tl.float32), s.to(tl.float32) * sign
    tl.store(there + REST + pair, (u * c - v * s).to(out.dtype.element_ty), mask=turned)
    tl.store(there + REST + PAIRS + pair, (v * c + u * s).to(out.dtype.element_ty), mask=turned)

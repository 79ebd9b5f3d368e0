"""Factor decode: attention of one new position to cached factors of keys and values, in the order of FlashTPA.

Keys and values are not materialised. With head factors A (h) and token factors B (D) of each rank, and
c = D^-1/2 / (R_Q R):

    P[r, q, k] = B_Q[q] . B_K[r, k]                                 for all heads at once
    logits[h, k] = c sum_r A_K[r, h, k] sum_q A_Q[q, h] P[r, q, k]
    O[h] = 1/R sum_r sum_k (p[h, k] A_V[r, h, k]) B_V[r, k]

The sums over q, and over k in the last line, are matrix products over a block of positions; all ranks add into one
accumulator (h, D). If queries have no factors (h, D), or several rows share the positions, Q . B_K[r, k] replaces the
sum over q. The context is split as in `split`.

Layout: a step reads 2 R (h + D) elements of a position, each once. Token factors (.., K, D) are read in rows of D. Head
factors are stored with positions last, (.., h, K): a block of 64 positions is h rows of 128 bytes in bfloat16, which
are full memory sectors, in loads of 16 bytes for any h. If K is not a multiple of 16, elements are loaded one by one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import DTYPES, FACTOR_RANKS, FACTOR_WIDTH, interpreted
from .factor_kernel import attend
from .split import LOG2_E, Blocks, device_of, num_splits, numbers, precision, reduce, triton


class FactorPart(NamedTuple):
    """A part of the context: factors of K positions of N rows. Query rows n B/N ... (n + 1) B/N - 1 read row n.

    Args:
        key_head, value_head: (N, R, h, K), or (1, R, h, 1) if all rows and positions share them.
        key_token, value_token: (N, R, K, w), keys rotated; w is D, or d_c + D/d_c for factors of third order.
        used: number of positions that exist, at most K: an int, or int32 or int64 on the device, (N,) or one element;
            None: K.
    """

    key_head: Tensor
    key_token: Tensor
    value_head: Tensor
    value_token: Tensor
    used: int | Tensor | None = None

    @property
    def fixed(self) -> bool:
        """Whether all rows and positions share the head factors."""
        return self.key_head.shape[0] == self.key_head.shape[3] == 1


def padded(size: int) -> int:
    """The next power of two, at least 16."""
    return max(16, triton.next_power_of_2(size))


def shared_memory(blocks: Blocks, part: FactorPart, width: int) -> int:
    """Estimated shared memory of one program in bytes: blocks in flight, the queries, and two tiles of logits."""
    head = 0 if part.fixed else blocks.lines
    flight = (blocks.stages - 1) * 2 * part.key_token.shape[1] * blocks.slots * (padded(width) + head)
    return part.key_token.element_size() * (flight + blocks.lines * (2 * blocks.slots + padded(width)))


def _registers(blocks: Blocks, part: FactorPart, width: int) -> int:
    """Estimated registers per thread: accumulator and tiles of logits, and in float32 the operands of products."""
    elements = blocks.lines * (padded(width) + 3 * blocks.slots) * (part.key_token.element_size() // 2)
    return elements // (32 * blocks.warps)


def choose_blocks(lines: int, part: FactorPart, width: int) -> Blocks:
    """Block sizes by a heuristic: all lines up to 64, then the longest block of which two programs fit.

    Of two programs on a multiprocessor, one reads while the other computes. Four warps, or eight if four would spill.

    Args:
        lines: number of pairs of a row and a head that read the same positions.
        width: head width D.
    """
    lines, memory = min(64, padded(lines)), device_of(part.key_token.device).shared_memory
    for room in (memory // 2, memory):
        for positions, stages in ((64, 3), (64, 2), (32, 3), (32, 2), (16, 3), (16, 2), (16, 1)):
            blocks = Blocks(lines, positions, 4, stages)
            if shared_memory(blocks, part, width) <= room:
                return blocks if _registers(blocks, part, width) <= 128 else blocks._replace(warps=8)
    return Blocks(16, 16, 8, 1)


def factor_decode(
    query: Tensor,
    parts: Sequence[FactorPart],
    scale: float,
    *,
    query_head: Tensor | None = None,
    third_dim: int | None = None,
    blocks: Blocks | None = None,
    splits: int | None = None,
) -> Tensor:
    """softmax(Q K^T scale) V of one new position over all parts, K = sum_r A_r B_r, V = 1/R sum_r A_r B_r: (B, h, D).

    Products are accumulated and softmaxes computed in float32; the products P are rounded to the dtype if queries have
    factors. A row without positions gets zeros. The result has the dtype of the queries.

    Args:
        query: (B, h, D); or rotated token factors of queries, (B, R_Q, D). All inputs have its dtype: float32, bfloat16
            or float16.
        parts: at least one; R 1 to 8, D 1 to 256.
        scale: factor of the logits, D^-1/2 / (R_Q R) for token factors.
        query_head: head factors of the queries, (B, R_Q, h); None: `query` has no factors.
        third_dim: d_c of factors of third order, B = vec(b' (x) c), cached as [b' | c]; None: vectors.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other.
    """
    heads = _check(query, query_head, parts, third_dim)
    batch, _, width = query.shape
    out = query.new_empty(batch, heads, width)
    parts = [part for part in parts if part.key_token.shape[2]]
    if not parts or not out.numel():
        return out.zero_()
    plans = [_plan(batch, heads, width, part, blocks, splits) for part in parts]
    total = sum(plan.splits for plan in plans)
    partial = query.new_empty(batch, heads, total, width, dtype=torch.float32)
    sums = query.new_empty(batch, heads, total, dtype=torch.float32)
    queries: dict[bool, tuple[Tensor, Tensor | None]] = {}
    first = 0
    for part, plan in zip(parts, plans, strict=True):
        factored = query_head is not None and plan.on_factors(query.shape[1], width)
        if factored not in queries:
            queries[factored] = _queries(query, query_head, factored)
        _launch(*queries[factored], part, plan, scale, third_dim, partial, sums, first)
        first += plan.splits
    return reduce(partial, sums, out)


class _Plan(NamedTuple):
    """Launch parameters of one part."""

    blocks: Blocks
    beam: int
    tiles: int  # tiles of lines
    splits: int

    def on_factors(self, query_ranks: int, width: int) -> bool:
        """Whether multiplying by the factors of queries, as padded, is cheaper than by the queries."""
        ranks, width, lines = padded(query_ranks), padded(width), self.blocks.lines
        return self.beam == 1 and ranks * (width + lines) < lines * width


def _plan(batch: int, heads: int, width: int, part: FactorPart, blocks: Blocks | None, splits: int | None) -> _Plan:
    rows, _, positions, _ = part.key_token.shape
    beam = batch // rows
    blocks = blocks or choose_blocks(beam * heads, part, width)
    tiles = triton.cdiv(beam * heads, blocks.lines)
    if splits is None:
        device = device_of(part.key_token.device)
        together = max(1, min(4, device.shared_memory // shared_memory(blocks, part, width)))
        splits = num_splits(rows * tiles, triton.cdiv(positions, blocks.slots), together * device.processors)
    return _Plan(blocks, beam, tiles, splits)


def _queries(query: Tensor, query_head: Tensor | None, factored: bool) -> tuple[Tensor, Tensor | None]:
    if query_head is None or factored:
        return query.contiguous(), None if query_head is None else query_head.contiguous()
    return (query_head.mT @ query).contiguous(), None


def _launch(
    query: Tensor,
    query_head: Tensor | None,
    part: FactorPart,
    plan: _Plan,
    scale: float,
    third_dim: int | None,
    partial: Tensor,
    sums: Tensor,
    first: int,
) -> None:
    rows, ranks, positions, _ = part.key_token.shape
    heads, total, width = partial.shape[1:]
    counts, step, count = numbers(part.used, rows, positions, "used", part.key_token)
    attend[(rows * plan.tiles, plan.splits)](
        query if query_head is None else query_head, query, part.key_head, part.key_token, part.value_head,
        part.value_token, counts, partial, sums,
        scale * LOG2_E, count, positions, plan.beam, step, total, first,
        HEADS=heads, RANKS=ranks, QUERY_RANKS=0 if query_head is None else query.shape[1], WIDTH=width,
        THIRD=third_dim or 0, COUNTED=step >= 0, FIXED=part.fixed, WIDE=interpreted(),
        LINES=plan.blocks.lines, POSITIONS=plan.blocks.slots, WIDTH_BLOCK=padded(width),
        QUERY_BLOCK=padded(query.shape[1]), STAGES=plan.blocks.stages, PRECISION=precision(query.dtype),
        num_warps=plan.blocks.warps, num_stages=plan.blocks.stages,
    )  # fmt: skip


def _check(query: Tensor, query_head: Tensor | None, parts: Sequence[FactorPart], third_dim: int | None) -> int:
    """Check the arguments of `factor_decode`, and return h. ValueError: they do not fit."""
    if query.dtype not in DTYPES:
        raise ValueError(f"queries of {query.dtype}: expected {', '.join(str(dtype) for dtype in DTYPES)}")
    batch, count, width = query.shape
    heads = count if query_head is None else query_head.shape[2]
    if width > FACTOR_WIDTH or third_dim is not None and (third_dim < 1 or width % third_dim):
        raise ValueError(f"queries {width} wide: expected at most {FACTOR_WIDTH}, a multiple of third_dim={third_dim}")
    if query_head is not None and query_head.shape[:2] != query.shape[:2]:
        raise ValueError(f"head factors {tuple(query_head.shape)} of queries {tuple(query.shape)}")
    stored = width if third_dim is None else width // third_dim + third_dim
    for part in parts:
        rows, ranks, positions, _ = part.key_token.shape
        if rows < 1 or batch % rows or not 1 <= ranks <= FACTOR_RANKS:
            raise ValueError(f"{rows} rows of {ranks} ranks: expected a divisor of {batch}, and 1 to {FACTOR_RANKS}")
        if ranks * positions * max(stored, heads) >= 2**31:
            raise ValueError(f"{positions} positions: a row's factors have 2^31 numbers or more")
        head = (1, ranks, heads, 1) if part.fixed else (rows, ranks, heads, positions)
        for tensor, shape in zip(part[:4], (head, (rows, ranks, positions, stored)) * 2, strict=True):
            alike = tensor.dtype == query.dtype and tensor.device == query.device and tensor.is_contiguous()
            if tuple(tensor.shape) != shape or not alike:
                raise ValueError(
                    f"factors {tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}: expected {shape} of "
                    f"{query.dtype} on {query.device}, contiguous"
                )
    return heads

"""Latent decode: attention of one new position to caches, split along the context.

All heads read shared slots whose first columns are also the value (MLA, MTLA); with a value tensor and G key heads the
same kernel computes MQA, GQA and MHA. A segment is a part of the context with separate rows, capacity and count: a
prefix that the hypotheses of a sentence share, merged slots, a window of recent positions. One reduction merges the
partial outputs of all segments (`split.reduce`). The slots of a segment may be codes (`..quantised`), which are
converted in registers to the dtype of the queries. The kernel was not run on a GPU with codes: neither their speed nor
their results there were measured.

Counts are on the device, and the grid depends only on shapes: buffers are passed in full, without synchronisation, and
a step can be captured in a CUDA graph and replayed with other counts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..quantised import Coded, row_shape
from . import DTYPES
from .latent_kernel import attend
from .split import LOG2_E, Blocks, device_of, num_splits, numbers, precision, reduce, triton, widened


class Widths(NamedTuple):
    """Numbers of columns of a key, [content | rest], and of a value.

    Args:
        content: columns of a key that are also its value; all columns if there is a value tensor.
        rest: further columns of a key.
    """

    content: int
    rest: int
    value: int
    shared: bool

    @property
    def padded(self) -> tuple[int, int, int]:
        """Content, rest and value, rounded up to powers of two from 16; a rest of 0 stays 0."""
        content, rest, value = (max(16, triton.next_power_of_2(width)) for width in self[:3])
        return content, rest if self.rest else 0, value


def shared_memory(blocks: Blocks, padded: tuple[int, int, int], shared: bool, itemsize: int) -> int:
    """Estimated shared memory of one program in bytes; `padded`: see `Widths`."""
    content, rest, value = padded
    slot = content + rest + (0 if shared else value)
    in_flight = blocks.stages if blocks.lines >= 64 else max(1, blocks.stages - 1)  # Hopper's products need all stages
    return 1024 + itemsize * (in_flight * blocks.slots * slot + blocks.lines * (content + rest + blocks.slots))


def choose_blocks(
    lines: int, padded: tuple[int, int, int], shared: bool, dtype: torch.dtype, device: torch.device, bits: int = 0
) -> Blocks:
    """Block sizes by a heuristic: as many lines as registers allow, then as many slots as fit.

    Within these bounds Triton 3.9 compiles for compute capability 8.0 and 9.0 without spilling registers, except for
    codes with the most lines. Codes are not pipelined: their scales and zeros, one for each component, would not fit in
    shared memory.
    """
    most = (8192 if dtype == torch.float32 else 16384) // padded[2]
    lines = min(64, max(16, min(most, triton.next_power_of_2(lines))))
    warps = 4 if lines * padded[2] * dtype.itemsize <= 16384 else 8
    if bits:
        return Blocks(lines, 16, 8, 1)
    memory = device_of(device).shared_memory
    for slots, stages in ((64, 3), (32, 4), (32, 3), (16, 3), (16, 2)):
        blocks = Blocks(lines, slots, warps, stages)
        in_registers = lines * padded[2] <= 128 * (32 * warps)  # the accumulator
        if in_registers and shared_memory(blocks, padded, shared, dtype.itemsize) <= memory:
            return blocks
    return Blocks(16, 16, 8, 1)


class CacheSegment(NamedTuple):
    """A part of the context: N rows of K slots. Query rows n B/N ... (n + 1) B/N - 1 read row n.

    Args:
        key: (N, G, K, D), the last axis dense; or their codes.
        value: (N, G, K, Dv), the last axis dense; or their codes; None: the first `value_dim` columns of `key`.
        end: number of slots that exist: an int, or int32 or int64 on the device, (N,) or one element; None: K. Larger
            numbers mean K.
        mask: (N or 1, M) bool, true where a key exists; slots beyond its M columns exist. The others are not read.
    """

    key: Tensor | Coded
    value: Tensor | Coded | None = None
    end: int | Tensor | None = None
    mask: Tensor | None = None


def latent_decode(
    q: Tensor,
    segments: Sequence[CacheSegment],
    scale: float = 1.0,
    *,
    value_dim: int | None = None,
    blocks: Blocks | None = None,
    splits: int | None = None,
) -> Tensor:
    """softmax(q k^T scale) v of one new position over all segments: (B, H, D) -> (B, H, Dv) in the dtype of the cache.

    Products are accumulated and softmaxes computed in float32. A row without slots gets zeros.

    Args:
        q: (B, H, D), the last axis dense; float32, bfloat16 or float16, like keys and values.
        segments: at least one. All have the same G, which divides H, and the same D and Dv.
        value_dim: Dv, if values are the first columns of keys.

    ValueError: shapes, dtypes or devices do not fit each other.
    """
    batch, heads, _ = q.shape
    segments = [segment for segment in segments if segment.key.shape[2]]
    width = _check(q, segments, value_dim)
    out = q.new_empty(batch, heads, width)
    if not segments or not out.numel():
        return out.zero_()
    plans = [_plan(q, segment, width, blocks, splits) for segment in segments]
    total = sum(plan.splits for plan in plans)
    partial = q.new_empty(batch, heads, total, width, dtype=torch.float32)
    sums = q.new_empty(batch, heads, total, dtype=torch.float32)
    first = 0
    for segment, plan in zip(segments, plans, strict=True):
        _launch(q, segment, plan, scale, partial, sums, first)
        first += plan.splits
    return reduce(partial, sums, out)


class _Plan(NamedTuple):
    """Launch parameters of one segment."""

    blocks: Blocks
    widths: Widths
    beam: int
    group: int
    programs: int
    splits: int


def _plan(q: Tensor, segment: CacheSegment, value_dim: int, blocks: Blocks | None, splits: int | None) -> _Plan:
    rows, groups, slots, width = segment.key.shape
    beam, group = q.shape[0] // rows, q.shape[1] // groups
    shared = segment.value is None
    widths = Widths(value_dim, width - value_dim, value_dim, True) if shared else Widths(width, 0, value_dim, False)
    blocks = blocks or choose_blocks(beam * group, widths.padded, shared, q.dtype, q.device, _stored(segment.key)[0])
    programs = rows * groups * triton.cdiv(beam * group, blocks.lines)
    if splits is None:
        device = device_of(q.device)
        used = shared_memory(blocks, widths.padded, shared, q.dtype.itemsize)
        together = max(1, min(4, device.shared_memory // max(used, 1)))
        splits = num_splits(programs, triton.cdiv(slots, blocks.slots), together * device.processors)
    return _Plan(blocks, widths, beam, group, programs, splits)


def _launch(
    q: Tensor, segment: CacheSegment, plan: _Plan, scale: float, partial: Tensor, sums: Tensor, first: int
) -> None:
    key, mask = segment.key, segment.mask
    rows, _, slots, _ = key.shape
    value = key if segment.value is None else segment.value
    counts, count_step, count = numbers(segment.end, rows, slots, "end", q)
    content, rest, wide = plan.widths.padded
    read = q if mask is None else mask.view(torch.uint8)
    bits, keys, key_group, key_bytes = _stored(key)
    _, values, value_group, value_bytes = _stored(value)
    attend[(plan.programs, plan.splits)](
        q, keys, values, counts, read, partial, sums,
        scale * LOG2_E, count, slots, plan.beam, plan.group, key.shape[1], 0 if mask is None else mask.shape[1],
        q.stride(0), q.stride(1), *keys.stride()[:3], *values.stride()[:3],
        0 if mask is None or len(mask) == 1 else mask.stride(0), count_step, partial.shape[2], first,
        COUNTED=count_step >= 0, MASKED=mask is not None, SHARED=plan.widths.shared,
        CONTENT=plan.widths.content, REST=plan.widths.rest, VALUE=plan.widths.value,
        CONTENT_BLOCK=content, REST_BLOCK=rest, VALUE_BLOCK=wide,
        LINES=plan.blocks.lines, SLOTS=plan.blocks.slots, PRECISION=precision(q.dtype), WIDE=widened(q.dtype),
        BITS=bits, KEY_GROUP=key_group, KEY_BYTES=key_bytes, VALUE_GROUP=value_group, VALUE_BYTES=value_bytes,
        num_warps=plan.blocks.warps, num_stages=plan.blocks.stages,
    )  # fmt: skip


def _stored(slots: Tensor | Coded) -> tuple[int, Tensor, int, int]:
    """Bits, 0 without codes; the tensor (N, G, K, ...); columns and bytes of a group."""
    if isinstance(slots, Tensor):
        return 0, slots, 1, 1
    rows = slots.rows.reshape(*slots.shape[:3], *slots.rows.shape[-2:])
    return slots.bits, rows, *row_shape(slots.width, slots.bits)[1:]


def _check(q: Tensor, segments: Sequence[CacheSegment], value_dim: int | None) -> int:
    """Check the arguments of `latent_decode`, and return Dv. ValueError: they do not fit."""
    batch, heads, width = q.shape
    if q.dtype not in DTYPES:
        raise ValueError(f"queries of {q.dtype}: expected {', '.join(str(dtype) for dtype in DTYPES)}")
    widths = set[int]()
    for key, value, _, mask in segments:
        rows, groups, slots, wide = key.shape
        read = (value_dim or 0) if value is None else value.shape[3]
        fits = rows > 0 and batch % rows == heads % groups == 0 and wide == width and read >= 1
        fits &= read <= width if value is None else value.shape[:3] == key.shape[:3]
        tensors = [q, key] if value is None else [q, key, value]
        fits &= all(t.dtype == q.dtype and t.device == q.device for t in tensors)
        fits &= all(isinstance(t, Coded) or t.stride(-1) == 1 or t.shape[-1] == 1 for t in tensors)
        fits &= value is None or getattr(value, "bits", 0) == getattr(key, "bits", 0)
        if not fits:
            kinds = ", ".join(f"{tuple(t.shape)} of {t.dtype} on {t.device}" for t in tensors)
            raise ValueError(f"queries, keys and values do not fit each other, or have no dense last axis: {kinds}")
        if mask is not None and (mask.dtype != torch.bool or mask.dim() != 2 or mask.shape[0] not in (1, rows)):
            raise ValueError(f"a mask {tuple(mask.shape)} of {mask.dtype}: expected bool, ({rows} or 1, up to {slots})")
        widths.add(read)
    if len(widths) > 1:
        raise ValueError(f"values of several widths: {sorted(widths)}")
    return widths.pop() if widths else (value_dim or 0)

"""Slots of a cache as codes of 8 or 4 bits, and attention to them without a copy of all slots in full precision.

A slot is divided into groups of components. A group is stored as bytes [codes | scale | zero]:

    zero = min(x),   scale = (max(x) - zero) / (2^bits - 1),   code = round((x - zero) / scale),   x ~ scale code + zero

with scale and zero rounded to float32 (8 bits) or float16 (4 bits) before codes are computed. These are the rows of
torch's quantised embeddings, whose operators convert them on a CPU. A byte of two 4-bit codes has the first one in its
lower half.
"""

import math
from itertools import product

import torch
from torch import Tensor

BLOCK = 32  # slots that become codes together
GROUP = {8: 64, 4: 32}  # components of a group, at most
CONSTANTS = {8: torch.float32, 4: torch.float16}  # dtypes of scale and zero
SCRATCH = 2**18  # numbers in full precision at a time: they stay in the cache of a CPU
UNPACK = {8: torch.ops.quantized.embedding_bag_byte_unpack, 4: torch.ops.quantized.embedding_bag_4bit_unpack}
SUM = {
    8: torch.ops.quantized.embedding_bag_byte_rowwise_offsets,
    4: torch.ops.quantized.embedding_bag_4bit_rowwise_offsets,
}

Older = tuple[Tensor, Tensor]  # outputs (B G, Q, Dv) of a part of the softmax, and its log-sum-exp (B G, Q, 1)
Codes = tuple["Coded", "Coded | None", int]  # key, value and used, as `attend` reads them


def row_shape(width: int, bits: int) -> tuple[int, int, int]:
    """Number of groups of a slot of `width` components, components of a group (a multiple of 4), and its bytes."""
    groups = -(-width // GROUP[bits])
    size = -(-width // (4 * groups)) * 4
    return groups, size, size * bits // 8 + 2 * CONSTANTS[bits].itemsize


def encoded(x: Tensor, bits: int) -> Tensor:
    """x (..., width) -> rows of bytes (..., groups, bytes)."""
    groups, size, _ = row_shape(x.shape[-1], bits)
    x, levels = x.to(torch.promote_types(x.dtype, torch.float32)), 2**bits - 1
    if missing := groups * size - x.shape[-1]:
        x = torch.cat((x, x[..., -1:].expand(*x.shape[:-1], missing)), -1)
    x = x.unflatten(-1, (groups, size))
    low, high = x.aminmax(dim=-1, keepdim=True)
    zero = low.to(CONSTANTS[bits])
    scale = ((high - zero) / levels).clamp(min=0).to(CONSTANTS[bits])
    codes = ((x - zero) / scale.to(x.dtype).masked_fill(scale == 0, 1)).round().clamp(0, levels).to(torch.uint8)
    if bits == 4:
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    constants = (scale.view(torch.uint8), zero.view(torch.uint8))  # bytes, as autocast on a CPU joins no float16
    return torch.cat((codes, *constants), -1)


def decoded(rows: Tensor, bits: int, width: int, dtype: torch.dtype) -> Tensor:
    """The inverse of `encoded` up to rounding: `rows` of bytes (..., groups, bytes) -> (..., width)."""
    if rows.device.type == "cpu" and dtype == torch.float32 and rows.numel():
        return UNPACK[bits](rows.reshape(-1, rows.shape[-1]).contiguous()).view(*rows.shape[:-2], -1)[..., :width]
    count = 2 * CONSTANTS[bits].itemsize
    codes, constants = rows[..., :-count], rows[..., -count:].contiguous().view(CONSTANTS[bits]).to(dtype)
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    return (constants[..., :1] * codes + constants[..., 1:]).flatten(-2)[..., :width]


class Coded:
    """Codes of the older slots of one buffer of a cache. Slot i is at place i modulo the number of places.

    Args:
        shape: shape of a row of the buffer; None: the axis of slots.
        places: number of slots for which there is room, a multiple of `BLOCK`.
        like: a tensor of the buffer's dtype and device.

    Attributes:
        rows: (B, ..., places, groups, bytes) uint8.
        dtype: dtype of the buffer.
    """

    def __init__(self, shape: tuple[int | None, ...], batch: int, places: int, bits: int, like: Tensor) -> None:
        *outer, self.width = (size for size in shape if size is not None)
        self.bits, self.dtype, self.last = bits, like.dtype, shape[-1] is None
        groups, _, count = row_shape(self.width, bits)
        self.rows = torch.zeros(batch, *outer, places, groups, count, dtype=torch.uint8, device=like.device)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def device(self) -> torch.device:
        return self.rows.device

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, G, places, width); G: product of the sizes before the axis of slots."""
        outer = math.prod(self.rows.shape[1:-3])
        return len(self.rows), outer, self.rows.shape[-3], self.width

    def write(self, first: int, x: Tensor) -> None:
        """Store slots from `first` on, given as in the buffer."""
        rows = encoded(x.mT if self.last else x, self.bits)
        self.rows.narrow(-3, first % max(self.rows.shape[-3], 1), rows.shape[-3]).copy_(rows)

    def read(self, first: int, last: int) -> Tensor:
        """Slots first ... last - 1, as in the buffer."""
        places = self.rows.shape[-3]
        if last <= places:
            rows = self.rows.narrow(-3, first, last - first)
        else:
            rows = self.rows.index_select(-3, torch.arange(first, last, device=self.rows.device) % places)
        x = decoded(rows, self.bits, self.width, self.dtype)
        return x.mT if self.last else x

    def randomise(self) -> None:
        """Store random numbers, the same in every row of the batch."""
        self.rows[...] = encoded(torch.randn(*self.rows.shape[1:-2], self.width, device=self.rows.device), self.bits)

    def take(self, rows: Tensor) -> None:
        """Keep these rows of the batch."""
        self.rows = self.rows[rows]


def can_sum(q: Tensor, bits: int) -> bool:
    """Whether `weighted_sum` is for queries like q (N, Q, D), and faster than a product with converted values."""
    return q.is_cpu and q.dtype == torch.float32 and q.shape[1] <= {8: 4, 4: 2}[bits]


def weighted_sum(weights: Tensor, rows: Tensor, bits: int, width: int) -> Tensor:
    """weights (N, Q, K) times the first K slots of dense rows (N, places, groups, bytes): (N, Q, width), on a CPU."""
    (count, queries, used), (_, places, groups, size) = weights.shape, rows.shape
    first = torch.arange(count, dtype=torch.int32)[:, None, None, None] * (places * groups)
    group = torch.arange(groups, dtype=torch.int32)[:, None]
    index = (first + group + torch.arange(used, dtype=torch.int32) * groups).expand(count, queries, groups, used)
    bags = torch.arange(0, index.numel(), used, dtype=torch.int32)
    each = weights.unsqueeze(2).expand(index.shape).flatten()
    out = SUM[bits](rows.reshape(-1, size), index.flatten(), bags, per_sample_weights=each)
    return out.view(count, queries, -1)[..., :width]


def attend(q: Tensor, key: Coded, value: Coded | None, used: int, value_dim: int | None = None) -> Older:
    """Attention of scaled queries q (B, H, D) to the first `used` slots, block by block.

    H is a multiple of the key heads G of a slot. `value`: None: the first `value_dim` components of the keys.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    keys = key.rows.flatten(0, -4)  # (B G, places, groups, bytes)
    values = None if value is None else value.rows.flatten(0, -4)
    q = q.to(wide).reshape(len(keys), -1, key.width)
    slots = max(BLOCK, SCRATCH // key.width // BLOCK * BLOCK)
    rows = max(1, slots // used)

    def part(row: int, first: int) -> tuple[Tensor, Tensor, Tensor]:
        """A block's output, not divided by the sum of its weights, that sum, and the largest logit."""
        here = slice(row, row + rows), slice(first, min(first + slots, used))
        x = decoded(keys[here], key.bits, key.width, wide)
        weights = torch.bmm(q[here[0]], x.mT)
        most = weights.amax(-1, keepdim=True)
        total = weights.sub_(most).exp_().sum(-1, keepdim=True)
        if value is None or values is None:
            return torch.bmm(weights, x[..., :value_dim]), total, most
        del x  # its memory is used again: new memory would cost more time than the numbers
        return torch.bmm(weights, decoded(values[here], value.bits, value.width, wide)), total, most

    outs, sums = [], []
    with torch.autocast(q.device.type, enabled=False):
        if value is not None and values is not None and can_sum(q, value.bits):
            logits = q.new_empty(*q.shape[:2], used)
            for row, first in product(range(0, len(keys), rows), range(0, used, slots)):
                here = slice(row, row + rows), slice(first, min(first + slots, used))
                logits[here[0], :, here[1]] = torch.bmm(q[here[0]], decoded(keys[here], key.bits, key.width, wide).mT)
            total = logits.logsumexp(-1, keepdim=True)
            return weighted_sum(logits.sub_(total).exp_(), values, value.bits, value.width), total
        for row in range(0, len(keys), rows):
            parts = [part(row, first) for first in range(0, used, slots)]
            out, total, most = parts[0]
            if len(parts) > 1:
                out, total, every = (torch.stack(of) for of in zip(*parts, strict=True))
                most = every.amax(0)
                share = (every - most).exp_()
                out, total = (share * out).sum(0), (share * total).sum(0)
            outs.append(out / total)
            sums.append(most + total.log())
    return torch.cat(outs), torch.cat(sums)


class Sealing:
    """Which slots of a text are codes, given its length.

    Args:
        stride: positions of a slot.
        lag: positions that follow the last one of a slot before it is final.
        capacity: maximum number of positions. A slot that no later position would read stays as it is.
    """

    def __init__(self, stride: int, lag: int, capacity: int) -> None:
        self.stride, self.lag, self.capacity, self.block = stride, lag, capacity, BLOCK * stride

    def __call__(self, length: int) -> int:
        """Number of slots that are codes, once `length` positions are cached."""
        full = min(length, self.capacity - 1) // self.block * self.block
        return max(0, full - self.lag) // self.stride // BLOCK * BLOCK

    def final(self, length: int) -> int:
        """Number of slots that no position after `length` changes, in any row."""
        return max(0, length - self.lag) // self.stride

    @property
    def open(self) -> int:
        """Largest number of slots in full precision after a prefix of any length."""
        late = -(-self.lag // self.stride)
        return BLOCK * (1 + -(-late // BLOCK)) + (self.stride > 1 or late > 0)


def coded_bytes(shape: tuple[int | None, ...], bits: int) -> int:
    """Bytes of a slot as codes, with scales and zeros."""
    *outer, width = (size for size in shape if size is not None)
    groups, _, count = row_shape(width, bits)
    return math.prod(outer) * groups * count

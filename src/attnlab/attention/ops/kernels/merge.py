"""Kernel that merges the position of a decoding step into the open slot of each row (MTLA paper, section 4).

It is launched before the attention, in which several programs read the open slot of a row. It replaces a dozen small
operations, and reads on the device where to write.
"""

import torch
from torch import Tensor

from .split import number, numbers, tl, triton


def merge_slot(
    slots: Tensor,
    latent: Tensor,
    rotary: Tensor,
    hidden: Tensor,
    gates: Tensor,
    at: int | Tensor,
    stride: int,
    first: int | Tensor = 0,
) -> Tensor:
    """Add the gated latent of a position to the slot of its row, in place, and replace the slot's rotary key.

    The gate is sigmoid(hidden . gates[first + floor(at / stride)]), in float32.

    Args:
        slots: (B, K, r + d_r), the last axis dense.
        latent: latent of the new position, (B, r).
        rotary: rotary key of the new position, (B, d_r).
        hidden: fc_p(latent), (B, g).
        gates: fc_c(pe(k)) of every slot k, (A, g).
        at: position, counted from the start of slot 0: an int, or int32 or int64 on the device, (B,) or one element.
            Its slot is floor(at / stride), which is overwritten if `stride` divides `at`.
        first: number of slot 0, in the same form.

    Returns:
        Number of slots in use in each row, (B,) int32, for `latent.CacheSegment`.

    ValueError: shapes do not fit each other.
    """
    rows, _, width = slots.shape
    if latent.shape[0] != rows or rotary.shape[0] != rows or latent.shape[1] + rotary.shape[1] != width:
        raise ValueError(f"latents {tuple(latent.shape)}, rotary keys {tuple(rotary.shape)}: slots {rows, width}")
    if hidden.shape != (rows, gates.shape[1]):
        raise ValueError(f"hidden {tuple(hidden.shape)}: expected {(rows, gates.shape[1])}")
    latent, rotary, hidden, gates = (
        t if t.stride(-1) == 1 else t.contiguous() for t in (latent, rotary, hidden, gates)
    )
    places, place_step, place = numbers(at, rows, 0, "at", slots)
    firsts, first_step, number_of_first = numbers(first, rows, 0, "first", slots)
    counts = torch.empty(rows, dtype=torch.int32, device=slots.device)
    r = latent.shape[1]
    merge_kernel[(rows,)](
        slots, latent, rotary, hidden, gates, places, firsts, counts, place, number_of_first,
        slots.stride(0), slots.stride(1), latent.stride(0), rotary.stride(0), hidden.stride(0), gates.stride(0),
        place_step, first_step, slots.shape[1], gates.shape[0],
        PLACED=place_step >= 0, NUMBERED=first_step >= 0, STRIDE=stride,
        LATENT=r, ROTARY=width - r, GATES=gates.shape[1], LATENT_BLOCK=triton.next_power_of_2(r),
        ROTARY_BLOCK=triton.next_power_of_2(max(1, width - r)), GATES_BLOCK=triton.next_power_of_2(gates.shape[1]),
        num_warps=4,
    )  # fmt: skip
    return counts


@triton.jit(do_not_specialize=["at", "first", "place_step", "first_step", "capacity", "table"])
def merge_kernel(
    slots, latent, rotary, hidden, gates, places, firsts, counts, at, first, slots_row, slots_slot, latent_row,
    rotary_row, hidden_row, gates_row, place_step, first_step, capacity, table, PLACED: tl.constexpr,
    NUMBERED: tl.constexpr, STRIDE: tl.constexpr, LATENT: tl.constexpr, ROTARY: tl.constexpr, GATES: tl.constexpr,
    LATENT_BLOCK: tl.constexpr, ROTARY_BLOCK: tl.constexpr, GATES_BLOCK: tl.constexpr,
):  # fmt: skip
    """Write `slots` and `counts`. `latent`, `rotary`, `hidden` and `gates` are arguments of `merge_slot`.

    `places`, `firsts`: `at` and `first`, as returned by `split.numbers`.
    """
    row = tl.program_id(0).to(tl.int64)
    position = number(places, row, place_step, at, PLACED)
    slot = position // STRIDE
    tl.store(counts + row, slot + 1)
    if slot >= capacity:
        return
    chosen = tl.minimum(number(firsts, row, first_step, first, NUMBERED) + slot, table - 1)
    gate = tl.arange(0, GATES_BLOCK)
    column, other = tl.arange(0, LATENT_BLOCK), tl.arange(0, ROTARY_BLOCK)
    of_latent = tl.load(hidden + row * hidden_row + gate, mask=gate < GATES, other=0.0).to(tl.float32)
    of_slot = tl.load(gates + chosen.to(tl.int64) * gates_row + gate, mask=gate < GATES, other=0.0).to(tl.float32)
    weight = tl.sigmoid(tl.sum(of_latent * of_slot, 0))
    new = weight * tl.load(latent + row * latent_row + column, mask=column < LATENT, other=0.0).to(tl.float32)
    here = slots + row * slots_row + slot.to(tl.int64) * slots_slot
    stored = tl.where(position % STRIDE == 0, 0, LATENT)  # the first position of a slot overwrites it
    new += tl.load(here + column, mask=column < stored, other=0.0).to(tl.float32)
    tl.store(here + column, new.to(slots.dtype.element_ty), mask=column < LATENT)
    if ROTARY > 0:
        turned = tl.load(rotary + row * rotary_row + other, mask=other < ROTARY, other=0.0)
        tl.store(here + LATENT + other, turned.to(slots.dtype.element_ty), mask=other < ROTARY)

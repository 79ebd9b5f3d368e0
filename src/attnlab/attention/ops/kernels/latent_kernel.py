"""Kernel of `latent`: one program computes the softmax of one split of the context."""

from .split import number, span, tl, triton


@triton.jit(do_not_specialize=["count", "capacity", "mask_width", "first_split"])
def attend(
    q, key, value, counts, mask, partial, sums, scale, count, capacity, beam, group, groups, mask_width, q_row, q_head,
    key_row, key_head, key_slot, value_row, value_head, value_slot, mask_row, count_step, all_splits, first_split,
    COUNTED: tl.constexpr, MASKED: tl.constexpr, SHARED: tl.constexpr, CONTENT: tl.constexpr, REST: tl.constexpr,
    VALUE: tl.constexpr, CONTENT_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    LINES: tl.constexpr, SLOTS: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Output of split `program_id(1)` for a tile of lines, and the base-2 logarithm of its sum of exponentials.

    Args:
        q: (B, H, D).
        key, value: (N, G, K, .).
        counts: number of slots that exist in each row, if `COUNTED`.
        mask: bytes, (N or 1, M), if `MASKED`.
        partial: outputs, (B, H, all splits, Dv) float32, written.
        sums: (B, H, all splits) float32, written; -inf without keys, where `partial` is not written.
        scale: factor of the logits, times log2(e).
        count: the number of slots, if not `COUNTED`.
        capacity: K; mask_width: M.
        beam: query rows per row of keys, B / N; group: H / G; groups: G.
        CONTENT, REST, VALUE: columns, see `Widths`; `_BLOCK`: rounded up to powers of two from 16, 0 for no rest.
        LINES, SLOTS: block sizes, see `Blocks`.
        WIDE: multiply in float32.
    """
    split = tl.program_id(1)
    blocks = tl.cdiv(beam * group, LINES)
    row = tl.program_id(0) // (blocks * groups)  # of the segment
    head = tl.program_id(0) // blocks % groups  # of the keys
    line = tl.program_id(0) % blocks * LINES + tl.arange(0, LINES)
    asked = line < beam * group
    q_at = (row * beam + line // group).to(tl.int64)
    head_at = head * group + line % group
    place = (q_at * (groups * group) + head_at) * all_splits + first_split + split

    high = tl.minimum(number(counts, row, count_step, count, COUNTED), capacity)
    begin, end = span(high, split, tl.num_programs(1), SLOTS)
    if begin >= end:
        tl.store(sums + place, tl.full([LINES], float("-inf"), tl.float32), mask=asked)
        return

    column = tl.arange(0, CONTENT_BLOCK)
    wide = tl.arange(0, VALUE_BLOCK)
    q_line = q + q_at * q_row + head_at * q_head
    q_content = tl.load(q_line[:, None] + column[None, :], mask=asked[:, None] & (column < CONTENT)[None, :], other=0.0)
    if REST:
        other = tl.arange(0, REST_BLOCK)
        beyond = CONTENT + other
        q_rest = tl.load(q_line[:, None] + beyond[None, :], mask=asked[:, None] & (other < REST)[None, :], other=0.0)
        if WIDE:
            q_rest = q_rest.to(tl.float32)
    if WIDE:
        q_content = q_content.to(tl.float32)
    key += row.to(tl.int64) * key_row + head.to(tl.int64) * key_head
    value += row.to(tl.int64) * value_row + head.to(tl.int64) * value_head
    mask += row.to(tl.int64) * mask_row

    top = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    read = tl.zeros([LINES, VALUE_BLOCK], tl.float32)
    for position in range(begin, end, SLOTS):
        slot = position + tl.arange(0, SLOTS)
        there = slot < end
        if MASKED:  # slots that do not exist may contain NaN, and must not be loaded
            there = there & (tl.load(mask + slot, mask=there & (slot < mask_width), other=1) != 0)
        at = slot.to(tl.int64) * key_slot
        k = tl.load(key + at[:, None] + column[None, :], mask=there[:, None] & (column < CONTENT)[None, :], other=0.0)
        if WIDE:
            k = k.to(tl.float32)
        logits = tl.dot(q_content, tl.trans(k), input_precision=PRECISION)
        if REST:
            beside = key + CONTENT + at[:, None] + other[None, :]
            k_rest = tl.load(beside, mask=there[:, None] & (other < REST)[None, :], other=0.0)
            if WIDE:
                k_rest = k_rest.to(tl.float32)
            logits = tl.dot(q_rest, tl.trans(k_rest), acc=logits, input_precision=PRECISION)
        logits = tl.where(there[None, :], logits * scale, float("-inf"))
        highest = tl.maximum(top, tl.max(logits, 1))
        safe = tl.where(highest == float("-inf"), 0.0, highest)  # -inf - -inf is NaN
        weights = tl.exp2(logits - safe[:, None])
        shrunk = tl.exp2(top - safe)
        total = total * shrunk + tl.sum(weights, 1)
        if SHARED:
            v = k
        else:
            beside = value + slot.to(tl.int64)[:, None] * value_slot + wide[None, :]
            v = tl.load(beside, mask=there[:, None] & (wide < VALUE)[None, :], other=0.0)
            if WIDE:
                v = v.to(tl.float32)
        read = tl.dot(weights.to(v.dtype), v, acc=read * shrunk[:, None], input_precision=PRECISION)
        top = highest

    exists = total > 0.0
    some = tl.where(exists, total, 1.0)
    lse = tl.where(exists, top + tl.log2(some), float("-inf"))
    tl.store(sums + place, lse, mask=asked)
    where = partial + place[:, None] * VALUE + wide[None, :]
    tl.store(where, read / some[:, None], mask=(asked & exists)[:, None] & (wide < VALUE)[None, :])

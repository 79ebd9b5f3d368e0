"""Kernel of `latent`: one program computes the softmax of one split of the context."""

from .split import number, span, tl, triton


@triton.jit
def load(
    rows, column, there, width, BITS: tl.constexpr, GROUP: tl.constexpr, ROW: tl.constexpr, DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Columns of rows, (rows, columns): 0 where a row is not `there`, and from column `width` on.

    Args:
        rows: pointers.
        BITS: 0: numbers; else codes of so many bits, in groups of `GROUP` columns and `ROW` bytes, see `..quantised`.
        DTYPE: dtype of the result for codes; WIDE: float32.
    """
    mask = there[:, None] & (column < width)[None, :]
    if BITS == 0:
        x = tl.load(rows[:, None] + column[None, :], mask=mask, other=0.0)
    else:
        place = column % GROUP
        group = rows[:, None] + (column // GROUP * ROW)[None, :]
        code = tl.load(group + (place * BITS // 8)[None, :], mask=mask, other=0).to(tl.int32)
        code = (code >> (place * BITS % 8)[None, :]) & (2**BITS - 1)
        constants = (group + GROUP * BITS // 8).to(tl.pointer_type(tl.float32 if BITS == 8 else tl.float16))
        scale = tl.load(constants, mask=mask, other=0.0).to(tl.float32)
        zero = tl.load(constants + 1, mask=mask, other=0.0).to(tl.float32)
        x = (scale * code.to(tl.float32) + zero).to(DTYPE)
    return x.to(tl.float32) if WIDE else x


@triton.jit(do_not_specialize=["count", "capacity", "mask_width", "first_split"])
def attend(
    q, key, value, counts, mask, partial, sums, scale, count, capacity, beam, group, groups, mask_width, q_row, q_head,
    key_row, key_head, key_slot, value_row, value_head, value_slot, mask_row, count_step, all_splits, first_split,
    COUNTED: tl.constexpr, MASKED: tl.constexpr, SHARED: tl.constexpr, CONTENT: tl.constexpr, REST: tl.constexpr,
    VALUE: tl.constexpr, CONTENT_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    LINES: tl.constexpr, SLOTS: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, BITS: tl.constexpr,
    KEY_GROUP: tl.constexpr, KEY_BYTES: tl.constexpr, VALUE_GROUP: tl.constexpr, VALUE_BYTES: tl.constexpr,
):  # fmt: skip
    """Output of split `program_id(1)` for a tile of lines, and the base-2 logarithm of its sum of exponentials.

    Args:
        q: (B, H, D).
        key, value: (N, G, K, .), or with `BITS` rows of codes, (N, G, K, groups, bytes).
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
        BITS, KEY_GROUP, KEY_BYTES, VALUE_GROUP, VALUE_BYTES: arguments of `load`.
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
    dtype = q.dtype.element_ty
    q_content = load(q_line, column, asked, CONTENT, 0, 1, 1, dtype, WIDE)
    if REST:
        beyond = CONTENT + tl.arange(0, REST_BLOCK)
        q_rest = load(q_line, beyond, asked, CONTENT + REST, 0, 1, 1, dtype, WIDE)
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
        at = key + slot.to(tl.int64) * key_slot
        k = load(at, column, there, CONTENT, BITS, KEY_GROUP, KEY_BYTES, dtype, WIDE)
        logits = tl.dot(q_content, tl.trans(k), input_precision=PRECISION)
        if REST:
            k_rest = load(at, beyond, there, CONTENT + REST, BITS, KEY_GROUP, KEY_BYTES, dtype, WIDE)
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
            beside = value + slot.to(tl.int64) * value_slot
            v = load(beside, wide, there, VALUE, BITS, VALUE_GROUP, VALUE_BYTES, dtype, WIDE)
        read = tl.dot(weights.to(v.dtype), v, acc=read * shrunk[:, None], input_precision=PRECISION)
        top = highest

    exists = total > 0.0
    some = tl.where(exists, total, 1.0)
    lse = tl.where(exists, top + tl.log2(some), float("-inf"))
    tl.store(sums + place, lse, mask=asked)
    where = partial + place[:, None] * VALUE + wide[None, :]
    tl.store(where, read / some[:, None], mask=(asked & exists)[:, None] & (wide < VALUE)[None, :])

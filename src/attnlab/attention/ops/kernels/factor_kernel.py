"""Kernel of `factor`: one program computes the softmax of one split for a tile of lines (heads of a row)."""

from .split import number, span, tl, triton


@triton.jit
def _tokens(base, at, column, there, WIDTH: tl.constexpr, THIRD: tl.constexpr, WIDE: tl.constexpr):
    """Token factors (positions, D) of one rank, at rows `at` from `base`; of third order: vec(b' (x) c).

    `column`: 0 to D - 1; `there`: mask of the load; `WIDTH`, `THIRD`, `WIDE`: as in `attend`.
    """
    if THIRD == 0:
        factors = tl.load(base + at[:, None] + column[None, :], mask=there, other=0.0)
    else:
        turned = tl.load(base + at[:, None] + (column % (WIDTH // THIRD))[None, :], mask=there, other=0.0)
        third = base + WIDTH // THIRD + at[:, None] + (column // (WIDTH // THIRD))[None, :]
        product = turned.to(tl.float32) * tl.load(third, mask=there, other=0.0).to(tl.float32)
        factors = product.to(turned.dtype)
    if WIDE:
        factors = factors.to(tl.float32)
    return factors


@triton.jit
def _heads(base, at, position, room, asked, there, FIXED: tl.constexpr):
    """Head factors (lines, positions) of one rank, float32, 0 at positions that do not exist.

    The load is masked by the size of the buffer, a multiple of 16 positions, to allow loads of 16 bytes.
    """
    if FIXED:
        factors = tl.load(base + at, mask=asked, other=0.0).to(tl.float32)[:, None]
    else:
        inside = asked[:, None] & (position < room)[None, :]
        factors = tl.load(base + (at * room)[:, None] + position[None, :], mask=inside, other=0.0).to(tl.float32)
        factors = tl.where(there[None, :], factors, 0.0)
    return factors


@triton.jit(do_not_specialize=["count", "first_split"])
def attend(
    query_head, query, key_head, key_token, value_head, value_token, counts, partial, sums, scale, count, room, beam,
    count_step, all_splits, first_split, HEADS: tl.constexpr, RANKS: tl.constexpr, QUERY_RANKS: tl.constexpr,
    WIDTH: tl.constexpr, THIRD: tl.constexpr, COUNTED: tl.constexpr, FIXED: tl.constexpr, WIDE: tl.constexpr,
    LINES: tl.constexpr, POSITIONS: tl.constexpr, WIDTH_BLOCK: tl.constexpr, QUERY_BLOCK: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Programs: (tiles of lines x rows of the part, splits). Writes outputs divided by R, and base-2 log-sum-exps.

    Args:
        query_head: (B, R_Q, h); not read where QUERY_RANKS is 0.
        query: (B, R_Q, D), or (B, h, D).
        key_head, value_head: (N, R, h, K), or (R, h) where FIXED.
        key_token, value_token: (N, R, K, w).
        counts, count_step, count: arguments of `split.number`.
        partial, sums: results of all parts, (B, h, all_splits, D) and (B, h, all_splits).
        scale: factor of the logits, times log2(e).
        room: K. A multiple of 16 allows loads of 16 bytes.
        beam: number of query rows that read a row of the part, B / N; 1 if QUERY_RANKS is not 0.
        QUERY_RANKS: R_Q; 0: queries have no factors.
        THIRD: d_c; 0: token factors are vectors.
        FIXED: whether all rows and positions share the head factors.
        WIDE: multiply in float32, for the interpreter, which has no products of bfloat16.
    """
    split = tl.program_id(1)
    tiles = tl.cdiv(beam * HEADS, LINES)
    row = tl.program_id(0) // tiles  # of the part
    line = tl.program_id(0) % tiles * LINES + tl.arange(0, LINES)
    asked = line < beam * HEADS
    head = line % HEADS
    q_row = (row * beam + line // HEADS).to(tl.int64)
    place = (q_row * HEADS + head) * all_splits + first_split + split

    high = tl.minimum(number(counts, row, count_step, count, COUNTED), room)
    begin, end = span(high, split, tl.num_programs(1), POSITIONS)
    if begin >= end:
        tl.store(sums + place, tl.full([LINES], float("-inf"), tl.float32), mask=asked)
        return

    kind = key_token.dtype.element_ty
    column = tl.arange(0, WIDTH_BLOCK)
    wide = column < WIDTH
    if QUERY_RANKS:
        rank = tl.arange(0, QUERY_BLOCK)
        real = rank < QUERY_RANKS
        q_at = row.to(tl.int64) * QUERY_RANKS + rank
        q = tl.load(query + q_at[:, None] * WIDTH + column[None, :], mask=real[:, None] & wide[None, :], other=0.0)
        a_q = query_head + q_at[None, :] * HEADS + head[:, None]
        a_q = tl.load(a_q, mask=real[None, :] & asked[:, None], other=0.0)
        if WIDE:
            a_q = a_q.to(tl.float32)
    else:
        q_line = query + (q_row * HEADS + head) * WIDTH
        q = tl.load(q_line[:, None] + column[None, :], mask=asked[:, None] & wide[None, :], other=0.0)
    if WIDE:
        q = q.to(tl.float32)
    STORED: tl.constexpr = WIDTH if THIRD == 0 else WIDTH // THIRD + THIRD
    far = row.to(tl.int64) * RANKS * room
    key_token += far * STORED
    value_token += far * STORED
    if not FIXED:
        key_head += far * HEADS
        value_head += far * HEADS

    top = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    read = tl.zeros([LINES, WIDTH_BLOCK], tl.float32)
    for first in tl.range(begin, end, POSITIONS, num_stages=STAGES):
        position = first + tl.arange(0, POSITIONS)
        there = position < end
        exists = there[:, None] & wide[None, :]
        logits = tl.zeros([LINES, POSITIONS], tl.float32)
        for r in tl.static_range(RANKS):
            b = _tokens(key_token, (r * room + position) * STORED, column, exists, WIDTH, THIRD, WIDE)
            product = tl.dot(q, tl.trans(b), input_precision=PRECISION) * scale
            if QUERY_RANKS:
                product = product.to(kind)
                if WIDE:
                    product = product.to(tl.float32)
                product = tl.dot(a_q, product, input_precision=PRECISION)
            logits += product * _heads(key_head, r * HEADS + head, position, room, asked, there, FIXED)
        logits = tl.where(there[None, :], logits, float("-inf"))
        highest = tl.maximum(top, tl.max(logits, 1))
        safe = tl.where(highest == float("-inf"), 0.0, highest)  # -inf - -inf is NaN
        p = tl.exp2(logits - safe[:, None])
        shrunk = tl.exp2(top - safe)
        total = total * shrunk + tl.sum(p, 1)
        read = read * shrunk[:, None]
        for r in tl.static_range(RANKS):
            b = _tokens(value_token, (r * room + position) * STORED, column, exists, WIDTH, THIRD, WIDE)
            weights = (p * _heads(value_head, r * HEADS + head, position, room, asked, there, FIXED)).to(kind)
            if WIDE:
                weights = weights.to(tl.float32)
            read = tl.dot(weights, b, acc=read, input_precision=PRECISION)
        top = highest

    some_exist = total > 0.0
    some = tl.where(some_exist, total, 1.0)
    tl.store(sums + place, tl.where(some_exist, top + tl.log2(some), float("-inf")), mask=asked)
    where = partial + place[:, None] * WIDTH + column[None, :]
    tl.store(where, read / (some * RANKS)[:, None], mask=(asked & some_exist)[:, None] & wide[None, :])

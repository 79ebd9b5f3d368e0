"""How heads of different ranks share calls of scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

ROUND = 8  # widths are multiples of it: vector registers, tensor cores
MOST = 3  # buckets
CALL = 16  # what one more call costs, in columns of one head


@dataclass(frozen=True)
class Bucket:
    """Heads `first` to `end` - 1, filled up to `width`."""

    first: int
    end: int
    width: int


def buckets(ranks: Sequence[int], value_ranks: Sequence[int]) -> list[Bucket]:
    """The cheapest way to cut heads, sorted by falling rank, into at most three buckets.

    A bucket is as wide as its widest query or value, because fused kernels want the two alike; its cost is its number
    of heads times its width. Heads of one rank that needs no filling up stay as they are.

    Args:
        value_ranks: of the value-output matrix of each head, in the same order.
    """
    heads = len(ranks)

    def width(first: int, end: int) -> int:
        widest = max(*ranks[first:end], *value_ranks[first:end])
        same = {*ranks[first:end], *value_ranks[first:end]} == {widest}
        return widest if same else -(-widest // ROUND) * ROUND

    best: tuple[int, list[Bucket]] | None = None
    for count in range(1, min(MOST, heads) + 1):
        for cuts in combinations(range(1, heads), count - 1):
            edges = [0, *cuts, heads]
            found = [Bucket(a, b, width(a, b)) for a, b in zip(edges, edges[1:], strict=False)]
            price = sum((bucket.end - bucket.first) * bucket.width for bucket in found) + CALL * count
            if best is None or price < best[0]:
                best = price, found
    assert best is not None
    return best[1]

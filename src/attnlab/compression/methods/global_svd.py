"""Truncated SVDs whose ranks are shared out among heads by singular value: the best there is for unmixed heads."""

from __future__ import annotations

from attnlab.compression.methods.truncatt import TruncAtt


class GlobalSVD(TruncAtt):
    """The arguments are those of QueryKeyMethod; `rank` is that of all heads together, one each to the full width.

    The papers lack this baseline: by Eckart and Young no other ranks of this total, whatever finds them, leave a
    smaller error while the fusion is the identity; it takes one sort.
    """

    per_head = False

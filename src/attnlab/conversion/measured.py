"""Sizes and windows of a converted decoder's layers, by what each alone changes in the decoder's predictions.

Errors of an attention's output do not tell what a layer is for. A layer that finds the token before the present one
needs a few exact positions, and one that retrieves needs every position. Both may have equal errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional as F

from attnlab.attention import Attention
from attnlab.conversion.budget import LayerPlan
from attnlab.models.decoder import Decoder

SAME = 6  # ids before a token that stand before it earlier in the text too: then it can be retrieved
TOKENS = 32768  # on which predictions are compared, over the number of layers: a choice passes through all later ones
LEAST = 4096  # with fewer other sizes are chosen
PIECE = 4  # texts computed at a time
POSITIONS = 1024  # of either kind, at most: each has a distribution over the vocabulary
RETRIEVED = 3.0  # weight of the divergence at retrieved tokens; 1 for the others
DOUBT = 2.0  # an expected divergence may be so many times too large
ROUNDING = 1e-7  # least divergence that float32 can tell from none
TINY = 1e-30  # smaller predicted errors are none


@dataclass
class Choice:
    """A cache that a layer may have.

    Args:
        cost: elements of the cache.
        predicted: squared error of the attention's output by the layer's statistics.
        divergence: of predictions; None: not measured.
    """

    plan: LayerPlan
    cost: int
    predicted: float
    divergence: float | None = None

    @property
    def kind(self) -> tuple[float, bool]:
        """Choices of a kind differ in size; only the first kind is exact at full size."""
        return -(self.plan.window or math.inf), self.plan.merged


def expected(choices: Sequence[Choice]) -> list[float]:
    """The divergence of each choice of a layer, or what it is hardly less than, from those of the same kind.

    Between two measured sizes the logarithm of the divergence is linear in that of the predicted error. Beyond them it
    has the ratio of the nearest one, but a smaller size of a kind that is never exact has at least its divergence. A
    kind that is not measured has that of a longer window, at least.

    Args:
        choices: by kind, and then by size.
    """
    result, longer, exact = list[float](), 0.0, choices[0].kind
    for kind, group in groupby(choices, lambda choice: choice.kind):
        every = list(group)
        known = [(math.log(max(c.predicted, TINY)), c.divergence) for c in every if c.divergence is not None]
        for choice in every:
            at = math.log(max(choice.predicted, TINY))
            larger = next((pair for pair in known if pair[0] <= at), None)
            smaller = next((pair for pair in reversed(known) if pair[0] >= at), None)
            if choice.divergence is not None or not known:
                least, ratio = longer if choice.divergence is None else choice.divergence, 0.0
            elif larger and smaller:
                slope = math.log(smaller[1] / larger[1]) / max(smaller[0] - larger[0], TINY)
                least, ratio = larger[1], larger[1] * math.exp(slope * (at - larger[0]))
            elif larger:
                least, ratio = larger[1], larger[1] * math.exp(at - larger[0]) * (kind == exact)
            else:
                assert smaller is not None
                least, ratio = 0.0, smaller[1] * math.exp(at - smaller[0])
            result.append(max(least, ratio / DOUBT))
        if kind[0] > -math.inf and known:
            longer = min(divergence for _, divergence in known)
    return result


def retrieved(tokens: Tensor) -> Tensor:
    """Whether the token after each position follows the same `SAME` ids earlier in its text.

    tokens (B, T) -> (B, T) bool.
    """
    marks = torch.zeros(tokens.shape, dtype=torch.bool)
    for row, text in zip(marks, tokens.tolist(), strict=True):
        following: dict[tuple[int, ...], int] = {}
        for place in range(SAME - 1, len(text) - 1):
            ids = tuple(text[place - SAME + 1 : place + 1])
            row[place] = following.get(ids) == text[place + 1]
            following[ids] = text[place + 1]
    return marks


class Predictions:
    """The predictions of a decoder on some texts, from the inputs of its current block on.

    Args:
        decoder: in eval mode, with the original attention.
        tokens: calibration texts, (windows, positions); those with most retrieved tokens, and others, are read.
    """

    def __init__(self, decoder: Decoder, tokens: Tensor) -> None:
        marks, count = retrieved(tokens), max(LEAST, TOKENS // len(decoder.blocks))
        texts = max(4, count // tokens.shape[1])
        order = marks.sum(1).argsort(descending=True, stable=True)
        chosen = torch.cat((order[: texts * 3 // 4], order[-(texts // 4) :])).unique()
        weights = torch.zeros(len(chosen) * tokens.shape[1])
        for mask, weight in ((marks[chosen], RETRIEVED), (~marks[chosen], 1.0)):
            places = mask.flatten().nonzero()[:, 0]
            places = places[:: max(1, -(-len(places) // POSITIONS))]  # evenly spread
            weights[places] = weight / max(1, len(places))
        self._decoder, self.block = decoder, 0
        self.hidden = list(decoder.embed(tokens[chosen], 0).split(PIECE))
        self._weights = weights.split(PIECE * tokens.shape[1])
        self._original = [self._scored(*piece) for piece in zip(self.hidden, self._weights, strict=True)]

    def _scored(self, x: Tensor, weights: Tensor) -> Tensor:
        """Final hidden states, (positions with a weight, d)."""
        *blocks, last = self._decoder.blocks[self.block :]
        for block in blocks:
            x = block(x, block.attention)
        rows = (x + last.attention(last.attention_norm(x))).flatten(0, 1)[weights > 0]
        return self._decoder.final(rows + last.mlp(last.mlp_norm(rows)))

    def divergence(self, attention: Attention) -> float:
        """KL(original | decoder with this attention in the current block) of the next token, in nats, as weighted."""
        block, total = self._decoder.blocks[self.block], 0.0
        before, block.attention = block.attention, attention
        try:
            for x, weights, original in zip(self.hidden, self._weights, self._original, strict=True):
                pair = (original, self._scored(x, weights))
                old, new = (self._decoder.logits(rows).float().log_softmax(-1) for rows in pair)
                lost = F.kl_div(new, old, reduction="none", log_target=True).sum(-1)
                total += float(lost.double() @ weights[weights > 0].double())
        finally:
            block.attention = before
        return max(total, ROUNDING)

    def enter(self) -> None:
        """Pass through the current block."""
        block = self._decoder.blocks[self.block]
        self.hidden = [block(x, block.attention) for x in self.hidden]
        self.block += 1

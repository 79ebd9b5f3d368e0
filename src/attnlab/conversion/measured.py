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
from attnlab.models.token_loss import at_least_float32

SAME = 6  # ids before a token that stand before it earlier in the text too: then it can be retrieved
TOKENS = 32768  # on which predictions are compared, over the number of layers: a choice passes through all later ones
LEAST = 2048  # with fewer other sizes are chosen
PASSES = 3  # of measuring, at most: what is not measured after them is estimated
PIECE = 2  # texts computed at a time
ROWS = 128  # positions whose distributions over the vocabulary are computed at a time
POSITIONS = 1024  # of either kind, at most: each has a distribution over the vocabulary
RETRIEVED = 3.0  # weight of the divergence at retrieved tokens; 1 for the others
DOUBT = 2.0  # a divergence by its ratio to the predicted error may be so many times too large
FIRST = 2  # kinds of choices that the first pass measures in every layer: latents of all positions, and the next kind
ROUNDING = 1e-7  # least divergence that float32 can tell from none


@dataclass
class Choice:
    """A cache that a layer may have: its elements, the predicted error of outputs, and the divergence, if measured."""

    plan: LayerPlan
    cost: int
    predicted: float
    divergence: float | None = None


def kinds(choices: Sequence[Choice]) -> list[list[Choice]]:
    """Choices that differ in size alone. Those of the first kind are exact at full size."""
    return [list(kind) for _, kind in groupby(choices, lambda choice: (choice.plan.window, choice.plan.merged))]


def losses(choices: Sequence[Choice], left: float, doubt: float = DOUBT) -> list[tuple[int, float]]:
    """The cost of each choice of a layer, and its divergence, or a bound for it. The smaller of equals wins.

    A smaller size has at least the divergence of a larger one, and a window at least that of a longer one, which comes
    before it. A size has at least the least measured ratio to the predicted error, over `doubt`, times its own. Healing
    leaves a share `left` of what a smaller size adds.

    Args:
        doubt: 1: estimates in place of bounds. A window of which no size is measured is then infinitely bad.
    """
    result, unseen, most = list[tuple[int, float]](), 0.0, max(choice.cost for choice in choices)
    known = [(c.predicted, c.divergence) for c in kinds(choices)[0] if c.divergence is not None]
    ratio = min((lost / error for error, lost in known if error > 0), default=0.0) / doubt
    for kind in kinds(choices):
        known = [(c.predicted, c.divergence) for c in kind if c.divergence is not None]
        floor = unseen if kind[0].plan.window else 0.0
        if kind[0] is not choices[0]:  # what the largest size loses that is not its size
            floor = max([floor] + [lost - ratio * error for error, lost in known[-1:]])
            floor = math.inf if doubt == 1 and not known else floor
        bounds = list[float]()
        for c in kind:
            bound = max((lost for error, lost in known if error <= c.predicted), default=0.0)
            bounds.append(max(bound, floor + ratio * c.predicted) if c.divergence is None else c.divergence)
        if kind[0].plan.window:
            unseen = floor
        floor = min(unseen, *bounds) if kind[0].plan.window else 0.0  # what healing does not bring back
        for c, bound in zip(kind, bounds, strict=True):
            lost = floor + left * (bound - floor) if bound < math.inf else bound
            result.append((c.cost, lost + ROUNDING * c.cost / most))
    return result


def due(choices: Sequence[Choice], chosen: Choice | None) -> list[Choice]:
    """What to measure in a layer: for the first pass one size of the first kinds, and later the choice itself.

    A size of a window comes after the largest one, which tells what the window loses.
    """
    if chosen is None:
        return [kind[len(kind) * 3 // 8 if kind[0] is choices[0] else -1] for kind in kinds(choices)[:FIRST]]
    kind = next(kind for kind in kinds(choices) if chosen in kind)
    measured = any(choice.divergence is not None for choice in kind)
    return [choice for choice in (chosen,) if choice.divergence is None] if measured else [kind[-1]]


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
        self._decoder, self.block, self._matrix = decoder, 0, at_least_float32(decoder.vocabulary_matrix)
        self.hidden = [decoder.embed(rows, 0) for rows in tokens[chosen].split(PIECE)]
        self._weights = weights.split(PIECE * tokens.shape[1])
        self._original = [self._scored(*piece) for piece in zip(self.hidden, self._weights, strict=True)]
        self._expected = [torch.cat([self._mean_row(part) for part in rows.split(ROWS)]) for rows in self._original]
        self._sums = [self._log_sums(rows) for rows in self._original]

    def _scored(self, x: Tensor, weights: Tensor) -> Tensor:
        """Final hidden states, (positions with a weight, d)."""
        *blocks, last = self._decoder.blocks[self.block :]
        for block in blocks:
            x = block(x, block.attention)
        rows = (x + last.attention(last.attention_norm(x))).flatten(0, 1)[weights > 0]
        return at_least_float32(self._decoder.final(rows + last.mlp(last.mlp_norm(rows))))

    def _mean_row(self, final: Tensor) -> Tensor:
        """Rows of the vocabulary matrix, weighted by the predictions from final hidden states, (rows, d) each."""
        return F.linear(final, self._matrix).softmax(-1) @ self._matrix

    def _log_sums(self, final: Tensor) -> Tensor:
        """Log-sum-exp of the logits from final hidden states, (rows, d) -> (rows,)."""
        return torch.cat([F.linear(part, self._matrix).logsumexp(-1) for part in final.split(ROWS)])

    def divergence(self, attention: Attention) -> float:
        """KL(original | decoder with this attention in the current block) of the next token, in nats, as weighted.

        With final hidden states h and h', logits h W^T and the original's probabilities p it is
        lse(h' W^T) - lse(h W^T) - (p W) (h' - h), so that p W is computed once.
        """
        block, total = self._decoder.blocks[self.block], 0.0
        before, block.attention = block.attention, attention
        try:
            for x, weights, original, log_sums, expected in zip(
                self.hidden, self._weights, self._original, self._sums, self._expected, strict=True
            ):
                new = self._scored(x, weights)
                lost = self._log_sums(new) - log_sums - ((new - original) * expected).sum(-1)
                total += float(lost.double() @ weights[weights > 0].double())
        finally:
            block.attention = before
        return max(total, ROUNDING)

    def enter(self) -> None:
        """Pass through the current block."""
        block = self._decoder.blocks[self.block]
        self.hidden = [block(x, block.attention) for x in self.hidden]
        self.block += 1

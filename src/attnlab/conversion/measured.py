"""Sizes and windows of a converted decoder's layers, by what each alone changes in the decoder's predictions.

Errors of an attention's output do not tell what a layer is for. A layer that finds the token before the present one
needs a few exact positions, and one that retrieves needs every position. Both may have equal errors.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from attnlab.attention import Attention
from attnlab.models.decoder import Decoder

SAME = 6  # ids before a token that stand before it earlier in the text too: then it can be retrieved
TEXTS = 32  # on which predictions are compared
POSITIONS = 1024  # of either kind, at most: each has a distribution over the vocabulary
RETRIEVED = 3.0  # weight of the divergence at retrieved tokens; 1 for the others


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
        marks = retrieved(tokens)
        order = marks.sum(1).argsort(descending=True, stable=True)
        chosen = torch.cat((order[: TEXTS * 3 // 4], order[-(TEXTS // 4) :])).unique()
        self._decoder, self._block = decoder, 0
        self._kinds = [self._some(marks[chosen]), self._some(~marks[chosen])]
        self._hidden = decoder.embed(tokens[chosen], 0)
        self._original = self._log_probabilities()

    @staticmethod
    def _some(mask: Tensor) -> Tensor:
        """At most `POSITIONS` of the marked positions, evenly spread: their places in the flattened mask."""
        places = mask.flatten().nonzero()[:, 0]
        return places[:: max(1, -(-len(places) // POSITIONS))]

    def _log_probabilities(self) -> list[Tensor]:
        x = self._hidden
        for block in self._decoder.blocks[self._block :]:
            x = block(x, block.attention)
        rows = self._decoder.final(x).flatten(0, 1)
        return [self._decoder.logits(rows[places]).float().log_softmax(-1) for places in self._kinds]

    def divergence(self, attention: Attention) -> float:
        """KL(original | decoder with this attention in the current block) of the next token, in nats, as weighted."""
        block = self._decoder.blocks[self._block]
        before, block.attention = block.attention, attention
        try:
            changed = self._log_probabilities()
        finally:
            block.attention = before
        parts = [
            float(F.kl_div(new, old, reduction="none", log_target=True).sum(-1).mean()) if len(old) else 0.0
            for new, old in zip(changed, self._original, strict=True)
        ]
        return RETRIEVED * parts[0] + parts[1]

    def enter(self) -> None:
        """Pass through the current block."""
        block = self._decoder.blocks[self._block]
        self._hidden = block(self._hidden, block.attention)
        self._block += 1

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
TOKENS = 32768  # on which predictions are compared, over the number of layers: a choice passes through all later ones
LEAST = 4096  # with fewer other sizes are chosen
PIECE = 4  # texts computed at a time
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
        marks, count = retrieved(tokens), max(LEAST, TOKENS // len(decoder.blocks))
        texts = max(4, count // tokens.shape[1])
        order = marks.sum(1).argsort(descending=True, stable=True)
        chosen = torch.cat((order[: texts * 3 // 4], order[-(texts // 4) :])).unique()
        weights = torch.zeros(len(chosen) * tokens.shape[1])
        for mask, weight in ((marks[chosen], RETRIEVED), (~marks[chosen], 1.0)):
            places = mask.flatten().nonzero()[:, 0]
            places = places[:: max(1, -(-len(places) // POSITIONS))]  # evenly spread
            weights[places] = weight / max(1, len(places))
        self._decoder, self._block = decoder, 0
        self._hidden = list(decoder.embed(tokens[chosen], 0).split(PIECE))
        self._weights = weights.split(PIECE * tokens.shape[1])
        self._original = [self._scored(*piece) for piece in zip(self._hidden, self._weights, strict=True)]

    def _scored(self, x: Tensor, weights: Tensor) -> Tensor:
        """Final hidden states, (positions with a weight, d)."""
        *blocks, last = self._decoder.blocks[self._block :]
        for block in blocks:
            x = block(x, block.attention)
        rows = (x + last.attention(last.attention_norm(x))).flatten(0, 1)[weights > 0]
        return self._decoder.final(rows + last.mlp(last.mlp_norm(rows)))

    def divergence(self, attention: Attention) -> float:
        """KL(original | decoder with this attention in the current block) of the next token, in nats, as weighted."""
        block, total = self._decoder.blocks[self._block], 0.0
        before, block.attention = block.attention, attention
        try:
            for x, weights, original in zip(self._hidden, self._weights, self._original, strict=True):
                pair = (original, self._scored(x, weights))
                old, new = (self._decoder.logits(rows).float().log_softmax(-1) for rows in pair)
                lost = F.kl_div(new, old, reduction="none", log_target=True).sum(-1)
                total += float(lost.double() @ weights[weights > 0].double())
        finally:
            block.attention = before
        return total

    def enter(self) -> None:
        """Pass through the current block."""
        block = self._decoder.blocks[self._block]
        self._hidden = [block(x, block.attention) for x in self._hidden]
        self._block += 1

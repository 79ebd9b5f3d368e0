"""Language model of the Tensorized Transformer: Transformer-XL's post-norm decoder with any attention mechanism."""

import math
from collections.abc import Callable

from torch import Tensor, nn

from attnlab.attention import Attention
from attnlab.attention.bounds import Layers, Rate, Size
from attnlab.models.adaptive_softmax import AdaptiveSoftmax, TiedSoftmax
from attnlab.models.decoder import PostNormBlock, SharedDropout
from attnlab.models.language_model import LanguageModel
from attnlab.models.token_loss import at_least_float32


class TensorizedTransformer(LanguageModel):
    """Tokens -> log-probabilities of the next ones. Input and output embeddings share their weights.

    There are no position embeddings: the attention must represent order, which the tied multi-linear form does not. It
    differs from the released model only in the attention, which omits the position key W_r, d R parameters per layer
    and 2 R once (Tensorized Transformer, section 5.1).

    Args:
        attention: called with the index of a layer, returns its mechanism.
        dropout: dropout of embeddings and outputs, and in each block.
        variational_dropout: whether all positions of a text share a mask, which is sampled per module and batch. The
            paper used it for PTB (section 5.2), without details.
        cutoffs, div_value, tie_projections: arguments of `AdaptiveSoftmax`, for vocabularies sorted by frequency.
            Without cutoffs the output is a `TiedSoftmax`.

    ValueError: `max_length` is more than a mechanism supports.
    """

    def __init__(
        self,
        vocab_size: Size,
        d_model: Size,
        attention: Callable[[int], Attention],
        num_layers: Layers = 6,
        ffn_dim: Size = 2100,
        max_length: Size = 80,
        dropout: Rate = 0.0,
        variational_dropout: bool = False,
        cutoffs: list[Size] | None = None,
        div_value: Size = 1,
        tie_projections: bool = True,
    ) -> None:
        super().__init__()
        self.scale, self.max_length = math.sqrt(d_model), max_length
        self.softmax: TiedSoftmax | AdaptiveSoftmax = (
            AdaptiveSoftmax(vocab_size, d_model, list(cutoffs), div_value, tie_projections=tie_projections)
            if cutoffs
            else TiedSoftmax(vocab_size, d_model)
        )
        self.dropout = (SharedDropout if variational_dropout else nn.Dropout)(dropout)
        self.layers = nn.ModuleList(
            PostNormBlock(attention(i), ffn_dim, dropout, variational=variational_dropout) for i in range(num_layers)
        )
        for mechanism in self.attentions:
            if mechanism.max_positions is not None and mechanism.max_positions < max_length:
                raise ValueError(
                    f"max_length={max_length}: {type(mechanism).__name__} takes {mechanism.max_positions} positions"
                )

    @property
    def vocabulary_multiply_adds(self) -> int:
        """Multiply-adds of the embedding and the distribution of one position."""
        return self.softmax.multiply_adds

    def embed(self, tokens: Tensor, start: int | Tensor) -> Tensor:
        return self.dropout(self.scale * self.softmax.embed(tokens))

    def final(self, x: Tensor) -> Tensor:
        return self.dropout(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """(B, T, d) -> log-probabilities (B, T, V)."""
        return self.softmax.log_prob(hidden)

    def nats(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """As in `LanguageModel`. With cutoffs only the clusters of the targets are computed."""
        return at_least_float32(self.softmax.nll(hidden, targets))

"""The Tensorized Transformer's language model: Transformer-XL's post-norm decoder, over any attention mechanism."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from attnlab.attention import Attention
from attnlab.attention.bounds import Layers, Rate, Size
from attnlab.models.adaptive_softmax import AdaptiveSoftmax, TiedSoftmax
from attnlab.models.decoder import PostNormBlock, SharedDropout
from attnlab.models.language_model import LanguageModel
from attnlab.models.token_loss import in_chunks, target_and_mean_nats


class TensorizedTransformer(LanguageModel):
    """Tokens -> log-probabilities of the next ones. Input and output embeddings share their weights.

    There are no position embeddings: the attention has to represent order (the tied multi-linear form does not). It
    differs from the released model in the attention alone: the position key W_r, d R numbers per layer and 2 R once,
    is left out (Tensorized Transformer, section 5.1).

    Args:
        attention: called with the number of a layer, returns its mechanism.
        dropout: of embeddings and outputs, and in each block.
        variational_dropout: whether all positions of a text share one mask, drawn anew for each place in the model and
            each batch. The paper says that it was used for PTB (section 5.2), without details.
        cutoffs, div_value, tie_projections: of `AdaptiveSoftmax`, for vocabularies sorted by frequency; without
            cutoffs the output is a `TiedSoftmax`.

    ValueError: `max_length` is more than a mechanism takes.
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
        """Of one position: its embedding and its distribution."""
        return self.softmax.multiply_adds

    def embed(self, tokens: Tensor, start: int | Tensor) -> Tensor:
        return self.dropout(self.scale * self.softmax.embed(tokens))

    def final(self, x: Tensor) -> Tensor:
        return self.dropout(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """(B, T, d) -> log-probabilities (B, T, V)."""
        return self.softmax.log_prob(hidden)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Negative log-probability of each target, (B, T) and (B, T) -> (B, T) float32 or wider, in nats.

        With cutoffs cheaper than `forward`: only the clusters that targets lie in are computed.
        """
        parts = self.hidden(tokens).flatten(0, 1), targets.flatten()
        (nll,) = in_chunks(lambda h, t: (self.softmax.nll(h[None], t[None])[0],), parts, self.loss_chunk)
        return nll.to(torch.promote_types(nll.dtype, torch.float32)).view_as(targets)

    def target_and_mean(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """As for every model. With cutoffs all clusters are computed, for which `loss` needs those of targets alone."""
        return target_and_mean_nats(self.hidden(tokens), targets, lambda h: self.logits(h[None])[0], self.loss_chunk)

"""The interface of a language model: logits, loss, and the same through caches."""

from abc import ABC
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.attention import Attention, Cache
from attnlab.models.token_loss import at_least_float32, in_chunks, nats


def linear_weights(module: nn.Module) -> int:
    """Multiply-adds of one position in the linear layers that are direct children."""
    return sum(child.weight.numel() for child in module.children() if isinstance(child, nn.Linear))


class Layered(nn.Module):
    """A model whose layers have mechanisms."""

    layers: nn.ModuleList

    @property
    def blocks(self) -> list[Any]:
        return list(self.layers)

    @property
    def attentions(self) -> list[Attention]:
        """The mechanism of each layer."""
        return [block.attention for block in self.blocks]


class LanguageModel(Layered, ABC):
    """Base of language models: `embed`, the blocks of `layers`, `final`, `logits`."""

    max_length: int  # positions of a window
    loss_chunk: int | None = None  # number of tokens whose logits `loss` computes at a time; None: all

    def embed(self, tokens: Tensor, start: int | Tensor) -> Tensor:
        """(B, T) -> (B, T, d), from position `start` on: an int, or (1,) of a static cache."""
        raise NotImplementedError

    def final(self, x: Tensor) -> Tensor:
        """Layers after the last block, (B, T, d) -> (B, T, d)."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., d) -> logits or log-probabilities (..., V)."""
        raise NotImplementedError

    @property
    def vocabulary_multiply_adds(self) -> int:
        """Multiply-adds of the logits of one position."""
        raise NotImplementedError

    @property
    def longest(self) -> int:
        """Maximum length of a text for the model and its mechanisms."""
        limits = [a.max_positions for a in self.attentions if a.max_positions is not None]
        return min([self.max_length, *limits])

    def hidden(self, tokens: Tensor) -> Tensor:
        """(B, T) -> (B, T, d), after `final`. ValueError: T is more than `max_length`."""
        if tokens.shape[1] > self.max_length:
            raise ValueError(f"{tokens.shape[1]} positions; the model has {self.max_length}")
        x, through = self.embed(tokens, 0), self.scored_through_caches
        for block in self.blocks:
            attend = block.attention
            if through:
                kind = tokens.device.type
                dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
                attend = partial(attend.extend, cache=attend.new_cache(*tokens.shape, dtype=dtype, device=x.device))
            x = block(x, attend)
        return self.final(x)

    @property
    def scored_through_caches(self) -> bool:
        """Whether `hidden` reads older positions from codes, so that scores have the error of `Attention.cache_bits`.

        Not in training, and where gradients are computed.
        """
        evaluated = not self.training and not torch.is_grad_enabled()
        return evaluated and any(attention.cache_bits for attention in self.attentions)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) -> logits (B, T, V). ValueError: T is more than `max_length`."""
        return self.logits(self.hidden(tokens))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Negative log-probability of each target in nats, (B, T) and (B, T) -> (B, T) float32 or wider."""
        (losses,) = self._in_chunks(lambda h, t: (self.nats(h, t),), tokens, targets)
        return losses

    def nats(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Negative log-probability of targets (n,) after `hidden` (n, d), (n,) float32 or wider."""
        return nats(self.logits(hidden), targets)

    def target_and_mean(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """`loss`, and the mean of -log p over all words for label smoothing, both (B, T) float32 or wider."""

        def of(h: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
            logp = at_least_float32(self.logits(h)).log_softmax(-1)
            return -logp.gather(-1, t.unsqueeze(-1)).squeeze(-1), -logp.mean(-1)

        target, mean = self._in_chunks(of, tokens, targets)
        return target, mean

    def _in_chunks(self, function: Callable[..., tuple[Tensor, ...]], tokens: Tensor, targets: Tensor) -> list[Tensor]:
        rows = self.hidden(tokens).flatten(0, 1), targets.flatten()
        return [values.view_as(targets) for values in in_chunks(function, rows, self.loss_chunk)]

    @torch.no_grad()
    def step(self, tokens: Tensor, caches: list[Cache]) -> Tensor:
        """Next tokens (B, n) -> logits (B, n, V), using and updating the caches."""
        return self.logits(self.continued(tokens, caches))

    @torch.no_grad()
    def continued(self, tokens: Tensor, caches: list[Cache]) -> Tensor:
        """`hidden` of the next tokens, (B, n) -> (B, n, d), using and updating the caches."""
        x = self.embed(tokens, caches[0].start)
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, partial(block.attention.extend, cache=cache))
        return self.final(x)

    def multiply_adds(self, context: int, prefix: int = 0) -> int:
        """Multiply-adds of one cached step of one row at `context` positions, including the output layer."""
        layers = sum(b.attention.multiply_adds(context, prefix) + linear_weights(b) for b in self.blocks)
        return layers + self.vocabulary_multiply_adds

    def cache_bytes(
        self, rows: int, capacity: int, prefix: int = 0, sentences: int | None = None, *, dtype: torch.dtype
    ) -> int:
        """Bytes of all caches for `rows` texts of `capacity` positions after `sentences` prefixes."""
        return sum(a.cache_bytes(rows, capacity, prefix, sentences, dtype=dtype) for a in self.attentions)

    def start(
        self,
        batch: int,
        capacity: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> list[Cache]:
        """Empty caches, one per layer, for `batch` rows of `capacity` positions."""
        return [a.new_cache(batch, capacity, dtype=dtype, device=device) for a in self.attentions]

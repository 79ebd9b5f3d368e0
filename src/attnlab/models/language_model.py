"""What a language model answers: logits, its own loss, and the same through caches."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from attnlab.attention import Attention, Cache


class LanguageModel(nn.Module, ABC):
    """Tokens -> the next ones. A model with an adaptive softmax has a `loss` that is cheaper than its logits."""

    max_length: int  # positions of a window

    @property
    @abstractmethod
    def attentions(self) -> list[Attention]:
        """One a layer."""

    @property
    def longest(self) -> int:
        """Positions that the model and its mechanisms can take."""
        limits = [a.max_positions for a in self.attentions if a.max_positions is not None]
        return min([self.max_length, *limits])

    @abstractmethod
    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) -> logits (B, T, V)."""

    @abstractmethod
    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Negative log-probability of each target in nats, (B, T) and (B, T) -> (B, T) float32."""

    @abstractmethod
    def step(self, tokens: Tensor, caches: list[Cache]) -> Tensor:
        """The next tokens (B, n) -> logits (B, n, V), through the caches."""

    @abstractmethod
    def multiply_adds(self, context: int, prefix: int = 0) -> int:
        """Of one cached decoding step of one row at `context` positions, vocabulary included."""

    def start(
        self,
        batch: int,
        capacity: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> list[Cache]:
        """Empty caches, one a layer, for `batch` rows of `capacity` positions."""
        return [a.new_cache(batch, capacity, dtype=dtype, device=device) for a in self.attentions]

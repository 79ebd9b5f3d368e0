"""The interface of a language model: logits, its own loss, and the same through caches."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from attnlab.attention import Attention, Cache
from attnlab.models.token_loss import target_and_mean_nats


class LanguageModel(nn.Module, ABC):
    """Tokens -> logits of the next ones; with an adaptive softmax, `loss` costs less than `forward`."""

    max_length: int  # positions of a window
    loss_chunk: int | None = None  # tokens whose logits exist at once in `loss`; None: all

    @property
    @abstractmethod
    def attentions(self) -> list[Attention]:
        """The mechanisms, one per layer."""

    @property
    def longest(self) -> int:
        """The longest text that the model and its mechanisms take."""
        limits = [a.max_positions for a in self.attentions if a.max_positions is not None]
        return min([self.max_length, *limits])

    @abstractmethod
    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) -> logits (B, T, V)."""

    @abstractmethod
    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Negative log-probability of each target in nats, (B, T) and (B, T) -> (B, T) float32."""

    def target_and_mean(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """`loss`, and the mean of -log p over all words, which label smoothing adds: (B, T) float32 or wider, both."""
        logits = self(tokens)
        return target_and_mean_nats(logits, targets, lambda x: x)

    @abstractmethod
    def step(self, tokens: Tensor, caches: list[Cache]) -> Tensor:
        """The next tokens (B, n) -> logits (B, n, V), through the caches."""

    @abstractmethod
    def multiply_adds(self, context: int, prefix: int = 0) -> int:
        """Of one cached step of one row at `context` positions, `prefix` of them a prefix's; vocabulary included."""

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

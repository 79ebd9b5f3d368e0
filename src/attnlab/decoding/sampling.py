"""Continuing text: greedily or by chance. Knows models only through `Continuable`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Protocol

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from attnlab.attention import Cache
from attnlab.config.bounds import bounded


class Continuable(Protocol):
    """A model that continues text through caches."""

    def start(
        self,
        batch: int,
        capacity: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> list[Cache]: ...

    def step(self, tokens: Tensor, caches: list[Cache]) -> Tensor: ...


@bounded
@dataclass(frozen=True)
class Sampling:
    """`tokens` new ones. Temperature 0 takes the most probable each time.

    top_k: only the k most probable; top_p: only the fewest that together have probability p (nucleus sampling), of
    those that top_k leaves. The same seed gives the same text.
    """

    tokens: Annotated[int, Ge(1)] = 64
    temperature: Annotated[float, Ge(0)] = 1.0
    top_k: Annotated[int, Ge(1)] | None = None
    top_p: Annotated[float, Gt(0), Le(1)] | None = None
    seed: int = 1

    @torch.inference_mode()
    def __call__(
        self,
        model: Continuable,
        prompt: Tensor,
        *,
        num_ids: int | None = None,
        end: int | None = None,
        stop: Callable[[Tensor], bool] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """(B, P), P >= 1 -> (B, tokens). `num_ids`: ids from there on are never chosen.

        `end`: a row that has come to it goes on with it; where all rows have, or `stop` says so of what there is, the
        result is shorter.
        """
        rows, size = prompt.shape
        caches = model.start(rows, size + self.tokens, dtype=dtype, device=prompt.device)
        generator = torch.Generator(prompt.device).manual_seed(self.seed)
        found: list[Tensor] = []
        new = prompt
        ended = torch.zeros(rows, dtype=torch.bool, device=prompt.device)
        for _ in range(self.tokens):
            token = self.choose(model.step(new, caches)[:, -1, :num_ids].float(), generator)
            if end is not None:
                token = torch.where(ended, end, token)
                ended |= token == end
            found.append(token)
            if (end is not None and ended.all()) or (stop is not None and stop(torch.stack(found, 1))):
                break
            new = token[:, None]
        return torch.stack(found, 1)

    def choose(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """(B, V) -> (B,)."""
        if self.temperature == 0:
            return logits.argmax(-1)
        p = self.probabilities(logits)
        return torch.multinomial(p, 1, generator=generator).squeeze(-1)

    def probabilities(self, logits: Tensor) -> Tensor:
        """What tokens are drawn with, (B, V); the temperature is not 0."""
        logits = logits / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        p = logits.softmax(-1)
        if self.top_p is not None:
            ordered, order = p.sort(descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered  # the first is always kept
            p = p.masked_fill(torch.zeros_like(p, dtype=torch.bool).scatter(-1, order, before >= self.top_p), 0.0)
            p = p / p.sum(-1, keepdim=True)
        return p

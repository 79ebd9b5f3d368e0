"""Continuing text, greedily or by sampling, with any model that is `Continuable`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from attnlab.attention import Cache
from attnlab.config.bounds import Size
from attnlab.decoding.beam import Compiler, Stepping, Steps

WAIT = {"cuda": 16}  # tokens between two looks whether all rows have ended; elsewhere one


class Continuable(Stepping, Protocol):
    """A model that continues text through caches."""

    def start(
        self, batch: int, capacity: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> list[Cache]: ...


@dataclass(frozen=True)
class Sampling:
    """Draws new tokens, one after another. The same seed gives the same text.

    Args:
        tokens: how many.
        temperature: divides the logits; 0 takes the most probable token each time.
        top_k: draw from the k most probable tokens only; None: from all.
        top_p: draw from the fewest tokens that together have probability p, of those that `top_k` leaves (nucleus
            sampling); None: from all.
        seed: of the random numbers.

    ValueError: a value is out of its bounds.
    """

    tokens: Size = 64
    temperature: Annotated[float, Ge(0)] = 1.0
    top_k: Size | None = None
    top_p: Annotated[float, Gt(0), Le(1)] | None = None
    seed: int = 1

    @torch.inference_mode()
    def __call__(
        self,
        model: Continuable,
        prompt: Tensor,
        *,
        num_ids: int | None = None,
        never: Sequence[int] = (),
        end: int | None = None,
        stop: Callable[[Tensor], bool] | None = None,
        dtype: torch.dtype | None = None,
        compiled: Compiler | None = None,
    ) -> Tensor:
        """Continue `prompt`.

        Args:
            prompt: (B, P), P >= 1.
            num_ids: ids from this one on are never chosen; None: all may be.
            never: ids that are never chosen.
            end: id after which a row repeats it; once all rows have, the result ends.
            stop: called with the tokens so far, (B, n); the result ends where it returns True.
            dtype: of the caches; None: that of the weights.
            compiled: gives the compiled form of the model's step, for a CPU (`Steps`); None: nothing is compiled.

        Returns:
            The new tokens, (B, n) with n at most `tokens`.
        """
        rows, size = prompt.shape
        caches = model.start(rows, size + self.tokens, dtype=dtype, device=prompt.device)
        generator = torch.Generator(prompt.device).manual_seed(self.seed)
        steps = Steps(model, caches, self.tokens - 1, compiled=compiled)
        barred = torch.tensor(never, dtype=torch.long, device=prompt.device)
        every = WAIT.get(prompt.device.type, 1)
        drawn: list[Tensor] = []
        ended = torch.zeros(rows, dtype=torch.bool, device=prompt.device)
        for count in range(1, self.tokens + 1):
            logits = steps(drawn[-1][:, None]) if drawn else model.step(prompt, caches)
            logits = logits[:, -1, :num_ids].float().index_fill(1, barred, float("-inf"))
            token = self.choose(logits, generator)
            if end is not None:
                token = torch.where(ended, end, token)
                ended |= token == end
            drawn.append(token)
            if end is not None and count % every == 0 and ended.all():
                break
            if stop is not None and stop(torch.stack(drawn, 1)):
                break
        tokens = torch.stack(drawn, 1)
        if end is not None and (all_ended := (tokens == end).all(0)).any():  # of the first such token
            tokens = tokens[:, : int(all_ended.int().argmax()) + 1]
        return tokens

    def choose(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """(B, V) -> (B,)."""
        if self.temperature == 0:
            return logits.argmax(-1)
        p = self.probabilities(logits)
        return torch.multinomial(p, 1, generator=generator).squeeze(-1)

    def probabilities(self, logits: Tensor) -> Tensor:
        """The probabilities that tokens are drawn with, (B, V) -> (B, V); the temperature is not 0."""
        logits = logits / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        p = logits.softmax(-1)
        if self.top_p is not None:
            ordered, order = p.sort(descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered  # the first always stays
            p = p.masked_fill(torch.zeros_like(p, dtype=torch.bool).scatter(-1, order, before >= self.top_p), 0.0)
            p = p / p.sum(-1, keepdim=True)
        return p

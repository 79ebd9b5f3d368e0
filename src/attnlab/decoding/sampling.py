"""Greedy decoding and sampling with any `Continuable` model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from attnlab.attention import Cache
from attnlab.config.bounds import Size
from attnlab.decoding.beam import Compiler, Stepping, Steps

WAIT = {"cuda": 16}  # tokens between checks whether all rows have ended, by device; others: 1


class Continuable(Stepping, Protocol):
    """A model that continues text through caches."""

    def start(
        self, batch: int, capacity: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> list[Cache]: ...


@dataclass(frozen=True)
class Sampling:
    """Autoregressive sampling. The same seed gives the same text.

    Args:
        tokens: maximum number of new tokens.
        temperature: divisor of the logits; 0 is greedy decoding.
        top_k: sample from the k most probable tokens; None: from all.
        top_p: sample from the smallest set of tokens with probability p, after `top_k` (nucleus sampling); None: from
            all.
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
        end: int | Sequence[int] | None = None,
        stop: Callable[[Tensor], bool] | None = None,
        dtype: torch.dtype | None = None,
        compiled: Compiler | None = None,
    ) -> Tensor:
        """Continue `prompt`.

        Args:
            prompt: (B, P), P >= 1.
            num_ids: number of ids that may be generated; None: all.
            never: further ids that are not generated.
            end: id, or any of several ids, that ends a row, which then repeats it. The result ends once all rows have
                ended.
            stop: called with the tokens so far, (B, n); the result ends when it returns True.
            dtype: dtype of the caches; None: that of the weights.
            compiled: returns the compiled form of the model's step on a CPU, see `Steps`; None: steps are not compiled.

        Returns:
            The new tokens, (B, n) with n at most `tokens`.
        """
        rows, size = prompt.shape
        caches = model.start(rows, size + self.tokens, dtype=dtype, device=prompt.device)
        generator = torch.Generator(prompt.device).manual_seed(self.seed)
        steps = Steps(model, caches, self.tokens - 1, compiled=compiled)
        ends = torch.tensor([end] if isinstance(end, int) else list(end or ()), dtype=torch.long, device=prompt.device)
        barred = torch.tensor(never, dtype=torch.long, device=prompt.device)
        every = WAIT.get(prompt.device.type, 1)
        drawn: list[Tensor] = []
        ended = torch.zeros(rows, dtype=torch.bool, device=prompt.device)
        for count in range(1, self.tokens + 1):
            logits = steps(drawn[-1][:, None]) if drawn else model.step(prompt, caches)
            logits = logits[:, -1, :num_ids].float().index_fill(1, barred, float("-inf"))
            token = self.choose(logits, generator)
            if len(ends):
                token = torch.where(ended, drawn[-1], token) if drawn else token
                ended |= torch.isin(token, ends)
            drawn.append(token)
            if len(ends) and count % every == 0 and ended.all():
                break
            if stop is not None and stop(torch.stack(drawn, 1)):
                break
        tokens = torch.stack(drawn, 1)
        if (all_ended := torch.isin(tokens, ends).all(0)).any():  # cut after the first such token
            tokens = tokens[:, : int(all_ended.int().argmax()) + 1]
        return tokens

    def choose(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """(B, V) -> (B,)."""
        if self.temperature == 0:
            return logits.argmax(-1)
        p = self.probabilities(logits)
        return torch.multinomial(p, 1, generator=generator).squeeze(-1)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Logits (B, V) -> sampling probabilities (B, V). The temperature is not 0."""
        logits = logits / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        p = logits.softmax(-1)
        if self.top_p is not None:
            ordered, order = p.sort(descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered  # 0 for the first token, which is always included
            p = p.masked_fill(torch.zeros_like(p, dtype=torch.bool).scatter(-1, order, before >= self.top_p), 0.0)
            p = p / p.sum(-1, keepdim=True)
        return p

"""Training of a converted decoder, with the original as its teacher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le, MinLen
from torch import Tensor
from torch.nn import functional as F

from attnlab.models.decoder import Decoder

Objective = Literal["layers", "logits", "text"]
DEFAULT: tuple[Objective, ...] = ("layers", "logits")

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Healing:
    """Training of a converted model, with the original as its teacher.

    These are the values of `task.train`, `task.optimizer` and `task.schedule` unless the command line sets them.

    Args:
        tokens: of an update; a multiple of `task.data.window`.
        objective: losses, one after the other. "layers": the squared error of each attention's output on the teacher's
            inputs, over the output's variance; "logits": the Kullback-Leibler divergence from the teacher's
            distribution; "text": the negative log-probability of the text, without a teacher.
        share: of the updates with the first of several objectives.
        trained: the weights of attention, or all.
        facts: share of the training windows with facts, as in the calibration texts: text alone brings the perplexity
            back and not the recall.
    """

    steps: Annotated[int, Ge(1)] = 250
    tokens: Annotated[int, Ge(1)] = 2048
    lr: Annotated[float, Gt(0)] = 1e-3
    warmup: Annotated[int, Ge(1)] = 20
    objective: Annotated[list[Objective], MinLen(1)] | None = None
    share: Annotated[float, Gt(0), Le(1)] = 0.5
    trained: Literal["attention", "all"] = "attention"
    facts: Annotated[float, Ge(0), Le(1)] = 0.5

    def freeze(self, model: Decoder) -> Decoder:
        """Leave only the weights that are trained, in place."""
        model.requires_grad_(self.trained == "all")
        for attention in model.attentions:
            attention.requires_grad_(True)
        return model

    def at(self, progress: float) -> Objective:
        """The objective of an update; `progress`: share of the finished updates, 0 to 1."""
        first, *others = self.objective or DEFAULT
        if not others or progress < self.share:
            return first
        rest = (progress - self.share) / max(1 - self.share, 1e-9)
        return others[min(int(rest * len(others)), len(others) - 1)]


class Teacher:
    """The original of a converted decoder, which is the student, with the losses of its training.

    Attributes:
        scales: variance of each layer's attention output on `tokens` (windows, positions), the same in all batches.
    """

    @torch.no_grad()
    def __init__(self, decoder: Decoder, tokens: Tensor) -> None:
        self.decoder, self.scales = decoder.requires_grad_(False).eval(), list[float]()
        x = decoder.embed(tokens, 0)
        for block in decoder.blocks:
            out = block.attention(block.attention_norm(x))
            self.scales.append(max(float(out.float().var((0, 1)).sum()), 1e-12))
            x = block(x, lambda _, out=out: out)

    def layer_errors(self, student: Decoder, tokens: Tensor, compiled: Wrapper) -> Tensor:
        """The mean over layers of the squared error of an attention's output, over its variance, (B, T); tokens (B, T).

        `compiled` compiles a method, or returns it.
        """
        with torch.no_grad():
            inputs, outputs = compiled(self._on(tokens.device).attention_pairs)(tokens)
        total = torch.zeros_like(tokens, dtype=torch.float32)
        attended = compiled(student.attended)(inputs)
        for output, target, scale in zip(attended, outputs, self.scales, strict=True):
            total = total + (output - target).float().square().sum(-1) / scale
        return total / len(outputs)

    def divergence(self, student: Decoder, tokens: Tensor, compiled: Wrapper) -> Tensor:
        """KL(teacher | student) of the next token, in nats, (B, T); tokens (B, T); `compiled` as in `layer_errors`."""
        with torch.no_grad():
            target = compiled(self._on(tokens.device).log_probabilities)(tokens)
        logp = compiled(student.log_probabilities)(tokens)
        return F.kl_div(logp, target, reduction="none", log_target=True).sum(-1)

    def _on(self, device: torch.device) -> Decoder:
        return self.decoder.to(device)  # it shares some parts with the student, which have been moved

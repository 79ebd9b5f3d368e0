"""The original decoder as the teacher of the converted one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnlab.models.decoder import Decoder

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


class Teacher:
    """Measures how far a converted decoder, the student, is from the original.

    The scales are those of one text for the whole training: a batch's own would depend on how many processes, or
    batches of one update, share it.

    Args:
        decoder: the original.
        tokens: a text of the training split, (windows, positions).

    Attributes:
        scales: of each layer, the variance of the output of the original's attention.
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
        """The mean over layers of the squared error of an attention's output, over its variance, (B, T).

        Args:
            student: the converted decoder.
            tokens: (B, T).
            compiled: compiles a method, or returns it.
        """
        with torch.no_grad():
            inputs, outputs = compiled(self._on(tokens.device).attention_pairs)(tokens)
        total = torch.zeros_like(tokens, dtype=torch.float32)
        attended = compiled(student.attended)(inputs)
        for output, target, scale in zip(attended, outputs, self.scales, strict=True):
            total = total + (output - target).float().square().sum(-1) / scale
        return total / len(outputs)

    def divergence(self, student: Decoder, tokens: Tensor, compiled: Wrapper) -> Tensor:
        """KL(teacher | student) of the next token, in nats, (B, T); tokens: (B, T); the others as in `layer_errors`."""
        with torch.no_grad():
            target = compiled(self._on(tokens.device).log_probabilities)(tokens)
        logp = compiled(student.log_probabilities)(tokens)
        return F.kl_div(logp, target, reduction="none", log_target=True).sum(-1)

    def _on(self, device: torch.device) -> Decoder:
        if next(self.decoder.parameters()).device != device:
            self.decoder.to(device)
        return self.decoder

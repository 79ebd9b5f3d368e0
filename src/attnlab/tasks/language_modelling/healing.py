"""Training of a converted decoder to do as the original did."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.nn import functional as F

from attnlab.conversion import Healing
from attnlab.data.text.windows import IGNORE, Window
from attnlab.models.decoder import Decoder
from attnlab.tasks.language_modelling.module import LanguageModelling
from attnlab.training.compilation import COMPILED_STEPS


class Healed(LanguageModelling):
    """Trains a converted decoder against its teacher; validation and test are those of any language model.

    Args:
        model: the converted decoder.
        vocabulary: of its tokens.
        healing: objectives, and which weights are trained.
        arguments: those of `LanguageModelling`.

    Attributes:
        teacher: the original in a list, so that it is no part of this module; empty until training begins.
        scales: of each layer, the variance of the output of the teacher's attention.
    """

    compiled_part = (
        "the model with its loss, and the attention or the probabilities that are compared with the teacher's, its own "
        f"too, in training, validation and perplexity; {COMPILED_STEPS}"
    )

    def __init__(self, model: Decoder, vocabulary: Any, *, healing: Healing, **arguments: Any) -> None:
        super().__init__(model, vocabulary, **arguments)
        self.healing = healing
        self.teacher: list[Decoder] = []
        self.scales: list[float] = []
        self._updates = 0.0  # of the whole training, known when it begins
        self.freeze()

    def configure_model(self) -> None:
        super().configure_model()
        if isinstance(self.model, FSDPModule):  # attention alone is called, of the model and of each layer
            assert isinstance(self.model, Decoder)
            for name in ("attended", "log_probabilities"):
                register_fsdp_forward_method(self.model, name)
            for block in self.model.blocks:
                register_fsdp_forward_method(block, "attend")

    @torch.no_grad()
    def teach(self, teacher: Decoder, tokens: Tensor) -> None:
        """Set the teacher, before training begins or continues.

        The scales are those of one text for the whole training: a batch's own would depend on how many processes, or
        batches of one update, share it.

        Args:
            teacher: the original.
            tokens: a text of the training split, (windows, positions).
        """
        self.teacher[:] = [teacher.requires_grad_(False).eval()]
        self.scales = []
        x = teacher.embed(tokens, 0)
        for block in teacher.blocks:
            out = block.attention(block.attention_norm(x))
            self.scales.append(max(float(out.float().var((0, 1)).sum()), 1e-12))
            x = block(x, lambda _, out=out: out)

    def on_train_start(self) -> None:
        super().on_train_start()
        self._updates = float(self.trainer.estimated_stepping_batches)

    def freeze(self) -> None:  # type: ignore[override]
        """Leave only the weights that `healing` trains, of the model as it is now."""
        assert isinstance(self.model, Decoder)
        whole = self.healing.trained == "all"
        for parameter in self.model.parameters():
            parameter.requires_grad_(whole)
        for attention in self.model.attentions:
            attention.requires_grad_(True)

    @property
    def progress(self) -> float:
        """Share of the updates that are done."""
        return min(1.0, self.global_step / self._updates) if self._updates > 0 else 0.0

    def losses(self, batch: Window) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """In training those of the present objective; the reported loss is then the objective too."""
        if not self.training:
            return super().losses(batch)
        objective = self.healing.at(self.progress)
        if objective == "text":
            return super().losses(batch)
        tokens, targets = batch
        real = targets != IGNORE
        each = self._layers(tokens) if objective == "layers" else self._logits(tokens)
        loss, count = each.where(real, 0.0).sum(), real.sum()
        return loss, loss.detach(), torch.zeros_like(count), count

    def _layers(self, tokens: Tensor) -> Tensor:
        """The mean over layers of the squared error of an attention's output, over its variance, (B, T)."""
        assert isinstance(self.model, Decoder)
        with torch.no_grad():
            inputs, outputs = self._compiled(self._teacher.attention_pairs)(tokens)
        found = torch.zeros_like(tokens, dtype=torch.float32)
        attended = self._compiled(self.model.attended)(inputs)
        for own, wanted, scale in zip(attended, outputs, self.scales, strict=True):
            found = found + (own - wanted).float().square().sum(-1) / scale
        return found / len(outputs)

    def _logits(self, tokens: Tensor) -> Tensor:
        """KL(teacher | student) of the next token, in nats, (B, T)."""
        assert isinstance(self.model, Decoder)
        with torch.no_grad():
            wanted = self._compiled(self._teacher.log_probabilities)(tokens)
        found = self._compiled(self.model.log_probabilities)(tokens)
        return F.kl_div(found, wanted, reduction="none", log_target=True).sum(-1)

    @property
    def _teacher(self) -> Decoder:
        (teacher,) = self.teacher
        if next(teacher.parameters()).device != self.device:
            teacher.to(self.device)
        return teacher.eval()

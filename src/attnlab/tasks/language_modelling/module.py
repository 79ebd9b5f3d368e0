"""The next token from those before it: one LightningModule for every language model."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from attnlab.callbacks.scoring import Scored
from attnlab.conversion import Healing
from attnlab.conversion.healing import Teacher
from attnlab.data.text.vocabulary import Vocabulary
from attnlab.data.text.windows import IGNORE, Window
from attnlab.models import Decoder, LanguageModel
from attnlab.training.compiled import COMPILED_STEPS, Compiled
from attnlab.training.module import Module


class LanguageModelling(Module):
    """Trains a model on the negative log-probability of each token.

    Args:
        compile: whether torch.compile compiles the loss, and on a CPU the steps of decoding.
        label_smoothing: e; the training loss is (1 - e) times -log p of the target plus e times the mean of -log p
            over all words (Szegedy et al., 2016).
    """

    counts_right = False
    called: ClassVar[tuple[str, ...]] = ("loss", "target_and_mean")
    compiled_steps_part = COMPILED_STEPS
    compiled_part = f"the model with its loss, in training, validation and perplexity; {COMPILED_STEPS}"

    def __init__(
        self,
        model: LanguageModel,
        vocabulary: Vocabulary,
        *,
        compile: bool = False,
        label_smoothing: float = 0.0,
        **training: Any,
    ) -> None:
        super().__init__(**training)
        self.model: LanguageModel = model
        self.vocabulary = vocabulary
        self.label_smoothing = label_smoothing
        self.compiled = Compiled(compile)

    def _nats(self, window: Window) -> tuple[Tensor, Tensor]:
        """(B, T) nats of each target, 0 at other places; (B, T) whether a target is there."""
        tokens, targets = window
        real = targets != IGNORE
        loss = self.model.loss if self.model.scored_through_caches else self.compiled(self.model.loss)
        return loss(tokens, targets.clamp(min=0)).where(real, 0.0), real

    def losses(self, batch: Window) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The count of right tokens is 0: an adaptive softmax has no logits."""
        if self.training and self.label_smoothing:
            tokens, targets = batch
            real = targets != IGNORE
            both = self.compiled(self.model.target_and_mean)(tokens, targets.clamp(min=0))
            target, mean = (nats.where(real, 0.0).sum() for nats in both)
            smoothed = (1 - self.label_smoothing) * target + self.label_smoothing * mean
            return smoothed, target.detach(), torch.zeros_like(real.sum()), real.sum()
        nats, real = self._nats(batch)
        loss, count = nats.sum(), real.sum()
        return loss, loss.detach(), torch.zeros_like(count), count

    def first_of(self, batch: Window) -> Callable[[], str]:
        tokens = batch[0][0, :8].clone()
        return lambda: repr(self.vocabulary.text(tokens.tolist()))

    def test_step(self, batch: Window, batch_idx: int, dataloader_idx: int = 0) -> Scored:  # type: ignore[override]
        nats, real = self._nats(batch)
        index = torch.tensor(self.indices(batch_idx, dataloader_idx))
        return Scored(index, {"nats": nats.double().sum(1), "counts": real.sum(1)})


class Healed(LanguageModelling):
    """Trains a converted decoder against its teacher; validation and test are those of any language model.

    Attributes:
        teacher: in a list, so that it is no part of this module; empty until training begins.
    """

    model: Decoder
    called = (*LanguageModelling.called, "attended", "log_probabilities")
    compiled_part = (
        "the model with its loss, and the attention or the probabilities that are compared with the teacher's, its own "
        f"too, in training, validation and perplexity; {COMPILED_STEPS}"
    )

    def __init__(self, model: Decoder, vocabulary: Vocabulary, *, healing: Healing, **arguments: Any) -> None:
        super().__init__(healing.freeze(model), vocabulary, **arguments)
        self.healing = healing
        self.teacher: list[Teacher] = []
        self._updates = 0.0  # of the complete training, known when it begins

    def configure_model(self) -> None:
        super().configure_model()
        for block in self.model.blocks if isinstance(self.model, FSDPModule) else ():
            register_fsdp_forward_method(block, "attend")

    def on_train_start(self) -> None:
        super().on_train_start()
        self._updates = float(self.trainer.estimated_stepping_batches)

    def losses(self, batch: Window) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """In training the sums of the present objective, which is then also the reported loss."""
        progress = min(1.0, self.global_step / self._updates) if self._updates > 0 else 0.0
        objective = self.healing.at(progress) if self.training else "text"
        if objective == "text":
            return super().losses(batch)
        (teacher,) = self.teacher
        measure = teacher.layer_errors if objective == "layers" else teacher.divergence
        tokens, targets = batch
        real = targets != IGNORE
        loss, count = measure(self.model, tokens, self.compiled).where(real, 0.0).sum(), real.sum()
        return loss, loss.detach(), torch.zeros_like(count), count

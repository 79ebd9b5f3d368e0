"""Image classification with timm's losses, Mixup, averaged weights, optimisers and schedules."""

from collections.abc import Callable
from typing import Any, Literal

import attnlab.torchvision_schemas  # noqa: F401  (before lightning and timm)

import numpy as np
import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from timm.data import Mixup
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn import functional as F

from attnlab.callbacks.cost import now
from attnlab.callbacks.scoring import Scored
from attnlab.compression.decompositions.fusion import fusion_penalty
from attnlab.compression.modules.attention import SlimAttention
from attnlab.models.token_loss import at_least_float32
from attnlab.training.module import Module

Trained = Literal["all", "head"]


class ImageClassification(Module):
    """Trains a vision transformer by DeiT's recipe without its distillation token.

    Args:
        classes: their names, in the order of the logits (B, C) that `model` gives of images (B, 3, H, W).
        label_smoothing: of the cross-entropy, in [0, 1); not used with `mixup`, which smooths labels itself.
        ema_decay: the decay of the averaged weights, which are then validated, saved and scored; 0: no averaging.
        ema_warmup: increase the decay over the first updates, as timm's `ModelEmaV3` does.
        trained: "all" weights, or those of the classifier alone: "head".
        fusion_penalty: the weight of the penalty on CP SlimAtt's fusion matrices (IrrAtt, eq. 7); 0: none.
        training: arguments of `Module`, with timm's `create_optimizer_v2` and `create_scheduler_v2`.
    """

    compiled_part = "the model that is trained; not its averaged copy"

    def __init__(
        self,
        model: nn.Module,
        classes: list[str],
        *,
        label_smoothing: float = 0.1,
        mixup: Mixup | None = None,
        ema_decay: float = 0.0,
        ema_warmup: bool = False,
        trained: Trained = "all",
        fusion_penalty: float = 0.0,
        channels_last: bool = False,
        compile: bool = False,
        **training: Any,
    ) -> None:
        super().__init__(**training)
        self.classes = classes
        self.model, self.mixup, self.penalty, self.channels_last = model, mixup, fusion_penalty, channels_last
        self.criterion = SoftTargetCrossEntropy() if mixup else LabelSmoothingCrossEntropy(label_smoothing)
        self.ema_decay, self.ema_warmup, self.trained = ema_decay, ema_warmup, trained
        self._ema: list[ModelEmaV3] = []  # in a list: no part of the module's weights
        self._updates, self._compile = 0, compile

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, 3, H, W) to logits (B, C), by the averaged weights in evaluation if there are any."""
        return (self._ema[0].module if self._ema and not self.training else self.model)(images)

    def losses(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sums over a batch of images (B, 3, H, W) and classes (B,): training loss, loss, right images, images."""
        images, labels = batch
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        count = torch.full((), float(len(labels)), device=labels.device)  # from a tensor of the host it would wait
        if not self.training:
            logits = at_least_float32(self(images))
            plain = F.cross_entropy(logits, labels, reduction="sum")
            return plain, plain, (logits.argmax(-1) == labels).sum(), count
        targets = labels
        if self.mixup:
            if len(images) % 2:  # timm's pairs need an even batch
                images, targets = torch.cat([images, images[:1]]), torch.cat([labels, labels[:1]])
            images, targets = self.mixup(images, targets)
        logits = at_least_float32(self.model(images))
        loss = self.criterion(logits, targets) * count
        right = (logits[: len(labels)].argmax(-1) == labels).sum()
        if self.penalty:
            fusions = [m.fusion for m in self.model.modules() if isinstance(m, SlimAttention)]
            loss = loss + self.penalty * count * torch.stack([fusion_penalty(f.float()) for f in fusions]).sum()
        return loss, loss.detach(), right, count

    def first_of(self, batch: tuple[Tensor, Tensor]) -> Callable[[], str]:
        label = batch[1][0].clone()
        return lambda: f"class {int(label)}"

    @torch.no_grad()
    def test_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Scored:  # type: ignore[override]
        """Logits of a batch of images with their classes and indices, and the time of the model alone."""
        images, labels, index = batch
        began = now(images.device)
        logits = self(images)
        seconds = now(images.device) - began
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        columns = (index.tolist(), labels.tolist(), logits.float().argmax(-1).tolist())
        rows = [
            (str(i), data.sets["val"].filename(i), data.classes[label], data.classes[guess])
            for i, label, guess in zip(*columns, strict=True)
        ]
        return Scored(index, {"logits": logits, "labels": labels}, rows, seconds, len(labels))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        update = batch_idx // self.trainer.accumulate_grad_batches
        np.random.seed(hash((self.seed, self.current_epoch, update, 0)) % 2**32)  # of Mixup

    def configure_model(self) -> None:
        if self.trained == "head":  # after a compression, whose modules are new, and before DDP looks for gradients
            head_alone(self.model)
        super().configure_model()

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        make: Any = self._optimizer
        optimizer = make(self.model, **self.fused(make))  # not its parameters: timm leaves biases and norms undecayed
        per_epoch = max(1, int(self.trainer.estimated_stepping_batches) // max(1, self.trainer.max_epochs or 1))
        make_schedule: Any = self._schedule
        schedule, _ = make_schedule(optimizer, updates_per_epoch=per_epoch, step_on_epochs=False)
        scheduler: Any = Schedule(schedule)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step_update(self.global_step)

    def on_fit_start(self) -> None:
        if self.ema_decay and not self._ema:
            self._begin_average()
        for ema in self._ema:
            ema.to(self.device)
        if self._compile:
            self.model.compile()

    def _begin_average(self) -> None:
        self._ema = [ModelEmaV3(self.model, decay=self.ema_decay, use_warmup=self.ema_warmup)]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if self._ema and self.global_step > self._updates:
            self._updates = self.global_step
            self._ema[0].update(self.model, step=self._updates)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the scored weights as `state_dict`, and the trained ones, where these differ, as `trained`."""
        super().on_save_checkpoint(checkpoint)
        if self._ema:
            checkpoint["trained"] = checkpoint["state_dict"]
            averaged = self._ema[0].module.state_dict()
            checkpoint["state_dict"] = {f"model.{name}": value.clone() for name, value in averaged.items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if "trained" in checkpoint and self.ema_decay:
            self._begin_average()
            averaged = {name.removeprefix("model."): value for name, value in checkpoint["state_dict"].items()}
            self._ema[0].module.load_state_dict(averaged)
            checkpoint["state_dict"] = checkpoint["trained"]
        self._updates = checkpoint["global_step"]

    def forget_average(self) -> None:
        """Score `model` from now on: it has the averaged weights."""
        self._ema = []


def head_alone(model: Any) -> nn.Module:
    """Freeze a timm model but for its classifier, which is returned."""
    model.requires_grad_(False)
    classifier: nn.Module = model.get_classifier()
    return classifier.requires_grad_(True)


class Schedule:
    """A timm schedule, counted in updates, as a Lightning scheduler.

    It has no state: a resumed run continues at its update with the configured schedule.
    """

    def __init__(self, schedule: Any) -> None:
        self.optimizer, self.step_update = schedule.optimizer, schedule.step_update

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing: the schedule has no state."""

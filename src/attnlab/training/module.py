"""What every LightningModule here shares: gradients per item of a whole update, seeds, errors that say where."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

import torch
from lightning import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import Optimizer

from attnlab.errors import TrainingError
from attnlab.training.batch_norm import RunningStatistics, statistics_kept


def at_least_float32(x: Tensor) -> Tensor:
    """`x`, in float32 if it has a lower precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Module(LightningModule):
    """Trains `model` on sums over items (target tokens, images).

    Gradients are those of the loss per item over the whole update: all accumulated batches, all processes.  `loss` in
    the curves is that loss.  Dropout is a function of (seed, epoch, batch, rank), so that a resumed run continues as if
    it had not stopped.  `identity` is stored in checkpoints and must match when one is loaded: mechanism, vocabulary.
    """

    model: nn.Module

    def __init__(
        self,
        *,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        schedule: Callable[..., torch.optim.lr_scheduler.LRScheduler],
        identity: dict[str, Any],
        seed: int,
        clip: float = 0.0,
    ) -> None:
        super().__init__()
        self.identity = identity
        self._optimizer, self._schedule = optimizer, schedule
        self.seed, self.clip = seed, clip
        self.tokens_seen = 0
        self.last_loss = float("nan")
        self._sums = torch.zeros(3)  # of the update so far: training loss, reported loss, items
        self._statistics: RunningStatistics | None = None

    @abstractmethod
    def losses(self, batch: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sums over the batch: training loss, the loss as it is reported, right items, items."""

    @abstractmethod
    def first_of(self, batch: Any) -> str:
        """Names a batch in an error: its first item."""

    def counts(self, batch: Any) -> bool:
        """Whether a batch counts; False: it only keeps a process busy while others have more to do."""
        return True

    def configure_model(self) -> None:
        """Under hardware=fsdp: shard each layer, then the rest, over the processes."""
        if self.device_mesh is None or isinstance(self.model, FSDPModule):
            return
        mesh = init_device_mesh(self.device_mesh.device_type, (self.trainer.world_size,))  # Lightning's has two axes
        for module in [*self.model.modules()]:
            layers = getattr(module, "layers", None)
            for layer in layers if isinstance(layers, nn.ModuleList) else ():
                fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = self._optimizer(self.parameters())
        total = self.trainer.estimated_stepping_batches
        schedule = self._schedule(optimizer, total_steps=int(total) if math.isfinite(total) else None)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(hash((self.seed, self.current_epoch, batch_idx, self.global_rank)) % 2**63)
        if batch_idx % self.trainer.accumulate_grad_batches == 0:
            self._sums = torch.zeros(3, device=self.device)
            self._statistics = self._statistics or RunningStatistics(self.model)
            self._statistics.begin_update()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.counts(batch):
            with statistics_kept(self.model):
                return 0.0 * self.losses(batch)[0]
        loss, plain, _, count = self.losses(batch)
        if not torch.isfinite(loss):
            where = f", batch {batch_idx} (first: {self.first_of(batch)})"
            raise TrainingError(self._stop(f"the loss became {loss.item()}", where))
        self._sums = self._sums + torch.stack([loss.detach(), plain.detach(), count.to(loss)])
        if self._statistics is not None:
            self._statistics.add_batch()
        return loss

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        sums = self.trainer.strategy.reduce(self._sums, reduce_op="sum")
        _, plain, items = sums.tolist()
        self.log("loss", sums[0] / sums[2], prog_bar=True)
        self.tokens_seen += int(items)
        self.last_loss = plain / items
        if self._statistics is not None:
            self._statistics.end_update()
        # Lightning divided by the batches accumulated, and DDP by the processes.
        factor = self.trainer.accumulate_grad_batches * self.trainer.world_size / items
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        torch._foreach_mul_(grads, factor)

    def configure_gradient_clipping(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        norm = nn.utils.clip_grad_norm_(self.parameters(), self.clip if self.clip > 0 else float("inf"))
        if not torch.isfinite(norm):
            raise TrainingError(self._stop(f"the gradient's norm became {norm.item()}", ""))

    def _stop(self, what: str, where: str) -> str:
        return (
            f"{what} at update {self.global_step + 1}, epoch {self.current_epoch}{where}; "
            "the checkpoints of the last validation are kept. Try a smaller task.optimizer.lr"
        )

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        _, plain, right, count = self.losses(batch)
        tokens = int(count)
        where: dict[str, Any] = {"on_epoch": True, "sync_dist": True, "prog_bar": True, "batch_size": tokens}
        self.log("val_loss", plain / count, **where)
        self.log("val_accuracy", right / count, **where)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["identity"] = self.identity
        checkpoint["batches_per_update"] = self.trainer.accumulate_grad_batches

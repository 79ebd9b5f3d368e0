"""The base of all LightningModules: gradients per item of an update, seeds, errors that say where."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

import torch
from lightning import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from attnlab.callbacks.scoring import over_processes
from attnlab.errors import TrainingError
from attnlab.training.batch_norm import RunningStatistics, frozen_statistics

TIMM_FUSED = ("adam", "adamw")  # optimizers of torch that timm makes by these names


@dataclass
class Pending:
    """Losses of batches and sums of updates that lie on the device and that the host has not read yet.

    batches: update, its epoch, the batch and a function that names its first item.
    losses: () of each batch.
    updates: update and its epoch.
    sums: (4,) of each update: training loss, reported loss and items of all processes; the gradient's norm.
    """

    batches: list[tuple[int, int, int, Callable[[], str]]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    updates: list[tuple[int, int]] = field(default_factory=list)
    sums: list[Tensor] = field(default_factory=list)


class Module(LightningModule):
    """Trains `model` on sums over items (target tokens, images).

    Gradients are those of the loss per item over the update: all accumulated batches, all processes.  `loss` in
    the curves is that loss, the mean over the updates since the last point.  Dropout is a function of (seed, epoch,
    batch, rank), so that a resumed run continues as if it had not stopped.

    Losses and norms stay on the device; the host reads them together once in `log_every` updates, and before a
    checkpoint is saved.  A NaN is then an error that names it, and no checkpoint has it.

    Args:
        schedule: makes the schedule of an optimizer; `total_steps` is the number of updates, None if unknown.
        identity: stored in checkpoints; must match when one is loaded: mechanism, vocabulary.
        clip: the largest norm of the gradient; 0: not clipped.

    Attributes:
        pending: what the host has not read yet.
        decoded_validation: what the record says of the items that each validation decodes; None: it decodes none.
    """

    model: nn.Module
    decoded_validation: dict[str, Any] | None = None
    compiled_part: str = ""  # what torch.compile compiles with `hardware.compile`
    compiled_steps_part: ClassVar[str] = ""  # what of that there is where nothing is trained or scored
    counts_right: ClassVar[bool] = True  # whether `losses` gives the number of right items
    called: ClassVar[tuple[str, ...]] = ()  # the methods of `model` that are called besides `forward`

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
        self.tokens_seen = 0  # of all processes; up to date after `read_pending`
        self.last_loss = math.nan  # of the last update, per item, without smoothing; likewise
        self.mean_loss = math.nan  # the last point of the curve
        self._sums = torch.zeros(3)  # of the update so far: training loss, reported loss, items
        self.pending = Pending()
        self._curve = [0.0, 0.0]  # training loss and items of the updates since the last point
        self._tallies: dict[bool, dict[str, Tensor]] = {True: {}, False: {}}  # by `training`: total and count by name
        self._statistics: RunningStatistics | None = None

    @abstractmethod
    def losses(self, batch: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sums over the batch: training loss, the loss as it is reported, right items, items."""

    @abstractmethod
    def first_of(self, batch: Any) -> Callable[[], str]:
        """A function that names the batch in an error, by its first item.  Only calling it may wait for the device."""

    def counts(self, batch: Any) -> bool:
        """Whether a batch counts; False: it only keeps a process busy while others have more to do."""
        return True

    def configure_model(self) -> None:
        """With hardware=fsdp: shard each layer, then the rest, over the processes."""
        if self.device_mesh is None or isinstance(self.model, FSDPModule):
            return
        if not isinstance(self.trainer.strategy, ModelParallelStrategy):
            return  # rank zero scores alone; the mesh is that of the training
        mesh = init_device_mesh(self.device_mesh.device_type, (self.trainer.world_size,))  # Lightning's has two axes
        for module in [*self.model.modules()]:
            layers = getattr(module, "layers", None)
            for layer in layers if isinstance(layers, nn.ModuleList) else ():
                fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        for name in self.called:  # otherwise parameters are gathered around calls of forward alone
            register_fsdp_forward_method(self.model, name)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = self._optimizer(self.parameters(), **self.fused(self._optimizer))
        total = self.trainer.estimated_stepping_batches
        schedule = self._schedule(optimizer, total_steps=int(total) if math.isfinite(total) else None)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def fused(self, make: Any) -> dict[str, bool]:
        """The argument `fused` on CUDA, if the partial `make` of the optimizer has it and leaves it open.

        Never with scaled losses (16-mixed): a fused step takes the scale off after the gradients were clipped.
        """
        keywords = getattr(make, "keywords", {})
        open_ = ("fused" in keywords or keywords.get("opt") in TIMM_FUSED) and keywords.get("fused") is None
        on_cuda = self.trainer.strategy.root_device.type == "cuda"
        if self._scales:
            return {"fused": False} if "fused" in keywords else {}
        return {"fused": True} if open_ and on_cuda else {}

    # --- training -----------------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(hash((self.seed, self.current_epoch, batch_idx, self.global_rank)) % 2**63)
        if batch_idx % self.trainer.accumulate_grad_batches == 0:
            dtype = torch.promote_types(next(self.parameters()).dtype, torch.float32)
            self._sums = torch.zeros(3, dtype=dtype, device=self.device)  # on a rank whose batches do not count, too
            if self.trainer.world_size > 1:
                self._statistics = self._statistics or RunningStatistics(self.model)
                self._statistics.begin_update()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.counts(batch):
            with frozen_statistics(self.model):
                return 0.0 * self.losses(batch)[0]
        loss, plain, _, count = self.losses(batch)
        place = self.global_step + 1, self.current_epoch, batch_idx
        self.pending.batches.append((*place, self.first_of(batch)))
        self.pending.losses.append(loss.detach())
        self._sums = self._sums + torch.stack([loss.detach(), plain.detach(), count.to(loss)]).to(self._sums)
        if self._statistics is not None:
            self._statistics.add_batch()
        return loss

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self._sums = self.trainer.strategy.reduce(self._sums, reduce_op="sum")
        if self._statistics is not None:
            self._statistics.end_update()
        # Lightning divided by the batches accumulated, and DDP by the processes.
        factor = self.trainer.accumulate_grad_batches * self.trainer.world_size / self._sums[2]
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        torch._foreach_mul_([g.to_local() if isinstance(g, DTensor) else g for g in grads], factor)

    def configure_gradient_clipping(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        norm = nn.utils.clip_grad_norm_(self.parameters(), self.clip if self.clip > 0 else float("inf"))
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        self.pending.updates.append((self.global_step + 1, self.current_epoch))
        self.pending.sums.append(torch.cat([self._sums, norm.to(self._sums).reshape(1)]))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        log_every: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]  # of a mixin
        if self.pending.updates and self.global_step % log_every == 0:
            self._log_point()

    def on_train_end(self) -> None:
        self.read_pending()

    def tally(self, name: str, total: Tensor, count: Tensor | int) -> None:
        """Add `total` () and `count` to a ratio, logged after a validation or at the next point of the curve.

        Every process must tally the same names.
        """
        wide = torch.float32 if self.device.type == "mps" else torch.float64
        of = count.to(wide) if isinstance(count, Tensor) else torch.full((), count, dtype=wide, device=self.device)
        pair = torch.stack([total.detach().to(wide), of])
        tallies = self._tallies[self.training]
        tallies[name] = tallies[name].to(pair) + pair if name in tallies else pair

    def read_pending(self) -> None:
        """Read the losses and norms of every batch since the last call. TrainingError: one is NaN or infinite."""
        self._read([])

    def _log_point(self) -> None:
        """A point of the curves: ratios over all updates since the last point and over all processes."""
        tallies, self._tallies[True] = self._tallies[True], {}
        values = self._read([self.trainer.strategy.reduce(pair, reduce_op="sum") for pair in tallies.values()])
        (loss, items), self._curve = self._curve, [0.0, 0.0]
        self.mean_loss = loss / items
        ratios = {name: total / count for name, (total, count) in zip(tallies, values, strict=True) if count}
        self.log("loss", self.mean_loss, logger=False)
        for logger in self.trainer.loggers:  # not by `self.log`, which would wait for the device for each value
            step = self.trainer.fit_loop.epoch_loop._batches_that_stepped
            logger.log_metrics({"loss": self.mean_loss, **ratios, "epoch": self.current_epoch}, step=step)

    def _read(self, others: list[Tensor]) -> list[list[float]]:
        """`read_pending`, and the values of `others`, pairs of numbers, in the same read."""
        pending, self.pending = self.pending, Pending()
        parts = [*(loss.reshape(1) for loss in pending.losses), *pending.sums, *others]
        values = torch.cat([part.to(self.device) for part in parts]).tolist() if parts else []
        losses, rest = values[: len(pending.losses)], values[len(pending.losses) :]
        sums = [rest[i : i + 4] for i in range(0, 4 * len(pending.sums), 4)]
        norms = [] if self._scales else [norm for *_, norm in sums]
        if not all(map(math.isfinite, (*losses, *norms))):
            self._refuse(pending, losses, norms)
        for loss, plain, items, _ in sums:
            self._curve = [self._curve[0] + loss, self._curve[1] + items]
            self.tokens_seen += int(items)
            self.last_loss = plain / items
        tail = rest[4 * len(sums) :]
        return [tail[i : i + 2] for i in range(0, len(tail), 2)]

    @property
    def _scales(self) -> bool:
        """Whether losses are scaled (16-mixed): an update whose gradients overflow is left out."""
        return getattr(self.trainer.precision_plugin, "scaler", None) is not None

    @staticmethod
    def _refuse(pending: Pending, losses: list[float], norms: list[float]) -> None:
        """Raise TrainingError for the first loss or norm that is not finite."""
        problems: list[tuple[int, int, str, Callable[[], str] | None]] = [
            (update, 0, f"the loss became {loss} at update {update}, epoch {epoch + 1}, batch {batch + 1}", first)
            for (update, epoch, batch, first), loss in zip(pending.batches, losses, strict=True)
            if not math.isfinite(loss)
        ]
        problems += [
            (update, 1, f"the gradient's norm became {norm} at update {update}, epoch {epoch + 1}", None)
            for (update, epoch), norm in zip(pending.updates, norms, strict=bool(norms))
            if not math.isfinite(norm)
        ]
        _, _, what, name = min(problems, key=lambda problem: problem[:2])
        raise TrainingError(
            f"{what}{f' (first: {name()})' if name else ''}; the checkpoints of the last validation are kept. "
            "Try a smaller task.optimizer.lr"
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.read_pending()  # no checkpoint holds a NaN
        checkpoint["identity"] = self.identity
        checkpoint["batches_per_update"] = self.trainer.accumulate_grad_batches
        gathered: Any = self.all_gather(self._tallies[True])
        tallies = {name: pairs.reshape(-1, 2) for name, pairs in gathered.items()}  # (processes, 2)
        checkpoint["curve"] = {"last_loss": self.last_loss, "sums": self._curve, "tallies": tallies}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue the curve: its next point is the mean of updates before and after the checkpoint."""
        if (curve := checkpoint.get("curve")) is None:  # an older one lacks it
            return
        self.last_loss, self._curve = curve["last_loss"], curve["sums"]
        rank, world = self.trainer.global_rank, self.trainer.world_size
        for name, pairs in curve["tallies"].items():
            if len(pairs) == world:
                self._tallies[True][name] = pairs[rank]
            else:
                self._tallies[True][name] = pairs.sum(0) if rank == 0 else torch.zeros_like(pairs[0])

    def indices(self, batch_idx: int, dataloader_idx: int = 0) -> list[int]:
        """The corpus indices of a validation or test batch, from the sampler that dealt it."""
        loaders: Any = self.trainer.test_dataloaders if self.trainer.testing else self.trainer.val_dataloaders
        loader = loaders[dataloader_idx] if isinstance(loaders, list) else loaders
        return list(loader.batch_sampler[batch_idx])

    # --- validation ---------------------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        self._tallies[False] = {}
        self._repeats = 0
        if isinstance(self.model, FSDPModule):
            count = sum(self.trainer.num_val_batches)
            self._repeats = int(over_processes(self.trainer, count, "max") - count)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._last_batch = batch
        _, plain, right, count = self.losses(batch)
        self.tally("val_loss", plain, count)
        if self.counts_right:
            self.tally("val_accuracy", right, count)

    def on_validation_epoch_end(self) -> None:
        tallies, self._tallies[False] = self._tallies[False], {}
        for _ in range(self._repeats):  # a process with more batches needs the parts of the model that this one has
            self.losses(self._last_batch)
        for name, pair in tallies.items():
            total, count = self.trainer.strategy.reduce(pair, reduce_op="sum")
            self.log(name, total / count, prog_bar=True, sync_dist=True)
        self._last_batch = None

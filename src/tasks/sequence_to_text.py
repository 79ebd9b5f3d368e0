"""Sequence in, text out: one LightningModule for speech translation, recognition and what else has this shape."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import src.torchvision_schemas  # noqa: F401  (before lightning)

import torch
from lightning import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from src.data.batch import Batch
from src.data.tokenizer import Tokenizer
from src.decoding import BeamSearch, Decodable, Hypothesis
from src.errors import TrainingError
from src.models import SpeechToText


class SequenceToText(LightningModule):
    """Trains a model with label-smoothed cross-entropy on the text and, on request, CTC on the encoder's output.

    Gradients are those of the loss per target token over the whole update: all accumulated batches, all processes.
    Dropout is a function of (seed, epoch, batch, rank), so that a resumed run goes on as if it had not stopped.
    `identity` is stored in checkpoints and must match when one is loaded: mechanism, vocabulary.
    """

    def __init__(
        self,
        model: SpeechToText,
        tokenizer: Tokenizer,
        *,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        schedule: Callable[..., torch.optim.lr_scheduler.LRScheduler],
        identity: dict[str, Any],
        seed: int,
        label_smoothing: float = 0.0,
        ctc_weight: float = 0.0,
        clip: float = 0.0,
    ) -> None:
        super().__init__()
        if ctc_weight and model.ctc is None:
            raise ValueError("ctc_weight is set, but the model has no CTC head")
        self.model, self.tokenizer, self.identity = model, tokenizer, identity
        self._optimizer, self._schedule = optimizer, schedule
        self.seed, self.ctc_weight, self.clip = seed, ctc_weight, clip
        # Published smoothing spreads eps over the V - 1 other tokens, torch's over all V.
        self.smoothing = label_smoothing * tokenizer.size / (tokenizer.size - 1)
        self.tokens_in_update = 0.0
        self.tokens_seen = 0
        self.last_loss = float("nan")

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = self._optimizer(self.parameters())
        total = self.trainer.estimated_stepping_batches
        schedule = self._schedule(optimizer, total_steps=int(total) if math.isfinite(total) else None)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sums over the batch: training loss, cross-entropy without smoothing, right tokens, tokens."""
        tokens = torch.cat((torch.full_like(batch.targets[:, :1], Tokenizer.eos), batch.targets[:, :-1]), 1)
        logits, encoded, lengths = self.model(batch.features, batch.feature_lengths, tokens)
        flat, target = logits.flatten(0, 1).float(), batch.targets.flatten()
        loss = F.cross_entropy(
            flat,
            target,
            ignore_index=Tokenizer.pad,
            reduction="sum",
            label_smoothing=self.smoothing if self.training else 0,
        )
        with torch.no_grad():
            real = target != Tokenizer.pad
            plain = (
                loss
                if not self.training
                else F.cross_entropy(flat, target, ignore_index=Tokenizer.pad, reduction="sum")
            )
            right = ((flat.argmax(-1) == target) & real).sum()
        if self.ctc_weight and self.training:
            assert self.model.ctc is not None and batch.ctc_targets is not None and batch.ctc_target_lengths is not None
            logp = self.model.ctc(encoded).float().log_softmax(-1).transpose(0, 1)
            ctc = F.ctc_loss(
                logp,
                batch.ctc_targets,
                lengths,
                batch.ctc_target_lengths,
                blank=Tokenizer.bos,
                reduction="sum",
                zero_infinity=True,
            )
            self.log("ctc_loss", ctc.detach() / batch.ctc_target_lengths.sum(), batch_size=len(batch.ids))
            loss = loss + self.ctc_weight * ctc
        return loss, plain, right, real.sum()

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        torch.manual_seed(hash((self.seed, self.current_epoch, batch_idx, self.global_rank)) % 2**63)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss, plain, _, count = self.losses(batch)
        if not torch.isfinite(loss):
            where = f", batch {batch_idx} (first: {batch.ids[0]})"
            raise TrainingError(self._stop(f"the loss became {loss.item()}", where))
        tokens = int(count)
        self.tokens_in_update += tokens
        self.tokens_seen += tokens
        self.last_loss = plain.item() / tokens
        self.log("loss", loss.detach() / count, prog_bar=True, batch_size=tokens)
        return loss

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        total = torch.tensor(self.tokens_in_update, device=self.device)
        total = self.trainer.strategy.reduce(total, reduce_op="sum")
        # Lightning divided by the batches accumulated, and DDP by the processes.
        factor = self.trainer.accumulate_grad_batches * self.trainer.world_size / float(total)
        self.tokens_in_update = 0.0
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

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        _, plain, right, count = self.losses(batch)
        tokens = int(count)
        where: dict[str, Any] = {"on_epoch": True, "sync_dist": True, "prog_bar": True, "batch_size": tokens}
        self.log("val_loss", plain / count, **where)
        self.log("val_accuracy", right / count, **where)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["identity"] = self.identity

    @torch.inference_mode()
    def decode(
        self, batch: Batch, search: BeamSearch, dtype: torch.dtype | None = None, decoder: Decodable | None = None
    ) -> list[list[Hypothesis]]:
        """The search's hypotheses of each utterance, best first; caches in `dtype`."""
        prompt, lengths = self.model.encoder(batch.features, batch.feature_lengths)
        return search(
            decoder or self.model.decoder,
            prompt,
            lengths,
            bos=Tokenizer.eos,
            eos=Tokenizer.eos,
            pad=Tokenizer.pad,
            dtype=dtype,
        )

    def text(self, hypotheses: list[Hypothesis]) -> str:
        """The best hypothesis, detokenised; empty where the search ended none."""
        return self.tokenizer.decode([t for t in hypotheses[0].tokens if t != Tokenizer.eos]) if hypotheses else ""

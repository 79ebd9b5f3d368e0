"""mode=train: fit, average the best checkpoints, then decode and score the test set."""

import copy
import logging
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

import lightning as L
from lightning.pytorch.callbacks import Callback, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from omegaconf import DictConfig
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from attnlab.callbacks.checkpoints import AtomicCheckpointIO, BestAndLast
from attnlab.callbacks.progress import progress
from attnlab.callbacks.signals import KeepSignals
from attnlab.data.base import TaskData
from attnlab.errors import DataError
from attnlab.report.curves import plot_curves
from attnlab.runs.record import NOT_RUN, first_process
from attnlab.tasks.base import flow_of
from attnlab.training.checkpoints import average, check_identity, load_into, read_checkpoint, write_weights

log = logging.getLogger(__name__)


def run(cfg: DictConfig, record: dict[str, Any], directory: Path) -> None:
    flow = flow_of(cfg)
    last = directory / "checkpoints" / "last.ckpt"
    resume = last if cfg.resume and last.is_file() else None
    if cfg.resume and resume is None:
        raise DataError(f"{last}: nothing to resume; resume= takes the directory of a run that saved a checkpoint")
    if last.is_file() and not cfg.resume and first_process():
        raise DataError(f"{last}: an earlier run's; resume={directory} continues it, another hydra.run.dir begins anew")
    flow.check(directory)
    L.seed_everything(cfg.seed, workers=True, verbose=False)
    data, module = flow.prepare(record, None)
    if resume:
        check_identity(resume, read_checkpoint(resume)[1], module.identity)
    else:
        flow.before_fit(record, directory, data, module)
    best = BestAndLast(
        directory / "checkpoints",
        filename=f"step{{step:06d}}-{flow.monitor}{{{flow.monitor}:.4f}}",
        auto_insert_metric_name=False,
        monitor=flow.monitor,
        mode=flow.better,
        save_top_k=cfg.task.train.keep_best,
        enable_version_counter=False,
    )
    whole = copy.deepcopy(module.model) if cfg.hardware.strategy == "fsdp" else module.model
    trainer = build_trainer(cfg, directory, [best, LearningRateMonitor(), Resume(data), *progress()])
    began = time.perf_counter()
    trainer.fit(module, datamodule=data, ckpt_path=resume, weights_only=True)
    seconds = time.perf_counter() - began
    if whole is not module.model:  # no process could decode alone with the part that it has
        weights = get_model_state_dict(module.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if trainer.is_global_zero:  # the others have no room to give away
            whole.load_state_dict(weights)
            module.model = whole.to(module.device)
    if not trainer.is_global_zero:
        return
    record["training"] = {
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "seconds": round(seconds, 1),
        "resumed": resume is not None,  # then seconds and speed are those of the last part alone
        "tokens_per_second": round(module.tokens_seen / seconds, 1),
        "final_loss": round(module.last_loss, 4),
        f"best_{flow.monitor}": round(float(best.best_model_score), 4) if best.best_model_score else NOT_RUN,
        "left_out": dict(data.filtered),
    }
    paths = [path for path in map(Path, best.best_k_models) if path.is_file()]
    averaged = directory / "checkpoints" / "averaged.safetensors"
    if paths:
        load_into(module.model, averaged, average(paths))
        log.info("averaged %d checkpoints into %s", len(paths), averaged)
    else:
        log.warning("training ended before the first validation: the last weights are used as they are")
    write_weights(averaged, module.model.state_dict(), module.identity)
    record["training"]["averaged_checkpoints"] = len(paths)
    plot_curves(directory)
    flow.score(record, directory, data, module)


def build_trainer(cfg: DictConfig, directory: Path, callbacks: list[Callback]) -> L.Trainer:
    train, hardware = cfg.task.train, cfg.hardware
    return L.Trainer(
        accelerator=hardware.accelerator,
        devices=hardware.devices,
        num_nodes=hardware.num_nodes,
        strategy=ModelParallelStrategy(save_distributed_checkpoint=False)
        if hardware.strategy == "fsdp"
        else hardware.strategy,
        precision=hardware.precision,
        max_steps=train.max_steps,
        max_epochs=train.max_epochs or -1,
        max_time=timedelta(minutes=train.max_minutes) if train.max_minutes else None,
        accumulate_grad_batches=train.accumulate,
        val_check_interval=train.validate_every * train.accumulate if train.validate_every else 1.0,
        check_val_every_n_epoch=None if train.validate_every else train.validate_every_epochs,
        log_every_n_steps=train.log_every,
        num_sanity_val_steps=0,
        reload_dataloaders_every_n_epochs=1,
        use_distributed_sampler=False,
        plugins=[AtomicCheckpointIO()],
        default_root_dir=directory,
        logger=CSVLogger(directory, name="", version=curves(directory)),
        callbacks=[KeepSignals(), *callbacks],
        enable_model_summary=False,
        enable_progress_bar=sys.stdout.isatty(),
    )


def curves(directory: Path) -> str:
    """Where this part of the run writes its curves: a resumed run leaves the earlier ones as they are."""
    parts = len(list(directory.glob("curves*")))
    return "curves" if parts == 0 else f"curves-{parts + 1}"


class Resume(Callback):
    """Begins the data of a resumed epoch where the checkpoint left it."""

    def __init__(self, data: TaskData) -> None:
        self.data = data

    def on_load_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        if not progress["is_last_batch"]:
            self.data.resume_at = checkpoint["epoch"], progress["current"]["completed"]

"""Fitting a module with Lightning's Trainer: checkpoints, curves, the averaged weights."""

import copy
import logging
import math
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

import lightning as L
import torch
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, Timer
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig
from torch import distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from attnlab.callbacks.cost import Memory, TrainingSpeed
from attnlab.callbacks.progress import bar, progress
from attnlab.callbacks.scoring import contributions
from attnlab.config.batch import configured_processes, counted
from attnlab.config.build import instantiate, leaves, written
from attnlab.config.compose import one_line
from attnlab.data.base import Data
from attnlab.errors import ConfigError
from attnlab.pretrained.weights import average, fill, write_weights
from attnlab.run.device import scoring_dtype
from attnlab.run.processes import in_submitit
from attnlab.run.record import NOT_RUN, first_process
from attnlab.training.batch_norm import share_statistics
from attnlab.training.checkpoints import AtomicCheckpointIO, BestAndLast, EndAfterUpdate, KeepSignals, Resume
from attnlab.training.gradient_checkpointing import checkpoint_layers
from attnlab.training.module import Module

log = logging.getLogger(__name__)

TEST_ARGUMENTS = ("detect_anomaly", "deterministic", "benchmark")  # of `trainer`, also in a test
SECTIONS = ("quality", "inference", "training", "parameters", "kv_cache")  # of the record: a logger gets their numbers
_opened: dict[Path, list[Logger]] = {}  # by run directory, so that scores go where the curves went
PROFILERS: dict[Any, Any] = {"simple": SimpleProfiler, "advanced": AdvancedProfiler, "pytorch": PyTorchProfiler}


def fit(
    cfg: DictConfig,
    directory: Path,
    data: Data,
    module: Module,
    *,
    monitor: str,
    better: Literal["min", "max"],
    resume: Path | None,
) -> dict[str, Any]:
    """Train `module`, and give its model the average of the best checkpoints.

    Args:
        directory: the run directory; gets checkpoints/ and curves/.
        module: afterwards its model has the averaged weights, under hardware=fsdp on rank zero alone.
        monitor: the validation metric by which checkpoints are chosen.
        resume: the checkpoint to continue.

    Returns the record's `training` section.
    """
    processes = process_count(cfg)
    accumulate = data.batches_per_update(processes)
    share_statistics(module.model, data, processes)
    best = BestAndLast(
        directory / "checkpoints",
        filename=f"step{{step:06d}}-{monitor}{{{monitor}:.4f}}",
        auto_insert_metric_name=False,
        monitor=monitor,
        mode=better,
        save_top_k=cfg.task.train.keep_best,
        enable_version_counter=False,
    )
    unit, resumed = "images" if "images" in cfg.task.train.batch else "tokens", Resume(data)
    configured = configured_callbacks(cfg, monitor, better)
    callbacks = [best, resumed, Memory(), TrainingSpeed(unit), *configured, *progress()]
    if in_submitit() or SLURMEnvironment.detect():
        callbacks.append(EndAfterUpdate(best))
    if not any(isinstance(callback, LearningRateMonitor) for callback in configured):
        callbacks.append(LearningRateMonitor())
    trainer = build_trainer(cfg, directory, callbacks, processes, accumulate, loggers=open_loggers(cfg, directory))
    if cfg.hardware.gradient_checkpointing:
        checkpoint_layers(module.model)
    per_update = f"{counted(accumulate, 'batch')} per update{' of each process' if processes > 1 else ''}"
    log.info("%s, %s", per_update, counted(processes, "process"))
    if isinstance(trainer.strategy, ModelParallelStrategy):
        _fit_sharded(trainer, module, data, resume)
    else:
        trainer.fit(module, datamodule=data, ckpt_path=resume, weights_only=True)
    idle = resume is not None and trainer.global_step == resumed.begun  # the run had ended while it was scored
    epochs, stopped = _epochs(trainer, idle), _stopped_by(trainer, cfg) if trainer.should_stop else None
    if stopped:
        log.info("stopped: %s (%s, %g epochs)", stopped, counted(trainer.global_step, "update"), epochs)
    elif trainer.current_epoch == cfg.task.train.max_epochs and trainer.global_step < cfg.task.train.max_steps:
        ended = f"task.train.max_epochs={cfg.task.train.max_epochs} ended training after {trainer.global_step} updates"
        log.info("%s, before task.train.max_steps=%d", ended, cfg.task.train.max_steps)
    paths = [path for path in map(Path, best.best_k_models) if path.is_file()]
    _average(trainer, module, paths, directory / "checkpoints" / "averaged.safetensors")
    return {
        "steps": trainer.global_step,
        "epochs": epochs,
        **({"stopped_by": stopped} if stopped else {}),
        "resumed": resume is not None,  # then seconds and speed are those of the last part alone
        "final_loss": round(module.last_loss, 4) if math.isfinite(module.last_loss) else NOT_RUN,
        f"best_{monitor}": round(float(best.best_model_score), 4) if best.best_model_score is not None else NOT_RUN,
        **({"decoded_validation": module.decoded_validation} if module.decoded_validation else {}),
        "averaged_checkpoints": len(paths),
        "tokens_per_second": NOT_RUN,  # of images: images_per_second
        **contributions(callbacks)["training"],
        **(dict.fromkeys(("seconds", f"{unit}_per_second"), NOT_RUN) if idle else {}),
    }


def _fit_sharded(trainer: L.Trainer, module: Module, data: Data, resume: Path | None) -> None:
    """Train with hardware=fsdp; rank zero then has the model with all its weights."""
    model = copy.deepcopy(module.model)
    trainer.fit(module, datamodule=data, ckpt_path=resume, weights_only=True)
    weights = get_model_state_dict(module.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if trainer.is_global_zero:  # the other ranks may lack the memory
        model.load_state_dict(weights)
        module.model = model.to(module.device)


def _average(trainer: L.Trainer, module: Module, paths: list[Path], averaged: Path) -> None:
    """Give the model the mean of the checkpoints `paths`, and write it to `averaged`. Without any it stays as it is."""
    if trainer.is_global_zero:
        if paths:
            fill(module.model, averaged, average(paths))
            several = len(paths) > 1
            action = f"averaged {counted(len(paths), 'checkpoint')}" if several else "kept the best checkpoint"
            log.info("%s: %s", action, averaged)
        else:
            log.warning("training ended before the first validation: the last weights are used as they are")
        write_weights(averaged, module.model.state_dict(), module.identity)
    if trainer.world_size > 1 and not isinstance(trainer.strategy, ModelParallelStrategy):
        for value in module.model.state_dict().values():
            sent = value.to(trainer.strategy.root_device)
            distributed.broadcast(sent, 0)
            value.copy_(sent)


def _epochs(trainer: L.Trainer, idle: bool) -> int | float:
    """Epochs of the training, with a fraction of the last one. `idle`: nothing was left to train."""
    done, size = trainer.fit_loop.epoch_loop.batch_progress.current.completed, trainer.num_training_batches
    if not 0 < done < size or trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
        return trainer.current_epoch
    return round(trainer.current_epoch - (not idle) + done / size, 2)


def _stopped_by(trainer: L.Trainer, cfg: DictConfig) -> str | None:
    """The reason for the end of a training before its updates or epochs were done, or None."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # of a mixin
    for callback in callbacks:
        if isinstance(callback, EarlyStopping) and callback.stopping_reason != EarlyStoppingReason.NOT_STOPPED:
            return f"early stopping ({callback.stopping_reason.name.lower().replace('_', ' ')})"
        if isinstance(callback, Timer) and (callback.time_remaining() or 0) <= 0:
            return f"task.train.max_minutes={cfg.task.train.max_minutes:g}"
    return None


def test(cfg: DictConfig, data: Data, module: Module, callbacks: list[Callback]) -> bool:
    """Score the test set with `trainer.test`, spread over all processes; return whether this process took part.

    Under hardware=fsdp rank zero scores alone: each step of a sharded model gathers parameters on all processes, which
    therefore could not decode different sentences.  Scores are computed in float32, or in bfloat16 where the run's
    precision is one of bfloat16's.
    """
    alone = cfg.hardware.strategy == "fsdp"
    if alone and distributed.is_initialized():  # else Lightning would wait for the processes that do not score
        distributed.destroy_process_group()
    if alone and not first_process():
        return False
    hardware = cfg.hardware
    trainer = L.Trainer(
        accelerator=hardware.accelerator,
        devices=1 if alone else hardware.devices,
        num_nodes=1 if alone else hardware.num_nodes,
        strategy="auto" if alone else _strategy(hardware.strategy, process_count(cfg)),
        precision="bf16-mixed" if scoring_dtype(hardware.precision) else "32-true",
        plugins=cluster_environment(),
        use_distributed_sampler=False,
        logger=False,
        callbacks=[KeepSignals(), *callbacks, *bar()],
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=sys.stderr.isatty(),
        **{name: value for name, value in cfg.trainer.items() if name in TEST_ARGUMENTS},
    )
    trainer.test(module, datamodule=data, verbose=False)
    return True


def process_count(cfg: DictConfig) -> int:
    """The number of processes that Lightning starts; with hardware.devices=auto one for each GPU, or one on the CPU."""
    configured = configured_processes(cfg)
    if configured is not None:
        return configured
    cuda = cfg.hardware.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    return (torch.cuda.device_count() if cuda else 1) * int(cfg.hardware.num_nodes)


def _strategy(name: str, processes: int) -> Strategy | str:
    if name == "fsdp":
        return ModelParallelStrategy(save_distributed_checkpoint=False)
    if processes == 1 or name not in ("auto", "ddp", "ddp_find_unused_parameters_true"):
        return name
    # BatchNorm's running statistics are shared at the end of an update instead
    return DDPStrategy(broadcast_buffers=False, find_unused_parameters=name == "ddp_find_unused_parameters_true")


def cluster_environment() -> list[Any]:
    """The ClusterEnvironment of a run on a cluster, as a plugin of the Trainer; empty: Lightning chooses it.

    In a task of submitit this process starts the others of its node. Where SLURM itself started all processes, nothing
    queues the job again: Lightning's way of doing so knows neither the record nor the checkpoints of the run.
    """
    if in_submitit():
        return [LightningEnvironment()]
    if SLURMEnvironment.detect() and not TorchElasticEnvironment.detect():
        return [SLURMEnvironment(auto_requeue=False)]
    return []


def build_trainer(
    cfg: DictConfig,
    directory: Path,
    callbacks: list[Callback],
    processes: int,
    accumulate: int,
    *,
    enable_checkpointing: bool = True,
    loggers: Sequence[Logger] = (),
) -> L.Trainer:
    """Lightning's Trainer for `cfg.task.train` and `cfg.hardware`.

    Args:
        directory: the run directory; gets curves/.

    Raises:
        ConfigError: Lightning refuses the values of `trainer`.
    """
    train, hardware = cfg.task.train, cfg.hardware
    parts = len(list(directory.glob("curves*")))  # a resumed run leaves the earlier curves as they are
    curves = CSVLogger(directory, name="", version=f"curves-{parts + 1}" if parts else "curves")
    arguments: dict[str, Any] = {
        "accelerator": hardware.accelerator,
        "devices": hardware.devices,
        "num_nodes": hardware.num_nodes,
        "strategy": _strategy(hardware.strategy, processes),
        "precision": hardware.precision,
        "max_steps": train.max_steps,
        "max_epochs": train.max_epochs or -1,
        "max_time": timedelta(minutes=train.max_minutes) if train.max_minutes else None,
        "accumulate_grad_batches": accumulate,
        "val_check_interval": train.validate_every * accumulate if train.validate_every else 1.0,
        "check_val_every_n_epoch": None if train.validate_every else train.validate_every_epochs,
        "log_every_n_steps": train.log_every,
        "num_sanity_val_steps": 0,
        "reload_dataloaders_every_n_epochs": 1,
        "use_distributed_sampler": False,
        "plugins": [AtomicCheckpointIO(), *cluster_environment()],
        "default_root_dir": directory,
        "logger": [curves, *loggers],
        "callbacks": [KeepSignals(), *callbacks],
        "enable_checkpointing": enable_checkpointing,
        "enable_model_summary": False,
        "enable_progress_bar": sys.stderr.isatty(),
    }
    arguments |= instantiate(cfg.trainer, path="trainer")
    if (profiler := arguments.get("profiler")) in PROFILERS:
        arguments["profiler"] = PROFILERS[profiler](dirpath=directory, filename="profile")
    try:
        return L.Trainer(**arguments)
    except (MisconfigurationException, TypeError, ValueError) as error:
        if not cfg.trainer:
            raise
        overrides = ", ".join(f"trainer.{name}={value}" for name, value in cfg.trainer.items())
        raise ConfigError(f"{overrides}: Lightning's Trainer refuses it ({one_line(error)})") from error


def configured_callbacks(cfg: DictConfig, monitor: str, better: Literal["min", "max"]) -> list[Callback]:
    """The callbacks of the node `callbacks`; those that watch a metric get the task's unless they name another."""
    callbacks = []
    for name, node in cfg.callbacks.items():
        made = instantiate(node, path=f"callbacks.{name}")
        if not isinstance(made, Callback):  # a partial, which lacks what the task knows
            known = {"monitor": monitor, "mode": better}
            made = made(**{key: value for key, value in known.items() if key not in node})
        callbacks.append(made)
    return callbacks


# --- loggers besides the record and the curves -------------------------------------------------------------------


def open_loggers(cfg: DictConfig, directory: Path) -> list[Logger]:
    """The loggers of the node `logger`; each run directory's are made once, and get the configuration then.

    Raises:
        ConfigError: a logger cannot start: a service that is not reached, or that wants a login.
    """
    if directory in _opened:
        return _opened[directory]
    return _opened.setdefault(directory, [_open_logger(cfg, str(name), directory) for name in cfg.logger])


def _open_logger(cfg: DictConfig, name: str, directory: Path) -> Logger:
    node = cfg.logger[name]
    if name == "mlflow":  # it takes every folder there for an experiment
        directory = (directory / "mlflow").absolute()
        if not node.tracking_uri:  # MLflow 3.17, for one, opens a store of files only where this is set
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    try:
        logger: Logger = instantiate(node, path=f"logger.{name}", save_dir=str(directory))
        if first_process():
            logger.log_hyperparams(dict(leaves(written(cfg))))
    except ConfigError:
        raise
    except Exception as error:  # of services: login, network, their own checks
        hint = "; logger.wandb.offline=true needs no login" if name == "wandb" else ""
        raise ConfigError(f"logger={name}: {type(error).__name__}: {one_line(error)}{hint}") from error
    return logger


def close_loggers(cfg: DictConfig, record: Mapping[str, Any], directory: Path) -> None:
    """Log the final numbers of a finished run, and end its loggers.

    A service that fails now fails no run: the log names it, and the record has every number.
    """
    numbers = {
        f"final/{path.replace('.', '/')}": value
        for section in SECTIONS
        for path, value in leaves(record[section], section)
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    steps = record["training"]["steps"]
    try:
        for logger in open_loggers(cfg, directory):
            logger.log_metrics(numbers, step=steps if isinstance(steps, int) else 0)
            logger.finalize("success")
            if type(logger).__name__ == "WandbLogger":
                getattr(logger, "experiment").finish()  # noqa: B009  (the base class does not declare it)
    except Exception as error:  # of services: network, disk, their own checks
        log.warning("logger=%s: the final numbers were not logged (%s)", ",".join(cfg.logger), one_line(error))
    finally:
        _opened.pop(directory, None)

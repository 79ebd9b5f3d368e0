"""Training a vision transformer from scratch, where there are no pretrained weights to compress."""

import logging
import time
from pathlib import Path
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before lightning and timm)

from omegaconf import DictConfig, OmegaConf
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2

from attnlab.callbacks.progress import progress
from attnlab.config.batch import counted
from attnlab.data.images.folder import ImageData
from attnlab.pretrained.weights import fill
from attnlab.run.cache import Damaged, digest, opened, read_tensors, stored, write_tensors
from attnlab.run.identity import canonical
from attnlab.tasks.image_classification.module import ImageClassification
from attnlab.training.trainer import build_trainer, process_count

log = logging.getLogger(__name__)

LIMIT = "task.pretrain.epochs"  # the key that says how long; task.train.* is the fine-tuning's


def pretrain(
    cfg: DictConfig, record: dict[str, Any], directory: Path, data: ImageData, module: ImageClassification
) -> None:
    """Give a module's model weights that were trained from scratch with the run's images.

    They are stored in the cache directory: the same settings and images train once. The limits of `task.train` are
    those of the fine-tuning. `record` gets `pretraining`: seconds and epochs, or the file that was read.
    """
    path = Path(cfg.cache_dir).expanduser() / "pretrained" / key(cfg, data, module)
    try:
        fill(module.model, path, opened(path, read_tensors)[0])
        record["pretraining"] = {"stored": str(path)}
        log.info("model= is not set: the dense model that an earlier run trained from scratch is read from %s", path)
        return
    except Damaged:
        pass
    settings = cfg.task.pretrain
    trial = any(isinstance(cfg.trainer.get(key), int) for key in ("limit_train_batches", "overfit_batches"))
    epochs = 1 if trial else int(settings.epochs)  # a trial, as debug=fast, is short
    log.info(
        "model= is not set: %s is first trained from scratch, %s; %s=%d is shorter; later runs read it",
        *(cfg.task.model.name, counted(epochs, "epoch"), LIMIT, max(1, epochs // 6)),
    )
    scratch = ImageClassification(
        module.model,
        module.classes,
        optimizer=lambda m: create_optimizer_v2(m, "adamw", lr=settings.lr, weight_decay=settings.weight_decay),
        schedule=lambda o, **k: create_scheduler_v2(
            o,
            num_epochs=epochs,
            warmup_epochs=settings.warmup_epochs,
            warmup_lr=settings.lr / 100,
            min_lr=settings.lr / 100,
            **k,
        ),
        identity={},
        seed=cfg.seed,
        label_smoothing=0.1,
    )
    processes = process_count(cfg)
    trainer = build_trainer(
        without_validation(cfg, epochs),
        directory / "pretraining",
        progress(),
        processes,
        data.batches_per_update(processes),
        enable_checkpointing=False,
    )
    began = time.perf_counter()
    trainer.fit(scratch, datamodule=data)
    if trainer.interrupted:
        raise KeyboardInterrupt
    record["pretraining"] = {"seconds": round(time.perf_counter() - began, 1), "epochs": epochs}
    module.model.cpu()
    if trainer.is_global_zero:
        stored(path, read_tensors, lambda folder: write_tensors(folder, module.model.state_dict()))


def without_validation(cfg: DictConfig, epochs: int) -> DictConfig:
    """A copy of the configuration with the length of the pretraining and without validation."""
    length = {"max_steps": -1, "max_epochs": epochs, "max_minutes": None}
    never = {"validate_every": None, "validate_every_epochs": epochs + 1}
    return OmegaConf.merge(cfg, {"task": {"train": length | never}})  # type: ignore[return-value]


def key(cfg: DictConfig, data: ImageData, module: ImageClassification) -> str:
    """24 hexadecimal digits: a hash of everything that the pretrained weights depend on."""
    node: Any = OmegaConf.to_container(cfg.task, resolve=True)
    names = [data.sets["train"].filename(i) for i in range(len(data.sets["train"]))]
    settings = {
        "data": {key: value for key, value in node["data"].items() if key != "cache_dir"},
        "pretrain": node["pretrain"],
        "model": module.identity["model"],
        "seed": cfg.seed,
        "precision": cfg.hardware.precision,
    }
    if trainer := canonical(cfg, {}).get("trainer"):
        settings["trainer"] = trainer
    return digest([settings, names])[:24]

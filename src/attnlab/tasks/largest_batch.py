"""hardware.find_batch=true: the largest batch of one process, searched once for a device, a model and a precision.

An update stays as it is: `task.train.batch` says what it sees, and how many batches are accumulated follows.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock
from omegaconf import DictConfig, OmegaConf, open_dict

from attnlab.config.batch import configured_processes
from attnlab.errors import ConfigError
from attnlab.run.cache import digest
from attnlab.run.device import device_of
from attnlab.run.files import write_text
from attnlab.run.identity import architecture
from attnlab.run.record import first_process

if TYPE_CHECKING:
    from attnlab.tasks.base import Task

log = logging.getLogger(__name__)

VERSION = 1
HARDWARE = ("precision", "gradient_checkpointing", "loss_chunk", "find_batch_gib")  # what the size depends on
DATA = ("window", "max_input_frames", "max_target_tokens", "image_size", "vocab_size", "ctc_vocab_size")
LEAST = 1
SAFE = 0.95  # share of what the device has free: a long training leaves gaps


def with_largest_batch(task: Task, record: dict[str, Any]) -> DictConfig:
    """The configuration of a task with the largest batch that fits its device.

    The first process of a machine searches and stores what it finds in the cache directory; others, and later runs,
    read it.

    Args:
        task: with its configuration.
        record: gets `found_batch`.

    Raises:
        ConfigError: not even the smallest batch fits, the task trains nothing, or on the CPU no memory is given.
    """
    cfg, device = task.cfg, device_of(task.cfg)
    gib = cfg.hardware.find_batch_gib
    if not task.batch_key:
        raise ConfigError(f"hardware.find_batch=true: task={cfg.task.name} trains nothing; leave it out")
    if device.type != "cuda" and gib is None:
        raise ConfigError("hardware.find_batch=true: there is no GPU here; give hardware.find_batch_gib=<GiB>")
    path = Path(cfg.cache_dir).expanduser() / "batches" / f"{_key(cfg, device)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        stored = _read(path)
        size = _search(task, device) if stored is None else stored
        if stored is None:
            write_text(path, json.dumps({"device": _device(device), "batch": size}) + "\n")
    if first_process():
        where = "searched now" if stored is None else f"found before, {path}"
        log.info("task.data.%s=%d: the largest batch that fits (%s)", task.batch_key, size, where)
    record["found_batch"] = {"key": f"task.data.{task.batch_key}", "size": size}
    changed = cfg.copy()
    OmegaConf.set_readonly(changed, False)
    with open_dict(changed):
        changed.task.data[task.batch_key] = size
    OmegaConf.set_readonly(changed, True)
    return changed


def _search(task: Task, device: torch.device) -> int:
    from attnlab.training.batch_finder import describe, largest, step_fits
    from attnlab.training.gradient_checkpointing import checkpoint_layers

    cfg, gib = task.cfg, task.cfg.hardware.find_batch_gib
    limit = int(SAFE * torch.cuda.mem_get_info(device)[0]) if gib is None else int(gib * 2**30)
    extra = task.copies() + ((configured_processes(cfg) or max(1, torch.cuda.device_count())) > 1)
    least, most = _range(task)

    def build() -> Any:
        model = task.build()
        if cfg.hardware.gradient_checkpointing:
            checkpoint_layers(model)
        return model

    def fits(size: int) -> bool:
        good = step_fits(
            build,
            lambda model: task.rehearsal(model, size, device),
            task.optimizer_of,
            device,
            precision=cfg.hardware.precision,
            extra=extra,
            limit=limit,
        )
        if first_process():
            log.info("%s", describe(size, good, limit))
        return good

    found = largest(fits, least, most)
    if found is None:
        raise ConfigError(
            f"hardware.find_batch=true: not even task.data.{task.batch_key}={least} fits; take a smaller model, "
            "hardware.gradient_checkpointing=true, or hardware.precision=bf16-mixed"
        )
    return found


def _range(task: Task) -> tuple[int, int]:
    """The smallest batch that the data can have, and the largest that is of use: all of an update of one process."""
    data, update = task.cfg.task.data, task.cfg.task.train.batch
    processes = configured_processes(task.cfg) or max(1, torch.cuda.device_count())
    if "tokens" in update:
        return LEAST, max(LEAST, update.tokens // data.window // processes)
    if "sequences" in update:
        return LEAST, max(LEAST, update.sequences // processes)
    if "images" in update:
        mixed = 2 * LEAST  # images are mixed in pairs
        return mixed, max(mixed, update.images // processes)
    longest = max(data.max_input_frames, data.max_target_tokens)
    whole = int(update.bucket)
    return (min(whole, longest + 1), whole) if update.split else (whole, whole)


def _key(cfg: DictConfig, device: torch.device) -> str:
    data = {name: cfg.task.data.get(name) for name in DATA}
    hardware = {name: cfg.hardware[name] for name in HARDWARE}
    optimizer, update = OmegaConf.to_container(cfg.task.optimizer), OmegaConf.to_container(cfg.task.train.batch)
    about = [VERSION, _device(device), architecture(cfg), data, hardware, optimizer, update, configured_processes(cfg)]
    return digest(about)[:24]


def _device(device: torch.device) -> str:
    if device.type != "cuda":
        return "cpu"
    about = torch.cuda.get_device_properties(device)
    return f"{about.name}, {about.total_memory >> 20} MiB"


def _read(path: Path) -> int | None:
    """A stored size; None: there is none, or the file is damaged and is written again."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["batch"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return found if isinstance(found, int) and found > 0 else None

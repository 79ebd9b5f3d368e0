"""mode=train: fit, average the best checkpoints, then score the test set."""

import shutil
from pathlib import Path
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

import lightning as L
from omegaconf import DictConfig

from attnlab.config.batch import check_batch
from attnlab.config.build import at
from attnlab.errors import ConfigError
from attnlab.pretrained.weights import check_identity, check_values, read_checkpoint, trained
from attnlab.run import record as records
from attnlab.run.files import replacing_summed, verify
from attnlab.run.record import first_process
from attnlab.tasks.base import Trains, task_of
from attnlab.training.module import Module
from attnlab.training.trainer import fit, open_loggers, process_count

READS_CORPUS = True  # the files of data_root are checked before a library is loaded


def run(cfg: DictConfig, record: dict[str, Any], directory: Path) -> None:
    """Fill the record's `training`, then what the task's `score` gives.

    A run that continues another with a higher limit names it in the record as `parent`.
    """
    task = task_of(cfg, Trains)
    resume = Path(cfg.resume) / "checkpoints" / "last.ckpt" if cfg.resume else None
    task.check(directory)
    task.check_monitors()
    old = resume.parents[1] if resume else directory
    if resume and (continued := old.resolve() != directory.resolve()):
        check_limits(cfg, resume)
    check_batch(cfg, process_count(cfg))
    open_loggers(cfg, directory)  # before the data: a service may refuse
    L.seed_everything(cfg.seed, workers=True, verbose=False)
    data, module = task.prepare(record, None)
    task.check_steps(module.model)
    if first_process():
        task.save_files(directory, data)
    if resume:
        check_resumed(resume, module)
        if continued:
            record["parent"] = {"path": str(old), "run": at(records.recorded(old), "identity.run", records.NOT_RUN)}
            for path in (
                sorted(resume.parent.glob("step*.ckpt")) if first_process() else ()
            ):  # averaged with the new ones
                verify(path)
                with replacing_summed(directory / "checkpoints" / path.name) as part:
                    shutil.copyfile(path, part)
    else:
        task.before_fit(record, directory, data, module)
    record["training"] = fit(cfg, directory, data, module, monitor=task.monitor, better=task.better, resume=resume)
    task.score(record, directory, data, module)


def check_limits(cfg: DictConfig, path: Path) -> None:
    """ConfigError for a limit that the training of a checkpoint has reached."""
    for limit, done in trained(path).items():
        if isinstance(most := cfg.task.train[limit], int) and 0 < most <= done:
            raise ConfigError(
                f"task.train.{limit}={most}: the run of resume= has trained {done} {limit[4:]} already; give more, or "
                f"score it with mode=test checkpoint={path.parents[1]}"
            )


def check_resumed(path: Path, module: Module) -> None:
    """DataError for a checkpoint of another model, or with weights of another kind."""
    weights, identity = read_checkpoint(path)
    check_identity(path, identity, module.identity)
    expected = module.model.state_dict()
    for name in weights.keys() & expected.keys():
        check_values(path, name, weights[name], expected[name].dtype)

"""Loggers besides the record: curves, configuration and final numbers for TensorBoard, wandb or MLflow.

Lightning's own classes write them. The record and the CSV curves in the run directory are always there: no table of
attnlab reads what a logger holds.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from attnlab.config.build import instantiate, leaves, written
from attnlab.config.compose import one_line
from attnlab.errors import ConfigError
from attnlab.run.record import first_process

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger

log = logging.getLogger(__name__)

SECTIONS = ("quality", "inference", "training", "parameters", "kv_cache")  # of the record: their numbers are logged
_opened: dict[Path, list[Logger]] = {}  # by run directory, so that scores go where the curves went


def open_loggers(cfg: DictConfig, directory: Path) -> list[Logger]:
    """The loggers of the node `logger`; each run directory's are made once, and get the configuration then.

    Raises:
        ConfigError: a logger cannot start: a service that is not reached, or that wants a login.
    """
    if directory in _opened:
        return _opened[directory]
    loggers = []
    for name, node in cfg.logger.items():
        place = directory
        if name == "mlflow":  # it takes every folder there for an experiment
            place = (directory / "mlflow").absolute()
            if not node.tracking_uri:  # MLflow 3.17, for one, opens a store of files only where this is set
                os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        try:
            loggers.append(instantiate(node, path=f"logger.{name}", save_dir=str(place)))
            if first_process():
                loggers[-1].log_hyperparams(dict(leaves(written(cfg))))
        except ConfigError:
            raise
        except Exception as error:  # of services: login, network, their own checks
            hint = "; logger.wandb.offline=true needs no login" if name == "wandb" else ""
            raise ConfigError(f"logger={name}: {type(error).__name__}: {one_line(error)}{hint}") from error
    return _opened.setdefault(directory, loggers)


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

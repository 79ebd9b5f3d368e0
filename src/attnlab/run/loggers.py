"""Loggers besides the record: curves, configuration, final numbers and samples for TensorBoard, wandb or MLflow.

Lightning's own classes write them. The record and the CSV curves in the run directory are always there: no table of
attnlab reads what a logger holds.
"""

from __future__ import annotations

import csv
import logging
import os
from collections.abc import Iterator, Mapping
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
SAMPLES = 10  # rows of predictions.tsv
_opened: dict[Path, list[Logger]] = {}  # by run directory, so that scores go where the curves went


def open_loggers(cfg: DictConfig, directory: Path) -> list[Logger]:
    """The loggers of the node `logger`; each run directory's are made once, and get the configuration then.

    Raises:
        ConfigError: a logger cannot start: a service that is not reached, or that wants a login.
    """
    if directory not in _opened:
        loggers = []
        for name, node in cfg.logger.items():
            try:
                loggers.append(instantiate(node, path=f"logger.{name}", save_dir=_place(name, node, directory)))
                if first_process():
                    loggers[-1].log_hyperparams(dict(leaves(written(cfg))))
            except ConfigError:
                raise
            except Exception as error:  # of services: login, network, their own checks
                hint = "; logger.wandb.offline=true needs no login" if name == "wandb" else ""
                raise ConfigError(f"logger={name}: {type(error).__name__}: {one_line(error)}{hint}") from error
        _opened[directory] = loggers
    return _opened[directory]


def _place(name: str, node: DictConfig, directory: Path) -> str:
    """Where a logger writes; MLflow has a folder of its own, since it takes every folder there for an experiment."""
    if name != "mlflow":
        return str(directory)
    if not node.tracking_uri:  # MLflow 3.17, for one, opens a store of files only where this is set
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    return str((directory / "mlflow").absolute())


def close_loggers(cfg: DictConfig, record: Mapping[str, Any], directory: Path) -> None:
    """Log the final numbers of a finished run and its first predictions, and end its loggers.

    A service that fails now fails no run: the log names it, and the record has every number.
    """
    numbers = {f"final/{name}": value for name, value in final_numbers(record)}
    steps = record["training"]["steps"]
    try:
        for logger in open_loggers(cfg, directory):
            logger.log_metrics(numbers, step=steps if isinstance(steps, int) else 0)
            if rows := _samples(directory):
                _log_samples(logger, rows)
            logger.finalize("success")
            if type(logger).__name__ == "WandbLogger":
                _experiment(logger).finish()
    except Exception as error:  # of services: network, disk, their own checks
        log.warning("logger=%s: the final numbers were not logged (%s)", ",".join(cfg.logger), one_line(error))
    finally:
        _opened.pop(directory, None)


def final_numbers(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Name and value of each number of the record's sections; what was not run is left out."""
    for section in SECTIONS:
        for path, value in leaves(record[section], section):
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield path.replace(".", "/"), value


def _samples(directory: Path) -> list[list[str]]:
    """The header and first rows of predictions.tsv; empty where the run has none."""
    path = directory / "predictions.tsv"
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [row for row, _ in zip(rows, range(SAMPLES + 1), strict=False)]


def _experiment(logger: Logger) -> Any:
    """The library's own object, which each class of loggers has."""
    return getattr(logger, "experiment")  # noqa: B009  (the base class does not declare it)


def _log_samples(logger: Logger, rows: list[list[str]]) -> None:
    """Lightning's interface has no table: each class has its own way."""
    header, *body = rows
    kind = type(logger).__name__
    experiment = _experiment(logger)
    if kind == "WandbLogger":
        logger.log_text("samples", columns=header, data=body)  # type: ignore[attr-defined]
        return
    lines = [header, ["---"] * len(header), *body]
    table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    if kind == "TensorBoardLogger":
        experiment.add_text("samples", table)
    elif kind == "MLFlowLogger":
        experiment.log_text(logger.run_id, table, "samples.md")  # type: ignore[attr-defined]
    else:
        log.warning("%s: samples are not logged", kind)

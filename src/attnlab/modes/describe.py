"""mode=describe: parameters, cache and arithmetic from the config alone."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from attnlab.tasks.base import flow_of


def run(cfg: DictConfig, record: dict[str, Any], directory: Path) -> None:
    flow_of(cfg).describe(record)

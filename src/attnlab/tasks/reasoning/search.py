"""Choosing settings of a compression on the validation split, in one process and without reading the model again."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from torch import nn

from attnlab.compression import Method, compress
from attnlab.compression.counting import rate
from attnlab.config.build import instantiate
from attnlab.config.nearest import nearest
from attnlab.errors import ConfigError
from attnlab.run.progress import each

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Chosen:
    """The result of a search.

    Attributes:
        method: the winner.
        settings: of the winner.
        curve: every candidate in its order: settings, rate, the largest relative error, the validation split's numbers.
    """

    method: Method
    settings: Mapping[str, Any]
    curve: list[dict[str, Any]]


class Search:
    """Settings of a compression to choose from: `task.search`.

    Raises:
        ConfigError: there is no compression, or a key that it does not have.
    """

    def __init__(self, cfg: DictConfig) -> None:
        candidates: Any = OmegaConf.to_container(cfg.task.search, resolve=True)
        if cfg.choices.compress == "none":
            raise ConfigError("task.search: there is nothing to search with compress=none")
        for i, settings in enumerate(candidates):
            for key in settings:
                if key not in cfg.compress or key == "_target_":
                    hint = nearest(key, [str(name) for name in cfg.compress if name != "_target_"])
                    raise ConfigError(f"task.search.{i}.{key}: compress={cfg.choices.compress} has no such key{hint}")
        self.node, self.candidates = cfg.compress, candidates

    def methods(self) -> list[Method]:
        """The method with the settings of each candidate."""
        nodes = [self.node.copy() for _ in self.candidates]
        for node, settings in zip(nodes, self.candidates, strict=True):
            OmegaConf.set_readonly(node, False)
            with open_dict(node):
                node.update(dict(settings))
        return [instantiate(node, path="compress") for node in nodes]

    def run(
        self,
        model: nn.Module,
        score: Callable[[nn.Module], dict[str, Any]],
        calibrate: Callable[[Method], Method],
        store: Path | None = None,
    ) -> Chosen:
        """Compress a copy of a dense model with every candidate, and score it.

        The winner has the highest accuracy, of equal ones the lowest loss.

        Args:
            model: dense.
            score: the validation split's numbers of a model.
            calibrate: gives a method the calibration data that it needs.
            store: of finished units.
        """
        curve: list[dict[str, Any]] = []
        methods: list[Method] = []
        pairs = list(zip(self.candidates, self.methods(), strict=True))
        for settings, method in each("searching the settings of the compression", pairs):
            methods.append(calibrate(method))
            candidate = copy.deepcopy(model)
            reports = compress(candidate, methods[-1], store)
            errors = [report["error"] for report in reports if isinstance(report.get("error"), float)]
            curve.append(
                {
                    "settings": settings,
                    "rate": rate(model, candidate)["rate"],
                    "error": max(errors, default=None),
                    "validation": score(candidate),
                }
            )
            log.info("search: %s, %s", settings, curve[-1]["validation"])

        def rank(i: int) -> tuple[float, float]:
            numbers = curve[i]["validation"]
            return -numbers["accuracy"], numbers["loss"]

        best = min(range(len(curve)), key=rank)
        return Chosen(methods[best], curve[best]["settings"], curve)

"""Choosing settings of a compression on the validation split, in one process and without reading the model again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from torch import Tensor, nn

from attnlab.compression import Method, compress
from attnlab.compression.counting import rate
from attnlab.compression.transform import replacements
from attnlab.config.build import instantiate
from attnlab.config.nearest import nearest
from attnlab.errors import ConfigError
from attnlab.pretrained import family_of, replace
from attnlab.run.progress import each
from attnlab.tasks.base import skeleton

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


class Snapshot:
    """A model's projections as they are now, so that a compression can be undone.

    Modules that a compression puts in place of others are exchanged back; weights that it overwrites are copied, those
    of the layers' projections and no others.

    Args:
        model: dense.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        layers = family_of(model).layers(model)
        paths = sorted({projection.path for layer in layers for projection in layer.projections.values()})
        paths += [path for layer in layers for path in (layer.attention, layer.mlp) if path]
        self.modules = {path: model.get_submodule(path) for path in paths}
        self.weights: dict[str, dict[str, Tensor]] = {
            path: {name: value.detach().clone() for name, value in module.named_parameters(recurse=False)}
            for path, module in self.modules.items()
        }

    def restore(self) -> None:
        """Put the modules and the weights back."""
        for path in replacements(self.model):
            if path not in self.modules:
                parent, _, name = path.rpartition(".")
                delattr(self.model.get_submodule(parent), name)
        for path in sorted(self.modules, key=lambda path: path.count(".")):
            replace(self.model, path, self.modules[path])
            for name, value in self.weights[path].items():
                self.modules[path].get_parameter(name).data.copy_(value)


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

    def method(self, settings: Mapping[str, Any]) -> Method:
        node = self.node.copy()
        OmegaConf.set_readonly(node, False)
        with open_dict(node):
            node.update(dict(settings))
        method: Method = instantiate(node, path="compress")
        return method

    def methods(self) -> list[Method]:
        return [self.method(settings) for settings in self.candidates]

    def run(
        self,
        model: nn.Module,
        score: Callable[[], dict[str, Any]],
        calibrate: Callable[[Method], Method],
        store: Path | None = None,
    ) -> Chosen:
        """Compress with every candidate, score, and undo it.

        The winner has the highest accuracy, of equal ones the lowest loss.

        Args:
            model: dense; it is so again afterwards.
            score: the validation split's numbers of the model.
            calibrate: gives a method the calibration data that it needs.
            store: of finished units.
        """
        before, dense = Snapshot(model), skeleton(model)
        curve: list[dict[str, Any]] = []
        methods: list[Method] = []
        for settings in each("searching the settings of the compression", self.candidates):
            method = calibrate(self.method(settings))
            try:
                reports = compress(model, method, store)
                errors = [report["error"] for report in reports if isinstance(report.get("error"), float)]
                curve.append(
                    {
                        "settings": settings,
                        "rate": rate(dense, model)["rate"],
                        "error": max(errors) if errors else None,
                        "validation": score(),
                    }
                )
            finally:
                before.restore()
            methods.append(method)
            log.info("search: %s, %s", settings, curve[-1]["validation"])
        best = min(
            range(len(curve)), key=lambda i: (-curve[i]["validation"]["accuracy"], curve[i]["validation"]["loss"])
        )
        return Chosen(methods[best], curve[best]["settings"], curve)

"""Several methods on disjoint matrices: the hybrids of TensorLLM, table III."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from attnlab.compression.keep import with_budget
from attnlab.compression.methods.base import Ladder, Method, Share, Unit
from attnlab.errors import ConfigError
from attnlab.pretrained.base import Layer

RANKS = ("rank", "rho", "rate", "ranks", "vo_rank", "mlp_rank", "keep")  # arguments of steps that set ranks


class Hybrid(Method):
    """The units of several methods, which change different matrices.

    Args:
        steps: methods by name, in order. A new hybrid is a file in conf/compress that lists them:
            `laser_mlp@steps.laser` under `defaults` gives conf/compress/laser_mlp.yaml the name laser.
        layers: numbers of layers for all steps; None: those of each step.
        keep: the remaining share of the parameters of all steps' matrices together; None: the ranks, or the budget, of
            each step.

    Raises:
        ConfigError: no steps, a step that is not a method, ranks of a step with `keep`, or different calibration data.
    """

    def __init__(self, steps: dict[str, Any], layers: list[int] | None = None, keep: Share | None = None) -> None:
        if not steps:
            raise ConfigError("compress.steps: expected at least one method")
        self.steps: dict[str, Method] = {}
        for name, step in steps.items():
            if not isinstance(step, Method):
                raise ConfigError(f"compress.steps.{name}: expected a method, as a file in conf/compress has it")
            if keep is not None and (ranks := [key for key in RANKS if getattr(step, key, None) is not None]):
                raise ConfigError(
                    f"compress.keep chooses the ranks; give it, or ranks of the steps (the step {name} has {ranks[0]})"
                )
            if layers is not None and not hasattr(step, "layers"):
                raise ConfigError(f"compress.layers: the step {name} always takes all layers")
            self.steps[name] = copy.copy(step)
            if layers is not None:
                vars(self.steps[name])["layers"] = list(layers)
        self.keep, self.layers = keep, layers
        wanted = {step.calibration for step in self.steps.values() if step.calibration is not None}
        if len(wanted) > 1:
            raise ConfigError(f"compress.steps: calibration is {' and '.join(sorted(wanted))}; expected a single one")
        self.calibration = next(iter(wanted), None)
        self._step_of: dict[str, str] = {}  # by the path of a unit; shared by copies

    def units(self, model: nn.Module, layers: Sequence[Layer]) -> list[Unit]:
        all_units: list[Unit] = []
        owner: dict[str, str] = {}
        for name, step in self._ready().items():
            with self._named(name):
                ready = step if self.chosen else with_budget(step, model, layers)
                units = ready.units(model, layers)
            for unit in units:
                for path in unit.reads:
                    if owner.setdefault(path, name) != name:
                        raise ConfigError(f"compress.steps: {owner[path]} and {name} both change {path}")
                self._step_of[unit.path] = name
            all_units += units
        return all_units

    def ladders(self, model: nn.Module, layers: Sequence[Layer]) -> list[Ladder]:
        collected: list[Ladder] = []
        for name, step in self._ready().items():
            with self._named(name):
                collected += step.ladders(model, layers)
        return collected

    def rank_of(self, report: Mapping[str, Any]) -> int | None:
        """The rank of the last step, which `rank=` sets; None for the others."""
        last = list(self.steps)[-1]
        return self.steps[last].rank_of(report) if self._step_of.get(report["path"]) == last else None

    @contextmanager
    def _named(self, step: str) -> Iterator[None]:
        """Add the key of a step to its errors, except for keys of all steps."""
        try:
            yield
        except ConfigError as error:
            key = str(error).removeprefix("compress.")
            if key == str(error) or (self.layers is not None and key.startswith("layers")):
                raise
            raise ConfigError(f"compress.steps.{step}.{key}") from error

    def _ready(self) -> dict[str, Method]:
        """The steps with the calibration data and the chosen ranks of this method."""
        ready = {name: copy.copy(step) for name, step in self.steps.items()}
        for step in ready.values():
            if step.calibration is not None:
                step.grams = self.grams
            if self.chosen is not None:
                step.chosen = self.chosen
        return ready

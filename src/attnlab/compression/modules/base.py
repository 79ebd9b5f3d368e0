"""Base class of the modules that compression puts into a model."""

from __future__ import annotations

import importlib
import pkgutil
from abc import abstractmethod
from typing import Any, ClassVar

from torch import Tensor, nn

from attnlab.config.bounds import fits, words
from attnlab.config.schema import signature

Dense = dict[str, tuple[Tensor, Tensor | None]]  # W (out, in) and bias, by name of the projection


class Replacement(nn.Module):
    """A module in place of one of the model, described by plain values.

    One in place of a single matrix has `in_features` and `out_features`, as nn.Linear does.

    Attributes:
        kind: its name in a saved folder; no two classes share one.
    """

    kind: ClassVar[str]

    @abstractmethod
    def layout(self) -> dict[str, Any]:
        """The arguments of the constructor, as plain values: they build the module again, without its weights."""

    @abstractmethod
    def multiply_adds(self, tokens: int) -> int:
        """For one sequence of that many tokens."""

    @abstractmethod
    def dense(self) -> tuple[Dense, float]:
        """The dense matrices that compute the same, float64, and the relative error where they cannot.

        By name of the projection for a module in place of an attention module; under "" for one in place of one matrix.
        """

    @property
    def weight(self) -> Tensor:
        """W (out, in) of a module in place of one matrix, computed: for libraries that ask nn.Linear for its weight."""
        if "in_features" not in vars(self):
            raise AttributeError(f"{type(self).__name__} is not in place of one matrix")
        weight, _ = self.dense()[0][""]
        return weight.to(next(self.parameters()))

    def bind(self, model: nn.Module, path: str) -> None:
        """Called once, when all modules of a model are in place: find there what other modules share with this one."""


def describe(module: Replacement) -> dict[str, Any]:
    """The kind and the layout of a module: what `build` takes."""
    return {"kind": module.kind, **module.layout()}


def build(layout: dict[str, Any]) -> Replacement:
    """The module that a layout describes, its weights at random. Only classes derived from Replacement are called.

    Raises:
        TypeError, ValueError: not a layout.
    """
    arguments = {key: value for key, value in layout.items() if key != "kind"}
    known = kinds()
    if layout.get("kind") not in known:
        raise ValueError(f"kind {layout.get('kind')!r}: expected one of {', '.join(sorted(known))}")
    kind = known[layout["kind"]]
    declared = signature(f"{kind.__module__}.{kind.__qualname__}").parameters
    for key, value in arguments.items():
        annotation = declared.get(key)
        if annotation is not None and not fits(annotation, value):
            raise ValueError(f"{key}={value!r}: expected {words(annotation)}")
    return kind(**arguments)


def kinds() -> dict[str, type[Replacement]]:
    """Every class of modules by its kind."""
    for package in ("attnlab.compression.modules", "attnlab.compression.methods"):
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
            importlib.import_module(f"{package}.{module.name}")
    by_kind: dict[str, type[Replacement]] = {}
    classes: list[type[Any]] = [Replacement]
    while classes:
        cls = classes.pop()
        classes += cls.__subclasses__()
        if hasattr(cls, "kind"):
            by_kind[cls.kind] = cls
    return by_kind

"""Base class of the modules that compression puts into a model."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from torch import Tensor, nn

from attnlab.config.nodes import fits, words
from attnlab.config.schema import signature
from attnlab.pretrained.base import subclasses

Dense = dict[str, tuple[Tensor, Tensor | None]]  # W (out, in) and bias, by name of the projection


class Replacement(nn.Module):
    """A compressed module that replaces one of the model.

    A module that replaces a single matrix has `in_features` and `out_features`, as nn.Linear does.

    Attributes:
        kind: unique name of the class in a saved folder.
    """

    kind: ClassVar[str]

    @abstractmethod
    def layout(self) -> dict[str, Any]:
        """The constructor's arguments as plain values."""

    @abstractmethod
    def multiply_adds(self, tokens: int) -> int:
        """Multiply-adds for one sequence."""

    @abstractmethod
    def dense(self) -> tuple[Dense, float]:
        """The equivalent dense matrices, float64, and their relative error: 0 if they are exact.

        Keys are names of projections for a module that replaces an attention module, and "" for a single matrix.
        """

    @property
    def weight(self) -> Tensor:
        """W (out, in), computed: for libraries that read the weight of an nn.Linear."""
        if "in_features" not in vars(self):
            raise AttributeError(f"{type(self).__name__} does not replace a single matrix")
        weight, _ = self.dense()[0][""]
        return weight.to(next(self.parameters()))

    def bind(self, model: nn.Module, path: str) -> None:
        """Look up modules shared with other replacements; called once, when all of them are in the model."""


def describe(module: Replacement) -> dict[str, Any]:
    """The kind and the layout of a module, as `build` takes them."""
    return {"kind": module.kind, **module.layout()}


def build(layout: dict[str, Any]) -> Replacement:
    """Build the module of a layout with random weights. Only subclasses of Replacement are called.

    Raises:
        TypeError, ValueError: not a layout.
    """
    known, arguments = kinds(), dict(layout)
    if (name := arguments.pop("kind", None)) not in known:
        raise ValueError(f"kind {name!r}: expected one of {', '.join(sorted(known))}")
    kind = known[name]
    declared = signature(f"{kind.__module__}.{kind.__qualname__}").parameters
    for key, value in arguments.items():
        annotation = declared.get(key)
        if annotation is not None and not fits(annotation, value):
            raise ValueError(f"{key}={value!r}: expected {words(annotation)}")
    return kind(**arguments)


def kinds() -> dict[str, type[Replacement]]:
    """The classes of replacements by kind."""
    classes = subclasses(Replacement, "attnlab.compression.modules", "attnlab.compression.methods")
    return {cls.kind: cls for cls in classes if hasattr(cls, "kind")}

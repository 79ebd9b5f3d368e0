"""Models that others wrote: where their matrices lie, how they are read and replaced, how weights are loaded."""

import importlib
import inspect
import pkgutil
from typing import Any

from torch import nn

from attnlab.errors import ConfigError
from attnlab.pretrained.base import ATTENTION, Family, Layer, Projection, replace

__all__ = ["ATTENTION", "Family", "Layer", "Projection", "families", "family_of", "replace"]


def families() -> dict[str, Family]:
    """Every known family by name: the concrete subclasses of `Family`, those of this folder's files among them."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    by_name: dict[str, Family] = {}
    classes: list[type[Any]] = [Family]
    while classes:
        kind = classes.pop()
        classes += kind.__subclasses__()
        if not inspect.isabstract(kind):
            by_name[kind.name] = kind()
    return dict(sorted(by_name.items()))


def family_of(model: nn.Module) -> Family:
    """The family of a model. ConfigError: it is of none, with the names of those that are known."""
    known = families()
    for family in known.values():
        if family.matches(model):
            return family
    kind = type(model)
    raise ConfigError(
        f"{kind.__module__}.{kind.__name__} is of no known family of models ({', '.join(known)}); "
        "a new one is a file in src/attnlab/pretrained"
    )

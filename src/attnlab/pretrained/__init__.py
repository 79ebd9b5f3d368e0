"""Pretrained models of other libraries: reading and replacing their matrices, loading their weights."""

import inspect

from torch import nn

from attnlab.errors import ConfigError
from attnlab.pretrained.base import ATTENTION, Family, Layer, Projection, replace, subclasses

__all__ = ["ATTENTION", "Family", "Layer", "Projection", "families", "family_of", "replace"]


def families() -> dict[str, Family]:
    """All concrete subclasses of `Family` by name."""
    concrete = {kind.name: kind() for kind in subclasses(Family, __name__) if not inspect.isabstract(kind)}
    return dict(sorted(concrete.items()))


def family_of(model: nn.Module) -> Family:
    """The family of a model. ConfigError: none matches."""
    known = families()
    for family in known.values():
        if family.matches(model):
            return family
    kind = type(model)
    raise ConfigError(
        f"{kind.__module__}.{kind.__name__} is of no known family of models ({', '.join(known)}); "
        "a new one is a file in src/attnlab/pretrained"
    )

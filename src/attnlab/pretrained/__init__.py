"""Pretrained models of other libraries: reading and replacing their matrices, loading their weights."""

from torch import nn

from attnlab.errors import ConfigError
from attnlab.pretrained.base import ATTENTION, Family, Layer, Projection, replace, subclasses

__all__ = ["ATTENTION", "Family", "Layer", "Projection", "families", "family_of", "replace"]


def families() -> dict[str, Family]:
    """All subclasses of `Family` with a name, by it."""
    named = {kind.name: kind() for kind in subclasses(Family, __name__) if hasattr(kind, "name")}
    return dict(sorted(named.items()))


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

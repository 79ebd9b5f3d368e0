"""Interface of a family of pretrained models: the paths of a layer's matrices, and how to read and replace them.

Compression and conversion use a model through this interface alone. A family is one file in this folder.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from attnlab.errors import ConfigError

ATTENTION = ("q", "k", "v", "o")  # names of the attention projections, the same in every family


@dataclass(frozen=True)
class Projection:
    """One matrix of a layer, y = W x + b with W of shape (out, in), and where the model stores it.

    Args:
        path: the module with `weight` and `bias`.
        shape: (out, in) of W, in either storage layout.
        axis: the axis of W over heads x head width: "out" for q, k and v, "in" for o, None for a matrix without heads.
        heads: number of heads along that axis; k and v of grouped-query attention have fewer than q.
        rows: the module's outputs that belong to this projection, in the order of W's rows; None: all. Fused
            projections share a module: timm's `qkv` (consecutive ranges), GPT-NeoX's `query_key_value` (interleaved).
        transposed: the module stores (in, out), as GPT-2's Conv1D does.
    """

    path: str
    shape: tuple[int, int]
    axis: Literal["out", "in"] | None = None
    heads: int = 0
    rows: range | tuple[int, ...] | None = None
    transposed: bool = False
    bias: bool = False

    @property
    def width(self) -> int:
        """Width of a head."""
        return self.shape[0 if self.axis == "out" else 1] // self.heads

    def read(self, model: nn.Module) -> Tensor:
        """W, (out, in), detached; a view unless the projection is fused with others."""
        weight: Tensor = model.get_parameter(f"{self.path}.weight").detach()
        weight = weight.mT if self.transposed else weight
        return weight if self.rows is None else weight[self._index]

    def read_bias(self, model: nn.Module) -> Tensor | None:
        """b, (out,), detached; None without a bias."""
        if not self.bias:
            return None
        bias = model.get_parameter(f"{self.path}.bias").detach()
        return bias if self.rows is None else bias[self._index]

    @torch.no_grad()
    def write(self, model: nn.Module, weight: Tensor, bias: Tensor | None = None) -> None:
        """Overwrite W (out, in), and b (out,) if there is a `bias`, in the model's dtype.

        ConfigError: a nonzero `bias` for a projection without one.
        """
        stored = model.get_parameter(f"{self.path}.weight")
        index = slice(None) if self.rows is None else self._index
        (stored.mT if self.transposed else stored)[index] = weight.to(stored)
        if bias is not None and self.bias:
            model.get_parameter(f"{self.path}.bias")[index] = bias.to(stored)
        elif bias is not None and bias.any():
            raise ConfigError(f"{self.path} has no bias; a nonzero bias cannot be written into it")

    def split(self, weight: Tensor) -> Tensor:
        """Split W (out, in) by head, (heads, model width, head width): one layout for q, k, v and o."""
        if self.axis == "out":
            return weight.unflatten(0, (self.heads, -1)).mT
        return weight.unflatten(1, (self.heads, -1)).transpose(0, 1)

    def join(self, parts: Tensor) -> Tensor:
        """The inverse of `split`: (heads, model width, head width) -> W (out, in)."""
        if self.axis == "out":
            return parts.mT.flatten(0, 1)
        return parts.transpose(0, 1).flatten(1)

    @property
    def _index(self) -> slice | list[int]:
        if isinstance(self.rows, range):
            return slice(self.rows.start, self.rows.stop, self.rows.step)
        assert self.rows is not None
        return list(self.rows)


@dataclass(frozen=True)
class Layer:
    """One layer of a model.

    Args:
        attention: path of its attention module, or None.
        mlp: path of its MLP module, or None.
        projections: q, k, v and o if they are known, and the matrices of the MLP under the family's names.
        scale: factor of the logits; 0 if unknown.
        dropout: rates of the attention weights and of the attention module's output, where products can be replaced.
        refusals: reasons why a layer cannot be changed, by subject. "attention": its projections are unknown.
            "products": the layer changes queries or keys after the projections (rotary positions, norms), so that
            products of the weights do not give its logits or outputs. "mlp": its matrices are unknown. Each reason
            begins with the path of the module.
    """

    path: str
    attention: str | None = None
    mlp: str | None = None
    projections: Mapping[str, Projection] = field(default_factory=dict)
    scale: float = 0.0
    dropout: tuple[float, float] = (0.0, 0.0)
    refusals: Mapping[str, str] = field(default_factory=dict)

    @property
    def matrices(self) -> list[str]:
        """Names of the MLP's matrices."""
        return [name for name in self.projections if name not in ATTENTION]

    def products(self, tokens: int) -> int:
        """Multiply-adds of dense attention's two products in all heads: queries by keys, weights by values."""
        return tokens**2 * (self.projections["q"].shape[0] + self.projections["o"].shape[1])

    def attention_multiply_adds(self, tokens: int) -> int:
        """Multiply-adds of dense attention for one sequence: projections and products."""
        shapes = (self.projections[name].shape for name in ATTENTION)
        return tokens * sum(out * width for out, width in shapes) + self.products(tokens)


class Family(ABC):
    """A stateless description of an external architecture.

    Attributes:
        name: the family's name in saved folders.
        options: the options of :meth:`create` that a saved folder may have. Others are refused: the folder may come
            from anywhere, and a library's options may open files.
    """

    name: ClassVar[str]
    options: ClassVar[frozenset[str]]

    @abstractmethod
    def matches(self, model: nn.Module) -> bool:
        """Whether `model` belongs to this family."""

    @abstractmethod
    def layers(self, model: nn.Module) -> list[Layer]:
        """The layers of a model in order, from its modules and config: the model may be on the meta device."""

    def tokens(self, model: nn.Module) -> int | None:
        """The fixed sequence length inside a model; None: it follows the input."""
        return None

    @abstractmethod
    def create(self, name: str, options: dict[str, Any]) -> nn.Module:
        """The dense architecture with random weights, on the default device. ConfigError: unknown model or options."""

    def empty(self, name: str, options: dict[str, Any]) -> nn.Module:
        """The dense architecture on the CPU with uninitialised parameters, for weights that are loaded next."""
        with torch.device("meta"):
            model = self.create(name, options)
        return model.to_empty(device="cpu")


def replace(model: nn.Module, path: str, module: nn.Module) -> None:
    """Set the submodule at a dotted path of the model."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def subclasses(base: type[Any], *packages: str) -> Iterator[type[Any]]:
    """All subclasses of a class, after the import of every module of these packages."""
    for package in packages:
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
            importlib.import_module(f"{package}.{module.name}")
    for cls in base.__subclasses__():
        yield cls
        yield from subclasses(cls)

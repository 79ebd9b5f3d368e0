"""The interface of a family of pretrained models: where the matrices of a layer lie, how to read and replace them.

Compression and conversion know a model through it alone. A family is one file in this folder; `families` finds it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
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
        path: path of the module that has `weight` and `bias`.
        shape: (out, in) of W, whatever the layout in which it is stored.
        axis: the axis of W that runs over heads x head width: "out" for q, k and v, "in" for o, None for a matrix
            that has no heads.
        heads: number of heads along that axis; k and v of grouped-query attention have fewer than q.
        rows: which outputs of the module belong to this projection, in the order of W's rows; None: all. Fused
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
        """W, (out, in), detached: a view where the projection has its module to itself."""
        weight: Tensor = model.get_parameter(f"{self.path}.weight").detach()
        weight = weight.mT if self.transposed else weight
        return weight if self.rows is None else weight[self._index]

    def read_bias(self, model: nn.Module) -> Tensor | None:
        """b, (out,), detached; None: the projection has none."""
        if not self.bias:
            return None
        bias = model.get_parameter(f"{self.path}.bias").detach()
        return bias if self.rows is None else bias[self._index]

    @torch.no_grad()
    def write(self, model: nn.Module, weight: Tensor, bias: Tensor | None = None) -> None:
        """Replace W, and with `bias` b, in place; in the model's type.

        Raises:
            ConfigError: `bias` is not zero and the projection has none.
        """
        stored = model.get_parameter(f"{self.path}.weight")
        index = slice(None) if self.rows is None else self._index
        (stored.mT if self.transposed else stored)[index] = weight.to(stored)
        if bias is not None and self.bias:
            model.get_parameter(f"{self.path}.bias")[index] = bias.to(stored)
        elif bias is not None and bias.any():
            raise ConfigError(f"{self.path} has no bias, so that a bias other than zero cannot be written into it")

    def split(self, weight: Tensor) -> Tensor:
        """W (out, in) by head, (heads, model width, head width): the same layout for q, k, v and o."""
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
    """One layer of a model: its named projections, and what else a method must know of it.

    Args:
        attention: path of its attention module; None: it has none.
        mlp: path of its MLP module; None: it has none.
        projections: q, k, v and o where they are known, and the matrices of the MLP under the family's names.
        scale: factor of the logits; 0 where it is not known.
        dropout: rates of the attention weights and of the attention module's output.
        refusals: what cannot be done with this layer and why, by subject. "attention": the projections are unknown.
            "products": something stands between projections and products (rotary positions, norms), so that the
            query-key and value-output products of the weights are not what the layer computes. "mlp": its matrices
            are unknown. Each text begins with the path of the module.
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
        """Multiply-adds of both products of dense attention, queries by keys and weights by values, in all heads."""
        return tokens**2 * (self.projections["q"].shape[0] + self.projections["o"].shape[1])

    def attention_multiply_adds(self, tokens: int) -> int:
        """Of dense attention for a sequence of that many tokens: projections and products."""
        shapes = (self.projections[name].shape for name in ATTENTION)
        return tokens * sum(out * width for out, width in shapes) + self.products(tokens)


class Family(ABC):
    """A kind of model that others wrote. It has no state: everything is read from the model.

    Attributes:
        name: how a saved folder names the family.
        options: the options of :meth:`create` that a saved folder may have; others are refused, for a folder may come
            from anywhere and options of a library may open files.
    """

    name: ClassVar[str]
    options: ClassVar[frozenset[str]]

    @abstractmethod
    def matches(self, model: nn.Module) -> bool:
        """Whether `model` is of this family."""

    @abstractmethod
    def layers(self, model: nn.Module) -> list[Layer]:
        """The layers of a model in order; sizes come from its modules and config, so that it may be on meta."""

    def tokens(self, model: nn.Module) -> int | None:
        """The length of the sequences inside a model, where its sizes fix it; None: they are as long as the input."""
        return None

    @abstractmethod
    def create(self, name: str, options: dict[str, Any]) -> nn.Module:
        """The dense architecture with random weights, on the default device.

        ConfigError: there is no such model, or it refuses the options.
        """

    def empty(self, name: str, options: dict[str, Any]) -> nn.Module:
        """The same on the CPU, for weights that are loaded next: parameters are not initialised."""
        with torch.device("meta"):
            model = self.create(name, options)
        return model.to_empty(device="cpu")


def replace(model: nn.Module, path: str, module: nn.Module) -> None:
    """Put a module at a dotted path of the model, in place of what is there or as a new submodule."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)

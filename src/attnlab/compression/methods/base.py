"""Base class of compression methods: a plan of independent units over the named projections of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Gt, Le
from torch import Tensor, nn

from attnlab.compression.modules.base import Replacement
from attnlab.compression.modules.linear import LowRankLinear
from attnlab.errors import ConfigError
from attnlab.pretrained.base import Layer, Projection

Share = Annotated[float, Gt(0), Le(1)]
KeepOf = Literal["parameters", "multiply_adds"]
Watch = Callable[[str, int, int], None]  # the current step, sweeps done, sweeps at most
Place = tuple[str, str]  # path of a layer and name of one of its projections


@dataclass(frozen=True)
class Change:
    """The replaced `modules` and `projections` of a unit."""

    modules: Mapping[str, Replacement] = field(default_factory=dict)  # by path
    projections: Mapping[Place, Replacement | Tensor] = field(default_factory=dict)  # a tensor: W (out, in)
    report: Mapping[str, Any] = field(default_factory=dict)  # plain values: ranks, relative errors, histories


@dataclass(frozen=True)
class Unit:
    """One step of a compression, computed and stored at once.

    Args:
        path: its name in progress and reports: the path of a module, or a name for several layers together.
        reads: paths of the modules whose weights it reads.
        settings: plain values on which the result depends, besides the weights.
        fit: decomposes in float64; the new modules may be float64 too.
        outline: returns modules of the same sizes with any weights, for counting; no weight is read.
    """

    path: str
    reads: Sequence[str]
    settings: Mapping[str, Any]
    fit: Callable[[Watch], Change]
    outline: Callable[[], Change]


@dataclass(frozen=True)
class Step:
    """One choice of ranks for a layer."""

    parameters: int  # of its matrices, without biases
    error: float  # relative squared error, 0 to 1
    value: Any  # the ranks as plain values; None: dense


@dataclass(frozen=True)
class Ladder:
    """The choices of a budget in one layer."""

    path: str  # of the layer or matrix; the key of the choice
    dense: int  # parameters of the dense matrices
    steps: Sequence[Step]


class Method(ABC):
    """A compression method.

    Attributes:
        keep: the remaining share of the compressed matrices; ranks are then chosen for each layer
            (:mod:`attnlab.compression.keep`). None: the ranks of the method's arguments.
        keep_of: the unit of `keep`. "parameters", of all layers together; "multiply_adds", of each layer alone (IrrAtt,
            section 3.4), for methods with :meth:`rated`.
        calibration: source of the inputs that the method needs: "validation" (the task's split) or a text file.
        grams: the collected :class:`attnlab.compression.calibration.Grams`.
        chosen: the ranks chosen by a budget, by path of the ladder.
    """

    calibration: str | None = None
    grams: Any = None
    keep: float | None = None
    keep_of: KeepOf = "parameters"
    chosen: Mapping[str, Any] | None = None

    @abstractmethod
    def units(self, model: nn.Module, layers: Sequence[Layer]) -> list[Unit]:
        """The units in order. No weight is read: the model may be on the meta device.

        ConfigError: nothing to compress, a rank out of bounds, or a layer whose output depends on more than weights.
        """

    def ladders(self, model: nn.Module, layers: Sequence[Layer]) -> list[Ladder]:
        """A ladder for each layer; on the meta device with the errors of noise.

        ConfigError: as `units`; or a budget cannot choose the method's ranks.
        """
        raise ConfigError(f"compress.keep: {type(self).__name__} has no ranks that a budget could choose")

    def rated(self, model: nn.Module, layers: Sequence[Layer]) -> dict[str, Any]:
        """The largest ranks of each layer with at most `keep` of its dense multiply-adds, by path of the ladder.

        ConfigError: as `units`; or the smallest ranks take more; or the method counts parameters alone.
        """
        raise ConfigError(f"compress.keep_of=multiply_adds: {type(self).__name__} takes parameters")

    def rank_of(self, report: Mapping[str, Any]) -> int | None:
        """The value of `rank=` for a unit's report; None without such a value."""
        return None


def counts_what(keep: float | None, keep_of: KeepOf) -> None:
    """ConfigError: a `keep_of` has no effect without `keep`."""
    if keep is None and keep_of != "parameters":
        raise ConfigError(
            f"compress.keep_of={keep_of}: it is the unit of compress.keep, which is null; give compress.keep, or "
            "leave compress.keep_of out"
        )


def settings_of(method: Method, *without: str) -> dict[str, Any]:
    """The class and the arguments of a method as plain values, without the named ones."""
    without = (*without, "keep", "keep_of", "chosen", "calibration", "grams")  # units add the values that they use
    return {"method": type(method).__name__, **{k: v for k, v in vars(method).items() if k not in without}}


def chosen_layers(layers: Sequence[Layer], numbers: Sequence[int] | None) -> list[Layer]:
    """The layers of `compress.layers` in the model's order. ConfigError: an unknown layer, or an empty list.

    Args:
        numbers: from 0, or from the end if negative; None: all.
    """
    if numbers is None:
        return list(layers)
    for number in numbers:
        if not -len(layers) <= number < len(layers):
            last = len(layers) - 1
            raise ConfigError(f"compress.layers: {number}: expected 0 to {last}, or -1 for the last to {-last - 1}")
    if not numbers:
        raise ConfigError("compress.layers=[]: expected at least one layer, or null for all")
    return [layers[i] for i in sorted({number % len(layers) for number in numbers})]


def already_compressed(path: str) -> ConfigError:
    """The error for a compressed module."""
    return ConfigError(f"{path} is compressed already; start from an uncompressed model")


def refuse_compressed(model: nn.Module, path: str) -> None:
    """ConfigError: the module at a path is compressed."""
    if isinstance(model.get_submodule(path), Replacement):
        raise already_compressed(path)


# --- a matrix as two factors ------------------------------------------------------------------------------------


def pair(matrix: Projection, rank: int) -> LowRankLinear:
    """Two factors for a matrix, with any weights."""
    return LowRankLinear(matrix.shape[1], rank, matrix.shape[0], bias=matrix.bias)


def saves(matrix: Projection, rank: int) -> bool:
    """Whether two factors take fewer multiply-adds than the dense product."""
    return rank <= largest_rank(matrix.shape)


def largest_rank(shape: tuple[int, int]) -> int:
    """The largest rank at which two factors are smaller than a dense matrix of this shape."""
    return (shape[0] * shape[1] - 1) // sum(shape)


def fitted_pair(model: nn.Module, matrix: Projection, a: Tensor, b: Tensor) -> LowRankLinear:
    """The factors of W = a (out, rank) @ b (rank, in) in float64, with the bias of the matrix."""
    module, bias = pair(matrix, a.shape[1]).double(), matrix.read_bias(model)
    module.load_state_dict({"0.weight": b, "1.weight": a} | ({} if bias is None else {"1.bias": bias}))
    return module

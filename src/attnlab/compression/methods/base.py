"""What every method is: a plan of independent units of work over the named projections of a model."""

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
Watch = Callable[[str, int, int], None]  # what is being computed, sweeps done, sweeps at most
Place = tuple[str, str]  # path of a layer and name of one of its projections


@dataclass(frozen=True)
class Change:
    """What a unit puts in place: `modules`, and `projections` of modules."""

    modules: Mapping[str, Replacement] = field(default_factory=dict)  # by path
    projections: Mapping[Place, Replacement | Tensor] = field(default_factory=dict)  # a tensor: W (out, in)
    report: Mapping[str, Any] = field(default_factory=dict)  # plain values: ranks, relative errors, histories


@dataclass(frozen=True)
class Unit:
    """One step of a compression, computed and stored as one.

    Args:
        path: what progress and the report call it: the path of a module, or a name for several layers together.
        reads: paths of the modules whose weights it reads.
        settings: plain values that make two fits of the same weights differ.
        fit: decomposes, in float64; the new modules may be float64 too.
        outline: the same modules at the same sizes with any weights, for counting; no weight is read.
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
    value: Any  # the ranks as plain values; None: the layer stays dense


@dataclass(frozen=True)
class Ladder:
    """What a budget can choose from in one layer."""

    path: str  # of the layer or matrix; what the choice is stored under
    dense: int  # parameters of the dense matrices
    steps: Sequence[Step]


class Method(ABC):
    """A way to compress a model.

    Attributes:
        keep: the share of the matrices it compresses that remains; ranks are then chosen for each layer
            (:mod:`attnlab.compression.keep`). None: the ranks of the method's arguments.
        keep_of: what `keep` counts. "parameters", of all layers together; "multiply_adds", of each layer alone (IrrAtt,
            section 3.4), for methods that have :meth:`rated`.
        calibration: where the inputs of projections come from that the method needs: "validation" (the task's
            split) or a text file; None: it needs none.
        grams: what was collected of them, :class:`attnlab.compression.calibration.Grams`; None: nothing was.
        chosen: the ranks that were chosen, by the path of the ladder; None: none were.
    """

    calibration: str | None = None
    grams: Any = None
    keep: float | None = None
    keep_of: KeepOf = "parameters"
    chosen: Mapping[str, Any] | None = None

    @abstractmethod
    def units(self, model: nn.Module, layers: Sequence[Layer]) -> list[Unit]:
        """What has to be done, in order. No weight is read here: the model may be on the meta device.

        Raises:
            ConfigError: what would keep the compression from finishing: nothing to compress, a rank out of bounds,
                a layer whose weights do not determine what it computes.
        """

    def ladders(self, model: nn.Module, layers: Sequence[Layer]) -> list[Ladder]:
        """What a budget chooses from: a ladder for each layer. On the meta device errors are those of noise.

        Raises:
            ConfigError: as `units` does; or the method has no ranks to choose.
        """
        raise ConfigError(f"compress.keep: {type(self).__name__} has no ranks that a budget could choose")

    def rated(self, model: nn.Module, layers: Sequence[Layer]) -> dict[str, Any]:
        """The ranks of each layer whose multiply-adds are at most `keep` of its dense ones, by path, as `ladders` has.

        Raises:
            ConfigError: as `units` does; or even the smallest ranks take more; or the method has no such rule.
        """
        raise ConfigError(f"compress.keep_of=multiply_adds: {type(self).__name__} takes parameters")

    def rank_of(self, report: Mapping[str, Any]) -> int | None:
        """The value of `rank=` that a unit's report amounts to; None: the method has no such knob."""
        return None


def counts_what(keep: float | None, keep_of: KeepOf) -> None:
    """Refuse a `keep_of` that would have no effect.

    Args:
        keep: the share that remains; None: the method's arguments give the ranks.

    Raises:
        ConfigError: "multiply_adds" without a share.
    """
    if keep is None and keep_of != "parameters":
        raise ConfigError(
            f"compress.keep_of={keep_of}: it says what compress.keep counts, which is null; give compress.keep, or "
            "leave compress.keep_of out"
        )


def settings_of(method: Method, *without: str) -> dict[str, Any]:
    """The class and the arguments of a method as plain values, except those named."""
    without = (*without, "keep", "keep_of", "chosen", "calibration", "grams")  # units add what they use of these
    return {"method": type(method).__name__, **{k: v for k, v in vars(method).items() if k not in without}}


def chosen_layers(layers: Sequence[Layer], numbers: Sequence[int] | None) -> list[Layer]:
    """The layers that `compress.layers` names, each once and in the model's order.

    Args:
        numbers: from 0, or from the end if negative; None: all.

    Raises:
        ConfigError: a layer that does not exist, or none at all.
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
    """The error of a module that compression has already replaced."""
    return ConfigError(f"{path} is compressed already; start from an uncompressed model")


def refuse_compressed(model: nn.Module, path: str) -> None:
    """Raise ConfigError if compression has already replaced the module at a path."""
    if isinstance(model.get_submodule(path), Replacement):
        raise already_compressed(path)


# --- a matrix as two factors ------------------------------------------------------------------------------------


def pair(matrix: Projection, rank: int) -> LowRankLinear:
    """The two factors of a matrix, with any weights."""
    return LowRankLinear(matrix.shape[1], rank, matrix.shape[0], bias=matrix.bias)


def saves(matrix: Projection, rank: int) -> bool:
    """Whether two factors take fewer multiply-adds than the dense product."""
    return rank * sum(matrix.shape) < matrix.shape[0] * matrix.shape[1]


def fitted_pair(model: nn.Module, matrix: Projection, a: Tensor, b: Tensor) -> LowRankLinear:
    """The factors of W = a @ b in float64, with the bias of the matrix.

    Args:
        a: (out, rank).
        b: (rank, in).
    """
    module, bias = pair(matrix, a.shape[1]).double(), matrix.read_bias(model)
    module.load_state_dict({"0.weight": b, "1.weight": a} | ({} if bias is None else {"1.bias": bias}))
    return module

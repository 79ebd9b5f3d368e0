"""TensorLLM: the attention projections of all heads of a layer as one tensor, decomposed by partial Tucker."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, MinLen
from torch import Tensor, nn

from attnlab.compression.decompositions.tucker import Tucker, truncation_errors, tucker
from attnlab.compression.decompositions.weighted import output_errors, weight_errors, weighted_tucker
from attnlab.compression.keep import grid, value_of
from attnlab.compression.methods.base import (
    Change,
    Ladder,
    Method,
    Share,
    Step,
    Unit,
    Watch,
    chosen_layers,
    refuse_compressed,
    settings_of,
)
from attnlab.compression.modules.tensorllm import HeadFactors, HeadProjection
from attnlab.config.bounds import Rank
from attnlab.errors import ConfigError, DataError
from attnlab.pretrained.base import ATTENTION, Layer, Projection

FACTORS = "factors"  # name of the module of the factors inside an attention module
PAIRS = (("q", "o"), ("k", "v"))  # the stacks of the coupled form, by number of heads: of queries, and of keys


@dataclass(frozen=True)
class Stack:
    """Matrices with the same number of heads."""

    names: tuple[str, ...]  # of q, k, v and o
    heads: int  # h
    rank: int | None  # R3; None: no factor between the matrices


@dataclass(frozen=True)
class Sizes:
    """The tensor of one layer and its ranks."""

    places: Mapping[str, Projection]  # in the order of q, k, v, o; heads are slices of their axis
    dim: int  # d, the length of the first mode
    width: int  # dv, the length of the second mode
    ranks: tuple[int, int]  # R1, R2
    stacks: tuple[Stack, ...]  # the matrices by number of heads

    @property
    def original(self) -> int:
        """Parameters of the matrices."""
        return sum(place.shape[0] * place.shape[1] for place in self.places.values())

    def parameters(self, absorbed: bool = False) -> int:
        """Parameters of the factors: sum of h R1 R2 R3, d R1, dv R2, n R3 (the denominator of the paper's rate)."""
        first, second = self.ranks
        columns = sum((stack.rank or len(stack.names)) * stack.heads * second for stack in self.stacks)
        small = self.width * second + sum(len(stack.names) * (stack.rank or 0) for stack in self.stacks)
        return small + (self.dim * columns if absorbed else (columns + self.dim) * first)


@dataclass(eq=False)
class TensorLLM(Method):
    """Partial Tucker (HOOI) of the tensor of all heads' q, k, v and o: shared U1, U2 and U3, no factor over heads.

    With grouped queries the matrices have different numbers of heads, and the paper's tensor does not exist. Without a
    stack rank U1 and U2 are shared by all head slices, and each slice has a core; `coupled` gives q with o, and k with
    v, a U3 each. Keys and values are not repeated for each query head, because a U3 would make the copies differ.

    Args:
        rank: r of the tied ranks (d r / dv, r, stack_rank), the same share of both modes; the paper's (h r, r, s)
            where d = h dv. None: half the head's width, unless `ranks` or `keep` is set.
        stack_rank: R3 beside `rank`; None: no factor on that mode, which loses nothing there.
        ranks: [R1, R2, R3], or [R1, R2] without R3; in place of `rank` and `stack_rank`.
        layers: numbers of layers, negative from the end; None: all.
        layout: "heads" cuts the heads as the paper defines them; "released" cuts consecutive parts of the model's
            width instead, as the published code does.
        matrices: the members of the tensor (table IV); the others of q, k, v and o stay dense.
        coupled: one stack factor for q and o and another for k and v.
        absorb: multiply core and U1 into one matrix where that has fewer parameters; the result is equal.
        seed: of columns of U1 that the tensor does not determine.
        calibration: "validation" (the task's validation split) or a text file, for errors of outputs in the report.
        weighted: approximate the outputs over the calibration data instead of the weights; the data is the validation
            split where `calibration` is None.
        damping: times the mean squared activation, the weight of input directions outside the calibration data.
        keep: the remaining share of the matrices' parameters; R1 and R2 are then chosen for each layer, by the
            singular values of its tensor, and a layer may stay dense.

    Raises:
        ConfigError: ranks that are given twice, or a list of ranks that is neither two nor three long.
    """

    rank: Rank | None = None
    stack_rank: Rank | None = None
    ranks: Annotated[list[Rank], MinLen(2)] | None = None
    layers: list[int] | None = None
    layout: Literal["heads", "released"] = "heads"
    matrices: Annotated[list[Literal["q", "k", "v", "o"]], MinLen(1)] | None = None
    coupled: bool = False
    absorb: bool = False
    sweeps: Annotated[int, Ge(1)] = 100
    tolerance: Annotated[float, Ge(0)] = 1e-5
    seed: Annotated[int, Ge(0)] = 0
    calibration: Literal["validation"] | str | None = None
    weighted: bool = False
    damping: Annotated[float, Gt(0)] = 0.01
    keep: Share | None = None

    def __post_init__(self) -> None:
        if self.keep is not None and (self.rank is not None or self.ranks is not None):
            raise ConfigError("compress.keep chooses the ranks; give it, or rank= or compress.ranks")
        if self.ranks is not None and (self.rank is not None or self.stack_rank is not None):
            raise ConfigError("compress.ranks replaces rank= and compress.stack_rank; give one of them")
        if self.ranks is not None and len(self.ranks) not in (2, 3):
            raise ConfigError(f"compress.ranks={list(self.ranks)}: expected [R1, R2, R3], or [R1, R2] without R3")
        if self.weighted and self.calibration is None:
            self.calibration = "validation"

    @property
    def names(self) -> list[str]:
        """Those of `matrices`, in the order of q, k, v and o."""
        return [name for name in ATTENTION if self.matrices is None or name in self.matrices]

    def units(self, model: nn.Module, layers: Sequence[Layer]) -> list[Unit]:
        return [
            self._unit(model, layer)
            for layer in self._layers(model, layers)
            if value_of(self.chosen, str(layer.attention))[0]
        ]

    def ladders(self, model: nn.Module, layers: Sequence[Layer]) -> list[Ladder]:
        self.units(model, layers)  # raises ConfigErrors
        return [self._ladder(model, layer) for layer in self._layers(model, layers)]

    def _layers(self, model: nn.Module, layers: Sequence[Layer]) -> list[Layer]:
        """The layers to compress. ConfigError: none, or one without attention."""
        chosen = chosen_layers(layers, self.layers)
        attending = [layer for layer in chosen if layer.attention is not None]
        if not attending or (self.layers is not None and len(attending) < len(chosen)):
            where = type(model).__name__ if not attending else next(x.path for x in chosen if x.attention is None)
            raise ConfigError(f"{where} has no attention with projections that are known: nothing to compress")
        return attending

    def _unit(self, model: nn.Module, layer: Layer) -> Unit:
        assert layer.attention is not None
        if reason := layer.refusals.get("attention"):
            raise ConfigError(reason)
        for name in self.names:
            refuse_compressed(model, layer.projections[name].path)
        sizes = self.sizes(layer)
        settings = settings_of(self, "layers", "rank", "stack_rank", "ranks")
        stacks = [(stack.names, stack.heads, stack.rank) for stack in sizes.stacks]
        settings |= {"ranks": sizes.ranks, "width": sizes.width, "stacks": stacks}
        reads = sorted({place.path for place in sizes.places.values()})
        if self.grams is not None:
            settings["calibration"] = self.grams.digest(reads)
        fit, outline = partial(self._fit, model, layer, sizes), partial(self._change, layer, sizes)
        return Unit(layer.attention, reads, settings, fit, outline)

    # --- sizes --------------------------------------------------------------------------------------------------

    def sizes(self, layer: Layer) -> Sizes:
        """The tensor of a layer and its ranks. ConfigError: a rank out of bounds, or heads of different widths."""
        places = {name: layer.projections[name] for name in self.names}
        if self.layout == "released":
            places = {name: _turned(place, str(layer.attention)) for name, place in places.items()}
        heads = {name: place.heads for name, place in places.items()}
        first = next(iter(places.values()))
        dim, width = _modes(first)
        if any(_modes(place) != (dim, width) for place in places.values()):
            shapes = ", ".join(f"{name} {_modes(place)}" for name, place in places.items())
            raise ConfigError(f"{layer.attention}: model and head widths differ ({shapes}): no common tensor")
        path = str(layer.attention)
        r1, r2, r3 = self._ranks(dim, width, path)
        if r1 > dim or r2 > width:
            setting = f"compress.ranks={self.ranks}" if self.ranks else f"rank={r2}"
            raise ConfigError(f"{setting}: {path} takes R1 1 to {dim} (model width) and R2 1 to {width} (head width)")
        stacks = self._stacks(heads, r3, path)
        for stack in stacks:
            if stack.rank is not None and stack.rank > (most := len(stack.names)):
                names = ", ".join(stack.names)
                raise ConfigError(f"the stack rank {stack.rank}: {path} takes 1 to {most} (matrices {names})")
        return Sizes(places, dim, width, (r1, r2), stacks)

    def _ranks(self, dim: int, width: int, path: str) -> tuple[int, int, int | None]:
        if self.chosen is not None and self.chosen.get(path):
            first, second = self.chosen[path]
            return first, second, self.stack_rank
        if self.ranks is not None:
            first, second, *third = self.ranks
            return first, second, third[0] if third else None
        rank = max(1, width // 2) if self.rank is None else self.rank
        return max(1, dim * rank // width), rank, self.stack_rank

    def _stacks(self, heads: Mapping[str, int], rank: int | None, where: str) -> tuple[Stack, ...]:
        if self.coupled:
            groups = [tuple(name for name in pair if name in heads) for pair in PAIRS]
            return tuple(Stack(names, heads[names[0]], rank) for names in groups if names)
        counts = dict.fromkeys(heads.values())
        if len(counts) > 1 and rank is not None:
            shown = ", ".join(f"{name} {count}" for name, count in heads.items())
            raise ConfigError(
                f"the stack rank {rank}: {where} has heads of different numbers ({shown}), which no one tensor has; "
                "leave it out, or give compress.coupled=true with 1 to 2, for q with o and for k with v"
            )
        return tuple(Stack(tuple(name for name in heads if heads[name] == h), h, rank) for h in counts)

    def _ladder(self, model: nn.Module, layer: Layer) -> Ladder:
        """All pairs of a grid of ranks, each with the error of truncated singular vectors, which HOOI then lowers."""
        sizes = self.sizes(layer)
        if next(model.parameters()).is_meta:
            rows, columns = (torch.linspace(0, 1, size + 1, device="cpu") for size in (sizes.dim, sizes.width))
            lost = 1 - rows[:, None] * columns
        else:
            lost = truncation_errors(_read_blocks(model, sizes), [stack.rank for stack in sizes.stacks]).cpu()
        steps = []
        for r1, r2 in itertools.product(grid(sizes.dim), grid(sizes.width)):
            at = replace(sizes, ranks=(r1, r2))
            count = min(at.parameters(), at.parameters(absorbed=True)) if self.absorb else at.parameters()
            steps.append(Step(count, float(lost[r1, r2]), [r1, r2]))
        return Ladder(str(layer.attention), sizes.original, steps)

    # --- decomposing --------------------------------------------------------------------------------------------

    def _change(self, layer: Layer, sizes: Sizes) -> Change:
        """The modules with any weights."""
        path = f"{layer.attention}.{FACTORS}"
        owner = HeadFactors(
            sizes.dim,
            sizes.width,
            sizes.ranks,
            [{"names": list(stack.names), "heads": stack.heads, "rank": stack.rank} for stack in sizes.stacks],
            {name: str(place.axis) for name, place in sizes.places.items()},
            self.absorb and sizes.parameters(absorbed=True) < sizes.parameters(),
        )
        proxies = {
            (layer.path, name): HeadProjection(path, name, place.shape[1], place.shape[0], place.bias)
            for name, place in sizes.places.items()
        }
        return Change({path: owner}, proxies)

    @torch.no_grad()
    def _fit(self, model: nn.Module, layer: Layer, sizes: Sizes, watch: Watch) -> Change:
        change = self._change(layer, sizes)
        places = sizes.places
        blocks = _read_blocks(model, sizes)
        decomposition = tucker(
            blocks,
            sizes.ranks,
            [stack.rank for stack in sizes.stacks],
            sweeps=self.sweeps,
            tolerance=self.tolerance,
            seed=self.seed,
            watch=partial(watch, "HOOI"),
        )
        (owner,) = change.modules.values()
        assert isinstance(owner, HeadFactors)
        report = {"error": decomposition.error, "errors": _named(sizes, decomposition.errors)}
        if self.calibration is not None:
            decomposition = self._calibrated(sizes, blocks, decomposition, watch)
            report["error"], errors = weight_errors(blocks, decomposition)
            report["errors"] = _named(sizes, errors)
            outputs = _named(sizes, output_errors(blocks, decomposition, *self._metrics(sizes, 0.0)))
            report["output_error"] = (sum(error**2 for error in outputs.values()) / len(outputs)) ** 0.5
            report["output_errors"] = outputs
        fill(owner, decomposition)
        for name, place in places.items():
            if (bias := place.read_bias(model)) is not None:
                proxy = change.projections[layer.path, name]
                assert isinstance(proxy, HeadProjection)
                proxy.double().load_state_dict({"bias": bias.double()})
        report |= {"forms": dict(sorted(owner.forms.items())), "history": decomposition.history}
        return Change(change.modules, change.projections, self._counted(sizes, owner) | report)

    def _calibrated(self, sizes: Sizes, blocks: list[Tensor], decomposition: Tucker, watch: Watch) -> Tucker:
        """The decomposition that approximates outputs, with `weighted`."""
        if self.grams is None:
            raise ConfigError("compress.calibration: there is no calibration data; leave it and compress.weighted out")
        if not self.weighted:
            return decomposition
        metrics = self._metrics(sizes, self.damping)
        return weighted_tucker(blocks, decomposition, *metrics, watch=partial(watch, "weighted"))

    def _metrics(self, sizes: Sizes, damping: float) -> tuple[Tensor | None, list[list[Tensor | None]]]:
        """Gram matrices of inputs along the first mode, and of those along the heads by matrix."""
        grams = {name: self.grams.of(place.path, damping) for name, place in sizes.places.items()}
        rows = next((grams[name] for name, place in sizes.places.items() if place.axis == "out"), None)
        columns = [
            [grams[name] if sizes.places[name].axis == "in" else None for name in stack.names] for stack in sizes.stacks
        ]
        return rows, columns

    def _counted(self, sizes: Sizes, owner: HeadFactors) -> dict[str, Any]:
        count = sum(parameter.numel() for parameter in owner.parameters())
        report = {
            "ranks": [*sizes.ranks, *{stack.rank for stack in sizes.stacks}],
            "parameters": count,
            "parameters_dense": sizes.original,
            "rate": sizes.original / count,
        }
        if not owner.absorbed and (absorbed := sizes.parameters(absorbed=True)) < count:
            report["rate_absorbed"] = sizes.original / absorbed
        return report

    def rank_of(self, report: Mapping[str, Any]) -> int | None:
        return None if self.ranks is not None or self.keep is not None else int(report["ranks"][1])


def _named(sizes: Sizes, errors: Sequence[Tensor]) -> dict[str, float]:
    """Errors by name of the matrix; errors: (n,) for each stack of n matrices."""
    matrices = {
        name: float(error)
        for stack, values in zip(sizes.stacks, errors, strict=True)
        for name, error in zip(stack.names, values, strict=True)
    }
    return {name: matrices[name] for name in sizes.places}


def _read_blocks(model: nn.Module, sizes: Sizes) -> list[Tensor]:
    """The tensor of each stack, (n, h, d, dv), in float64. DataError: a weight is not finite."""
    for place in sizes.places.values():
        if not place.read(model).isfinite().all():
            raise DataError(f"{place.path}: its weight has values that are not numbers or not finite")
    return [
        torch.stack([sizes.places[name].split(sizes.places[name].read(model)).double() for name in stack.names])
        for stack in sizes.stacks
    ]


def _modes(place: Projection) -> tuple[int, int]:
    """Length of the mode without heads, and width of a head."""
    return place.shape[1 if place.axis == "out" else 0], place.width


def _turned(place: Projection, where: str) -> Projection:
    """The matrix with its other axis cut into heads: the released code's layout."""
    if place.shape[0] != place.shape[1]:
        out, width = place.shape
        raise ConfigError(
            f"compress.layout=released: {where} has a projection of {out} x {width}; the published code needs square "
            "ones (no grouped queries, heads that fill the model's width)"
        )
    return replace(place, axis="in" if place.axis == "out" else "out")


@torch.no_grad()
def fill(owner: HeadFactors, decomposition: Tucker) -> None:
    """Set the factors of a module, in float64."""
    state: dict[str, Tensor] = {"u2": decomposition.u2}
    columns = []
    for i, (u3, core) in enumerate(zip(decomposition.u3, decomposition.cores, strict=True)):
        if u3 is not None:
            state[f"u3.{i}"] = u3
        if owner.absorbed:
            columns.append((decomposition.u1 @ core).permute(2, 0, 1, 3).flatten(1))  # (d, R3 h R2)
        else:
            state[f"cores.{i}"] = core
    state["u1"] = torch.cat(columns, 1) if owner.absorbed else decomposition.u1
    owner.double().load_state_dict(state)

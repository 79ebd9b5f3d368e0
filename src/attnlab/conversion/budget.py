"""Distribution of a cache over layers, by their errors at each size in a first pass through the original."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from attnlab.conversion.split import spaced

Sharing = Literal["measured", "budget", "equal", "same"]
STEPS = 64  # compared sizes of a layer's cache, at most


@dataclass(frozen=True)
class Survey:
    """A layer in a first pass through the original.

    Args:
        rope_dims: values of d_r, (n,).
        errors: predicted squared error of the attention's output for each of these and each r + d_r from 0 to 2 G D,
            (n, 2 G D + 1); infinite for impossible sizes.
        scores: the value of each component's rotation, (G, F), see :func:`attnlab.conversion.split.scores`.
        weight: of the layer's errors: one over the median squared size of the residual stream. In trained models the
            first position alone may be a thousand times larger than all others, and would decide a mean.
    """

    rope_dims: Tensor
    errors: Tensor
    scores: Tensor
    weight: float = 1.0

    @property
    def lost(self) -> Tensor:
        """The smallest weighted error at each r + d_r, (2 G D + 1,)."""
        return self.errors.amin(0) * self.weight


@dataclass(frozen=True)
class LayerPlan:
    """The cache of a layer.

    Args:
        total: r + d_r.
        rope_dims: the possible values of d_r; None: the conversion chooses.
        turned: the components that keep their rotation, (G, F) bool; None: the layer chooses.
        window: newest positions that the layer sees; None: those of the original.
        merged: whether MTLA merges the layer's latents.
        divergence: what this cache alone changes in the decoder's predictions, in nats; None: it was not measured.
    """

    total: int
    rope_dims: tuple[int, ...] | None = None
    turned: Tensor | None = None
    window: int | None = None
    merged: bool = True
    divergence: float | None = None

    @property
    def name(self) -> str:
        """The name of a choice among those of one layer."""
        return f"{self.window or 'all'}-{'merged' if self.merged else 'plain'}-{self.total}"

    def plain(self) -> dict[str, Any]:
        """The values of a JSON file."""
        return asdict(self) | {"turned": None if self.turned is None else self.turned.tolist()}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> LayerPlan:
        """The plan of the values that :meth:`plain` gives."""
        ropes, turned = plain["rope_dims"], plain["turned"]
        changed = {
            "rope_dims": None if ropes is None else tuple(ropes),
            "turned": None if turned is None else torch.tensor(turned, dtype=torch.bool),
        }
        return cls(**{**plain, **changed})


def distribute(lost: Sequence[Tensor], totals: Sequence[int], least: Sequence[int]) -> list[int]:
    """The sizes of the layers with the smallest sum of errors at the sum of `totals`.

    Sizes differ from `totals` by multiples of an even step (MTLA's latents are even), at most `STEPS` in a layer. Among
    these the choice is exact: cost(l, s) = min_k cost(l - 1, s - k) + lost_l(k) over all layers l and sums s. A greedy
    choice by marginal gain would need convex errors, which these are not at the end of a rotary component.

    Args:
        lost: of each layer, the error at sizes 0, 1, 2, ..., (sizes,).
        totals: the sizes of equal shares.
        least: the smallest sizes.
    """
    step = max(1, -(-max(len(errors) - 1 for errors in lost) // STEPS))
    step += step % 2
    below = [(total - low) // step for total, low in zip(totals, least, strict=True)]
    ranges = [
        torch.arange(total - down * step, len(errors), step)
        for errors, total, down in zip(lost, totals, below, strict=True)
    ]
    steps = [list(enumerate(errors[sizes].tolist())) for errors, sizes in zip(lost, ranges, strict=True)]
    return [int(sizes[number]) for sizes, number in zip(ranges, cheapest(steps, sum(below), fill=True), strict=True)]


def cheapest(options: Sequence[Sequence[tuple[int, float]]], total: int, *, fill: bool = False) -> list[int]:
    """The number of an option of each layer, with the smallest sum of errors at a sum of sizes of at most `total`.

    cost(l, s) = min_k cost(l - 1, s - size_lk) + error_lk over all layers l, options k and sums s.

    Args:
        options: the size and the error of each option of each layer; some of them fit `total`.
        fill: whether the sizes sum to `total` itself.
    """
    unit = math.gcd(total, *(size for layer in options for size, _ in layer)) or 1
    room, chosen = total // unit, []
    cost = torch.zeros(room + 1, dtype=torch.float64)  # of the layers before, by the sum of sizes
    cost[1:] = math.inf if fill else 0.0
    for layer in options:
        tried = cost.new_full((len(layer), room + 1), math.inf)
        for row, (size, error) in zip(tried, layer, strict=True):
            if size <= total:
                row[size // unit :] = cost[: room + 1 - size // unit] + error
        cost, best = tried.min(0)
        chosen.append(best.short())
    numbers: list[int] = []
    for layer, best in zip(reversed(options), reversed(chosen), strict=True):
        numbers.append(int(best[room]))
        room -= layer[numbers[-1]][0] // unit
    return numbers[::-1]


def near(survey: Survey, total: int, valid: Sequence[int]) -> tuple[int, ...]:
    """About five values of d_r around the best one of a survey at r + d_r = `total`, from all `valid` ones."""
    tried = survey.rope_dims.tolist()
    best = int(survey.errors[:, total].argmin())
    low, high = tried[max(best - 1, 0)], tried[min(best + 1, len(tried) - 1)]
    between = [rope for rope in valid if low <= rope <= high]
    return tuple(sorted({*between[:: max(1, len(between) // 4)], tried[best]}))


def same(surveys: Sequence[Survey], total: int, rotary: str) -> list[LayerPlan]:
    """Plans with the same d_r, r and rotary frequencies for all layers, which have one shape.

    Components are chosen for "score", "standard" and "two_norm"; the other methods choose the same ones in every layer.
    """
    first = surveys[0]
    errors = torch.stack([survey.errors[:, total] * survey.weight for survey in surveys]).sum(0)
    rope = int(first.rope_dims[int(errors.argmin())])
    turned = None
    if rotary in ("score", "standard", "two_norm"):
        scores = torch.stack([survey.scores * survey.weight for survey in surveys]).sum(0)
        turned = torch.zeros(scores.shape, dtype=torch.bool)
        if rotary == "standard":
            turned[0, spaced(scores[0], rope // 2)] = True
        elif rotary == "score":
            turned.view(-1)[scores.flatten().topk(rope // 2).indices] = True
        else:
            turned.scatter_(1, scores.topk(rope // 2 // len(scores), -1).indices, True)
    return [LayerPlan(total, (rope,), turned)] * len(surveys)

"""Ranks from a budget: `compress.keep=0.5` keeps half of the parameters of the matrices that a method compresses.

Each layer has steps, from its smallest ranks to the dense layer. Steps on the lower convex hull of (parameters, error)
are taken by falling gain per parameter, the optimum for the hulls; the rest of the budget goes to the steps that lower
the error most. Errors are relative squared errors of a layer's weights, on the meta device those of noise.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from attnlab.compression.methods.base import Ladder, Method, Step
from attnlab.errors import ConfigError
from attnlab.pretrained.base import Layer

STEPS = 32  # ranks of a matrix from which a budget chooses
ROUNDING = 1e-12  # smaller differences of relative squared errors count as zero


def with_budget(method: Method, model: nn.Module, layers: Sequence[Layer]) -> Method:
    """Return the method with ranks for each layer, if it has a budget.

    ConfigError: the budget is below the smallest ranks, or the method's ranks cannot be chosen.
    """
    if method.keep is None:
        return method
    budgeted = copy.copy(method)
    if method.keep_of == "multiply_adds":
        budgeted.chosen = method.rated(model, layers)
    else:
        budgeted.chosen = allocate(method.ladders(model, layers), method.keep)
    return budgeted


def allocate(ladders: Sequence[Ladder], keep: float) -> dict[str, Any]:
    """Choose a step's value for each ladder, by path, with at most `keep` (0 to 1) of all dense parameters.

    ConfigError: the smallest steps exceed the budget.
    """
    hulls = {ladder.path: hull([*ladder.steps, Step(ladder.dense, 0.0, None)]) for ladder in ladders}
    total = sum(ladder.dense for ladder in ladders)
    left = int(keep * total) - sum(steps[0].parameters for steps in hulls.values())
    if left < 0:
        least = math.ceil(10_000 * sum(steps[0].parameters for steps in hulls.values()) / total) / 10_000
        raise ConfigError(
            f"compress.keep={keep}: the smallest ranks keep {least:.4f} of the parameters; expected {least:.4f} to 1"
        )
    chosen = {path: steps[0] for path, steps in hulls.items()}
    gains = [
        ((before.error - after.error) / (after.parameters - before.parameters), path, i)
        for path, steps in hulls.items()
        for i, (before, after) in enumerate(zip(steps, steps[1:], strict=False))
    ]
    full: set[str] = set()  # ladders whose next step exceeds the budget
    for _, path, i in sorted(gains, key=lambda gain: -gain[0]):  # gains fall along a hull: its steps stay in order
        before, after = hulls[path][i : i + 2]
        if path in full or after.parameters - before.parameters > left:
            full.add(path)
            continue
        left -= after.parameters - before.parameters
        chosen[path] = after
    while True:  # the rest goes to the steps, on the hull or not, that lower the error most
        points = [
            (step.error - now.error, step.parameters - now.parameters, ladder.path, step)
            for ladder in ladders
            for now in [chosen[ladder.path]]
            for step in (*ladder.steps, Step(ladder.dense, 0.0, None))
            if step.parameters - now.parameters <= left and step.error < now.error - ROUNDING
        ]
        if not points:
            return {path: step.value for path, step in chosen.items()}
        _, more, path, step = min(points, key=lambda point: point[:3])
        chosen[path] = step
        left -= more


def hull(steps: Sequence[Step]) -> list[Step]:
    """The lower convex hull of (parameters, error), by rising parameters and falling errors."""
    points: list[Step] = []
    for step in sorted(steps, key=lambda step: (step.parameters, step.error)):
        if points and step.error >= points[-1].error:
            continue
        while len(points) > 1 and _slope(points[-2], points[-1]) >= _slope(points[-1], step):
            points.pop()
        points.append(step)
    return points


def _slope(a: Step, b: Step) -> float:
    return (b.error - a.error) / (b.parameters - a.parameters)


def grid(most: int) -> list[int]:
    """At most 32 evenly spaced ranks from 1 to `most`, including both."""
    if most <= STEPS:
        return list(range(1, most + 1))
    return sorted({1 + round(i * (most - 1) / (STEPS - 1)) for i in range(STEPS)})


def even(total: int, count: int) -> list[int]:
    """A total as `count` shares that differ by at most 1, the larger ones first."""
    return [total // count + (i < total % count) for i in range(count)]


def value_of(chosen: Mapping[str, Any] | None, path: str) -> tuple[bool, Any]:
    """Whether a layer is compressed, and its entry in `chosen`; (True, None) without a budget."""
    return (True, None) if chosen is None else (chosen[path] is not None, chosen[path])

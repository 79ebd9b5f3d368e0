"""On which text a conversion is calibrated, and how the converted model is trained to do as the original did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, MinLen

from attnlab.config.bounds import TextFile, bounded

Objective = Literal["layers", "logits", "text"]


@bounded
@dataclass(frozen=True)
class Calibration:
    """Texts whose statistics decide what a conversion leaves out.

    Args:
        tokens: of the training split, from its beginning.
        window: tokens of a text, which is read by itself.
        file: a text file in place of the training split; None: none.
    """

    tokens: Annotated[int, Ge(2)] = 65536
    window: Annotated[int, Ge(2), Le(1_048_576)] = 512
    file: TextFile | None = None


@bounded
@dataclass(frozen=True)
class Healing:
    """Training of a converted model, with the original as its teacher.

    The values are those of `task.train`, `task.optimizer` and `task.schedule` unless the command line sets these.

    Args:
        steps: updates.
        tokens: of an update; a multiple of `task.data.window`.
        lr: highest learning rate.
        warmup: updates in which it rises.
        objective: what is minimised, one after the other. "layers": the squared error of each attention's output on
            the teacher's inputs, over the output's variance; "logits": the Kullback-Leibler divergence from the
            teacher's distribution; "text": the negative log-probability of the text, without a teacher.
        share: of the updates that the first of two objectives has.
        trained: which weights: those of attention, or all.
    """

    steps: Annotated[int, Ge(1)] = 250
    tokens: Annotated[int, Ge(1)] = 2048
    lr: Annotated[float, Gt(0)] = 1e-3
    warmup: Annotated[int, Ge(1)] = 20
    objective: Annotated[list[Objective], MinLen(1)] | None = None
    share: Annotated[float, Gt(0), Le(1)] = 0.5
    trained: Literal["attention", "all"] = "attention"

    @property
    def objectives(self) -> list[Objective]:
        """`objective`, or the default."""
        return list(self.objective) if self.objective is not None else ["layers", "logits"]

    def at(self, progress: float) -> Objective:
        """The objective of an update; `progress`: share of the updates that are done, 0 to 1."""
        objectives = self.objectives
        if len(objectives) == 1 or progress < self.share:
            return objectives[0]
        rest = (progress - self.share) / max(1 - self.share, 1e-9)
        return objectives[1 + min(int(rest * (len(objectives) - 1)), len(objectives) - 2)]

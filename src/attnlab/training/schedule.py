"""Learning-rate schedules that torch does not have."""

import math
from abc import abstractmethod
from typing import Annotated, Any

from annotated_types import Ge, Le
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

Updates = Annotated[int, Ge(1)]
Share = Annotated[float, Ge(0), Le(1)]


class _Warmup(LambdaLR):
    """Linear warm-up to the optimizer's rate over `warmup_steps` updates, then :meth:`after`.

    A resumed run continues the number of updates with its own settings: it may be longer or have another rate.
    """

    warmup_steps: int

    def factor(self, step: int) -> float:
        """The share of the highest rate after `step` updates."""
        at = step + 1
        return at / self.warmup_steps if at <= self.warmup_steps else self.after(at)

    @abstractmethod
    def after(self, at: int) -> float:
        """The share of the highest rate at update `at`, counted from 1, when the warm-up is over."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        settings = ("warmup_steps", "total_steps", "floor", "base_lrs")
        super().load_state_dict({key: value for key, value in state_dict.items() if key not in settings})
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):  # restored before this
            group["lr"], group["initial_lr"] = base * self.lr_lambdas[0](self.last_epoch), base


class InverseSquareRoot(_Warmup):
    """Linear warm-up to the optimizer's rate over `warmup_steps` updates, then rate * sqrt(warmup_steps / step).

    `floor` is the lowest rate after the warm-up as a share of the highest. `total_steps` is not used.
    """

    def __init__(
        self, optimizer: Optimizer, warmup_steps: Updates, total_steps: int | None = None, floor: Share = 0.0
    ) -> None:
        self.warmup_steps, self.floor = warmup_steps, floor
        super().__init__(optimizer, self.factor)

    def after(self, at: int) -> float:
        return max(self.floor, (self.warmup_steps / at) ** 0.5)


class WarmupCosine(_Warmup):
    """Linear warm-up to the optimizer's rate, then half a cosine down to `floor` times it at `total_steps`.

    ValueError: `total_steps` is None or not positive: a run of unknown length has no such schedule.
    """

    def __init__(
        self, optimizer: Optimizer, warmup_steps: Updates, total_steps: int | None = None, floor: Share = 0.0
    ) -> None:
        if total_steps is None or total_steps <= 0:
            raise ValueError("a cosine schedule needs a run of known length: set task.train.max_steps or max_epochs")
        self.warmup_steps, self.total_steps, self.floor = warmup_steps, total_steps, floor
        super().__init__(optimizer, self.factor)

    def after(self, at: int) -> float:
        done = min(1.0, (at - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done))

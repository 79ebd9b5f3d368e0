"""Schedules against their closed forms."""

import math

import pytest
import torch

from attnlab.training.schedule import InverseSquareRoot, WarmupCosine


def rates(schedule: torch.optim.lr_scheduler.LRScheduler, steps: int) -> list[float]:
    values = []
    for _ in range(steps):
        values.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.optimizer.step()
        schedule.step()
    return values


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)


def test_inverse_square_root() -> None:
    shares = rates(InverseSquareRoot(optimizer(), 4), 16)
    assert shares[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert shares[15] == pytest.approx(2.0 * math.sqrt(4 / 16))


def test_cosine_ends_at_its_floor() -> None:
    shares = rates(WarmupCosine(optimizer(), 2, 10, floor=0.1), 10)
    assert shares[:2] == pytest.approx([1.0, 2.0])
    assert shares[5] == pytest.approx(2 * (0.1 + 0.9 * 0.5))
    assert shares[9] == pytest.approx(0.2)


def test_a_run_made_longer_continues_with_the_longer_schedule() -> None:
    short = WarmupCosine(optimizer(), 2, 10)
    rates(short, 10)
    longer = WarmupCosine(optimizer(), 2, 20)
    longer.load_state_dict(short.state_dict())
    longer.step()
    assert longer.last_epoch == 11
    assert longer.get_last_lr()[0] == pytest.approx(2 * longer.factor(11))
    assert longer.factor(11) > 0.4


def test_a_resumed_run_takes_the_rate_it_was_given() -> None:
    before = WarmupCosine(optimizer(), 2, 10)
    rates(before, 5)
    changed = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=4.0)
    after = WarmupCosine(changed, 2, 10)
    changed.load_state_dict(before.optimizer.state_dict())  # the trainer's order: optimiser, then schedule
    after.load_state_dict(before.state_dict())
    assert changed.param_groups[0]["lr"] == pytest.approx(4 * after.factor(5))
    after.step()
    assert changed.param_groups[0]["lr"] == pytest.approx(4 * after.factor(6))


def test_a_cosine_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="known length"):
        WarmupCosine(optimizer(), 2, None)

"""The running statistics of BatchNorm that several processes agree on are those of one."""

from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from attnlab.training.batch_norm import RunningStatistics, batch_norms, frozen_statistics


def model() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), nn.BatchNorm1d(2, momentum=0.3)).double()
    model(torch.randn(9, 3, dtype=torch.float64))
    return model


@pytest.mark.parametrize("counts", [(2, 2), (3, 2, 2), (1, 0, 1)])
def test_ranks_end_with_the_statistics_of_one_process(counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank's part of a collective sum is recorded first; then each rank gets the sum of all."""
    torch.manual_seed(2)
    batches = [torch.randn(7, 3, dtype=torch.float64) for _ in range(sum(counts))]
    alone = model()
    for batch in batches:
        alone(batch)
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: len(counts))
    sums: list[list[Tensor]] = []

    def run(rank: int, reduce: Any) -> nn.Module:
        monkeypatch.setattr(distributed, "get_rank", lambda: rank)
        monkeypatch.setattr(distributed, "all_reduce", reduce)
        copy = model()
        statistics = RunningStatistics(copy)
        statistics.begin_update()
        for batch in batches[sum(counts[:rank]) : sum(counts[: rank + 1])]:
            copy(batch)
            statistics.add_batch()
        with frozen_statistics(copy):
            copy(batches[0])  # a batch that does not count
        statistics.end_update()
        return copy

    totals = torch.tensor(counts)
    for rank in range(len(counts)):  # first pass: what each rank contributes, given the counts of all
        parts: list[Tensor] = []

        def contribute(tensor: Tensor, parts: list[Tensor] = parts) -> None:
            if tensor.dtype == torch.int64:
                tensor.copy_(totals)
            else:
                parts.append(tensor.clone())

        run(rank, contribute)
        sums.append(parts)
    total = torch.stack([parts[0] for parts in sums]).sum(0)

    def reduce(tensor: Tensor) -> None:
        tensor.copy_(totals if tensor.dtype == torch.int64 else total)

    for rank in range(len(counts)):
        state = run(rank, reduce).state_dict()
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-14, msg=name)


def test_one_process_and_other_layers_change_nothing() -> None:
    plain = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.BatchNorm1d(4, track_running_stats=False))
    assert batch_norms(plain) == {}
    norm = model()
    statistics = RunningStatistics(norm)
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    statistics.begin_update()
    statistics.add_batch()
    statistics.end_update()
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())

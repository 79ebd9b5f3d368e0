"""The running statistics of BatchNorm of several processes are those of one process."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnlab.config.check import compose
from attnlab.errors import ConfigError
from attnlab.training.batch_norm import RunningStatistics, batch_norms, frozen_statistics
from attnlab.training.trainer import fit, process_count
from tests.metrics.processes import in_processes


def model() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), nn.BatchNorm1d(2, momentum=0.3)).double()
    model(torch.randn(9, 3, dtype=torch.float64))
    return model


def batches(count: int) -> list[Tensor]:
    torch.manual_seed(2)
    return [torch.randn(7, 3, dtype=torch.float64) for _ in range(count)]


def trained(rank: int, world: int, counts: tuple[int, ...]) -> dict[str, Tensor]:
    """The values of a rank after an update in which the ranks took `counts` batches."""
    part = model()
    statistics = RunningStatistics(part)
    statistics.begin_update()
    for batch in batches(sum(counts))[sum(counts[:rank]) : sum(counts[: rank + 1])]:
        part(batch)
        statistics.add_batch()
    with frozen_statistics(part):
        part(batches(1)[0])  # a batch that does not count
    statistics.end_update()
    return part.state_dict()


def test_ranks_end_with_the_statistics_of_one_process(tmp_path: Path) -> None:
    counts = (3, 0, 2)
    alone = model()
    for batch in batches(sum(counts)):
        alone(batch)
    for state in in_processes(len(counts), tmp_path, trained, counts):
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-14, msg=name)


def test_layers_without_running_statistics_do_not_count() -> None:
    plain = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.BatchNorm1d(4, track_running_stats=False))
    assert batch_norms(plain) == {}


def test_batch_norm_needs_batches_that_no_number_of_processes_changes(tmp_path: Path) -> None:
    cfg = compose("task=mustc", "hardware=cpu")
    module: Any = SimpleNamespace(model=nn.Sequential(nn.BatchNorm1d(3)))
    data: Any = SimpleNamespace(batches_per_update=lambda _: 1, same_batches=lambda _: False)
    with pytest.raises(ConfigError, match=r"the model has BatchNorm \(0\).*set task.train.batch.split=false"):
        fit(cfg, tmp_path, data, module, monitor="val_loss", better="min", resume=None)
    data.same_batches = data.divides_batches = lambda _: True
    with pytest.raises(ConfigError, match=r"0 is a BatchNorm1d, which has statistics of one process alone"):
        fit(cfg, tmp_path, data, module, monitor="val_loss", better="min", resume=None)


def test_the_number_of_processes() -> None:
    assert process_count(compose("hardware=cpu")) == 1
    assert process_count(compose("hardware=ddp", "hardware.devices=2", "hardware.num_nodes=2")) == 4
    assert process_count(compose("hardware=cpu", "hardware.devices=auto")) == 1

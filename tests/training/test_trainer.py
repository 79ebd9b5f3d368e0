"""What fitting refuses, and what the trainer is built with."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from attnlab.config.check import compose
from attnlab.errors import ConfigError
from attnlab.training.trainer import fit, process_count


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

"""The loader of every task: workers and pinned memory follow from the device."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab.config.batch import Share
from attnlab.data.base import Data
from attnlab.errors import DataError


class Numbers(Data):
    """Items 0 to 9; item 7 cannot be read."""

    def share(self, processes: int) -> Share:
        return Share(1, 1)

    def held_out_sizes(self, stage: str | None) -> dict[str, int]:
        return {}

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        if index == 7:
            raise DataError("/corpus/7.wav: not a recording")
        return index


def on(device: str, cores: int, monkeypatch: pytest.MonkeyPatch, devices: int = 1) -> Numbers:
    data = Numbers()
    data.trainer = SimpleNamespace(  # type: ignore[assignment]
        strategy=SimpleNamespace(root_device=torch.device(device)), num_devices=devices
    )
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(cores)), raising=False)
    return data


@pytest.mark.parametrize(
    ("device", "cores", "devices", "num_workers", "expected"),
    [
        ("cpu", 16, 1, None, 0),
        ("cpu", 16, 1, 3, 3),
        ("cuda", 16, 1, None, 8),
        ("cuda", 16, 8, None, 2),
        ("cuda", 4, 8, None, 1),
        ("cuda", 16, 1, 0, 0),
    ],
)
def test_workers_and_pinned_memory(
    device: str, cores: int, devices: int, num_workers: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = on(device, cores, monkeypatch, devices)
    data.num_workers = num_workers
    loader: Any = data.loader(data, [[0, 1]])  # type: ignore[arg-type]
    assert loader.num_workers == expected and loader.pin_memory == (device == "cuda")
    assert loader.prefetch_factor == (4 if expected else None) and not loader.persistent_workers


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_worker_cannot_read_is_one_line(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = on("cpu", 2, monkeypatch)
    data.num_workers = workers
    with pytest.raises(DataError) as caught:
        for batch in data.loader(data, [[1, 2], [3, 7]]):  # type: ignore[arg-type]
            assert isinstance(batch, Tensor) and batch.tolist() == [1, 2]
    assert str(caught.value) == "/corpus/7.wav: not a recording"

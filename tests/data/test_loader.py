"""The loader of every task: workers and pinned memory follow from the device."""

from typing import Any

import pytest

from attnlab.config.batch import Share
from attnlab.data.base import Data
from tests.data.conftest import attach


class Numbers(Data):
    def share(self, processes: int) -> Share:
        return Share(1, 1)

    def held_out_sizes(self, stage: str | None) -> dict[str, int]:
        return {}


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
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(cores)), raising=False)
    data = Numbers()
    attach(data, device, num_devices=devices)
    data.num_workers = num_workers
    loader: Any = data.loader(range(10), [[0, 1]])  # type: ignore[arg-type]
    assert loader.num_workers == expected and loader.pin_memory == (device == "cuda")
    assert loader.prefetch_factor == (4 if expected else None) and not loader.persistent_workers

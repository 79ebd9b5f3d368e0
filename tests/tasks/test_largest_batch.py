"""hardware.find_batch: the search, what it stores, and that an update stays as it is."""

import logging
from pathlib import Path
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

import pytest
import torch

from attnlab.config.check import compose
from attnlab.errors import ConfigError
from attnlab.run.identity import recipe
from attnlab.tasks import largest_batch, memory
from attnlab.tasks.base import task_of
from attnlab.training.batch_finder import largest

LINES = [
    "task=wikitext2", "hardware=cpu", "task.model.d_model=16", "task.attention_heads=2", "task.model.num_layers=1",
    "task.data.window=32", "task.train.batch.tokens=2048", "task.data.batch_size=1", "hardware.find_batch=true",
]  # fmt: skip


@pytest.mark.parametrize(
    ("least", "most", "room", "expected"),
    [
        (1, 64, 100, 64),
        (1, 64, 64, 64),
        (1, 64, 13, 13),
        (1, 64, 1, 1),
        (1, 64, 0, None),
        (1, 1, 5, 1),
        (100, 4000, 99, None),
    ],
)
def test_the_search(least: int, most: int, room: int, expected: int | None) -> None:
    assert largest(lambda size: size <= room, least, most) == expected


@pytest.mark.parametrize("room", [*range(17, 400, 23), 3999, 4000, 5000])
def test_a_long_search_ends_close_below_the_limit(room: int) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= room

    found = largest(fits, 1, 4000)
    assert found is not None and room * 0.93 - 1 <= found <= room or found == 4000
    assert len(tried) == len(set(tried)) <= 18 and found in tried


@pytest.mark.slow
def test_what_is_found_is_used_and_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    own = compose(*LINES, f"cache_dir='{tmp_path}'", "hardware.find_batch_gib=0.006")
    record: dict[str, Any] = {}
    cfg = largest_batch.with_largest_batch(task_of(own), record)
    size = cfg.task.data.batch_size
    assert 1 < size < 64 and own.task.data.batch_size == 1 and recipe(cfg) == recipe(own)
    assert record["found_batch"] == {"key": "task.data.batch_size", "size": size}
    assert any("does not fit in 0.006 GiB" in line for line in caplog.messages)
    found = memory.needed(task_of(cfg), size)
    assert found is not None and 0.7 * 0.006 < found.total / 2**30 <= 0.0063
    caplog.clear()
    again = largest_batch.with_largest_batch(task_of(own), {})
    assert again.task.data.batch_size == size and len(caplog.messages) == 1 and "found before" in caplog.messages[0]
    (file,) = (tmp_path / "batches").glob("*.json")
    file.write_text("{")
    assert largest_batch.with_largest_batch(task_of(own), {}).task.data.batch_size == size


def test_what_the_size_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    plain = compose(*LINES, "hardware.find_batch_gib=1")
    key = largest_batch._key(plain, cpu)
    monkeypatch.setattr(largest_batch, "_device", lambda device: "H200, 143771 MiB")
    assert largest_batch._key(plain, cpu) != key


@pytest.mark.slow
def test_each_setting_that_counts_has_its_own_file() -> None:
    cpu = torch.device("cpu")
    others = ("task.model.num_layers=2", "hardware.precision=bf16-mixed", "hardware.gradient_checkpointing=true")
    keys = {
        largest_batch._key(compose(*LINES, "hardware.find_batch_gib=1", other), cpu) for other in ("seed=2", *others)
    }
    assert len(keys) == 4 and largest_batch._key(compose(*LINES, "hardware.find_batch_gib=1"), cpu) in keys


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the CPU has no memory of its own to fill; give hardware.find_batch_gib"):
        compose(*LINES)
    small = compose(*LINES, f"cache_dir='{tmp_path}'", "hardware.find_batch_gib=0.0001")
    with pytest.raises(ConfigError, match=r"not even task.data.batch_size=1 fits; take a smaller model"):
        largest_batch.with_largest_batch(task_of(small), {})

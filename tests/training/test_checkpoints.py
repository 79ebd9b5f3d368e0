"""Checkpoints on a disk that is full, and where the data of a resumed run begin."""

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnlab.errors import WriteError
from attnlab.training.checkpoints import AtomicCheckpointIO, Resume
from tests.run.test_files import files_up_to

SMALL, LARGE = {"a": torch.zeros(8)}, {"a": torch.zeros(1 << 16)}


def test_the_old_checkpoint_stays_where_the_new_one_cannot_be_written(tmp_path: Path) -> None:
    path, store = tmp_path / "last.ckpt", AtomicCheckpointIO()
    store.save_checkpoint(SMALL, path)
    with files_up_to(1 << 14), pytest.raises(WriteError) as caught:
        store.save_checkpoint(LARGE, path)
    assert caught.value.errno == errno.EFBIG and str(path) in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["SHA256SUMS", "last.ckpt"]
    assert torch.load(path, weights_only=True)["a"].shape == (8,)


def counted(number: int) -> dict[str, Any]:
    return {
        name: dict.fromkeys(("ready", "started", "processed", "completed"), number) for name in ("total", "current")
    }


@pytest.mark.parametrize(
    ("before", "now", "last", "more"),
    [(4, 4, False, 0), (4, 1, False, 0), (4, 2, False, 3), (1, 8, False, 0), (3, 2, False, 0), (2, 2, True, 0)],
)
def test_an_update_stays_an_update(before: int, now: int, last: bool, more: int) -> None:
    """After the last batch of an epoch the next epoch begins. An update that was not complete begins again."""
    data: Any = SimpleNamespace(resume_at=(0, 0))
    progress, epochs = counted(5 * before + more) | {"is_last_batch": last}, counted(3)
    loops = {"fit_loop": {"epoch_loop.batch_progress": progress, "epoch_progress": epochs}}
    state = {"epoch": 3, "loops": loops, "batches_per_update": before}
    trainer: Any = SimpleNamespace(accumulate_grad_batches=now, fit_loop=SimpleNamespace())
    Resume(data).on_load_checkpoint(trainer, None, state)  # type: ignore[arg-type]
    assert data.resume_at == ((4, 0) if last else (3, 5 * now))
    assert set(progress["total"].values()) == {5 * now}
    assert set(progress["current"].values()) == {0 if last else 5 * now}
    for counts in epochs.values():
        assert tuple(counts.values()) == ((4, 4, 4, 4) if last else (4, 4, 3, 3))

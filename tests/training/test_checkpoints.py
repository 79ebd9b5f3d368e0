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


def checkpoint(updates: int, batches: int, last: bool) -> dict[str, Any]:
    counts = {"ready": updates * batches, "started": updates * batches, "processed": updates * batches}
    counts["completed"] = updates * batches
    progress = {"total": {**counts}, "current": {**counts}, "is_last_batch": last}
    loops = {"fit_loop": {"epoch_loop.batch_progress": progress}}
    return {"epoch": 3, "loops": loops, "batches_per_update": batches}


@pytest.mark.parametrize(
    ("before", "now", "last"),
    [(4, 4, False), (4, 1, False), (4, 2, False), (1, 8, False), (3, 2, False), (2, 2, True)],
)
def test_an_update_stays_an_update(before: int, now: int, last: bool) -> None:
    """After the last batch of an epoch the next epoch begins."""
    data: Any = SimpleNamespace(resume_at=(0, 0))
    state = checkpoint(5, before, last)
    trainer: Any = SimpleNamespace(accumulate_grad_batches=now)
    Resume(data).on_load_checkpoint(trainer, None, state)  # type: ignore[arg-type]
    assert data.resume_at == ((0, 0) if last else (3, 5 * now))
    progress = state["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        assert set(counts.values()) == {5 * now}

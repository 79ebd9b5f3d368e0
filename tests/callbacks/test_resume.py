"""Where the data of a resumed run begin, also with another number of processes."""

from types import SimpleNamespace
from typing import Any

import pytest

from attnlab.callbacks.checkpoints import Resume


def checkpoint(updates: int, batches: int, last: bool) -> dict[str, Any]:
    counts = {"ready": updates * batches, "started": updates * batches, "processed": updates * batches}
    counts["completed"] = updates * batches
    progress = {"total": {**counts}, "current": {**counts}, "is_last_batch": last}
    loops = {"fit_loop": {"epoch_loop.batch_progress": progress}}
    return {"epoch": 3, "loops": loops, "batches_per_update": batches}


@pytest.mark.parametrize(("before", "now"), [(4, 4), (4, 1), (4, 2), (1, 8), (3, 2)])
def test_an_update_stays_an_update(before: int, now: int) -> None:
    data: Any = SimpleNamespace(resume_at=(0, 0))
    found = checkpoint(5, before, last=False)
    trainer: Any = SimpleNamespace(accumulate_grad_batches=now)
    Resume(data).on_load_checkpoint(trainer, None, found)  # type: ignore[arg-type]
    assert data.resume_at == (3, 5 * now)
    progress = found["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        assert set(counts.values()) == {5 * now}


def test_a_whole_epoch_is_not_resumed_in_its_middle() -> None:
    data: Any = SimpleNamespace(resume_at=(0, 0))
    trainer: Any = SimpleNamespace(accumulate_grad_batches=2)
    Resume(data).on_load_checkpoint(trainer, None, checkpoint(5, 2, last=True))  # type: ignore[arg-type]
    assert data.resume_at == (0, 0)


def test_an_older_checkpoint_has_the_batches_of_now() -> None:
    data: Any = SimpleNamespace(resume_at=(0, 0))
    found = checkpoint(5, 2, last=False)
    del found["batches_per_update"]
    Resume(data).on_load_checkpoint(SimpleNamespace(accumulate_grad_batches=2), None, found)  # type: ignore[arg-type]
    assert data.resume_at == (3, 10)

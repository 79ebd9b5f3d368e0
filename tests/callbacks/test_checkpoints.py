"""Checkpoints on a disk that is full."""

import errno
import io
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from attnlab.callbacks.checkpoints import AtomicCheckpointIO, BestAndLast
from attnlab.errors import WriteError

SMALL, LARGE = {"a": torch.zeros(8)}, {"a": torch.zeros(1 << 16)}


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A write beyond `size` bytes of a file fails inside the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_the_old_checkpoint_stays_where_the_new_one_cannot_be_written(tmp_path: Path) -> None:
    path, store = tmp_path / "last.ckpt", AtomicCheckpointIO()
    store.save_checkpoint(SMALL, path)
    with files_of_at_most(1 << 14), pytest.raises(WriteError) as caught:
        store.save_checkpoint(LARGE, path)
    assert caught.value.errno == errno.EFBIG and str(path) in str(caught.value)
    assert sorted(found.name for found in tmp_path.iterdir()) == ["SHA256SUMS", "last.ckpt"]
    assert torch.load(path, weights_only=True)["a"].shape == (8,)


def test_a_full_disk_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    def opened(self: Path, mode: str = "r", *rest: Any, **more: Any) -> Any:
        return Full() if mode == "wb" else real(self, mode, *rest, **more)

    real = Path.open
    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(WriteError, match=r"last\.ckpt: cannot be written \(No space left on device\); disk full"):
        AtomicCheckpointIO().save_checkpoint(LARGE, tmp_path / "last.ckpt")


class Trainer:
    """The part of Lightning's that `BestAndLast` uses here."""

    is_global_zero = True

    def save_checkpoint(self, path: Path) -> None:
        raise WriteError(errno.ENOSPC, "No space left on device", str(path))


@pytest.mark.parametrize("noted", [False, True])
def test_there_is_something_to_resume_where_the_first_last_checkpoint_has_no_room(tmp_path: Path, noted: bool) -> None:
    best = BestAndLast(tmp_path, monitor="val_loss")
    AtomicCheckpointIO().save_checkpoint(SMALL, tmp_path / "best.ckpt")
    best.best_model_path = str(tmp_path / "best.ckpt")
    if noted:
        with (tmp_path / "SHA256SUMS").open("a") as sums:
            sums.write(f"{'0' * 64}  last.ckpt\n")
    with pytest.raises(WriteError, match="disk full"):
        best.write_last(Trainer())  # type: ignore[arg-type]
    assert (tmp_path / "last.ckpt").exists() is not noted
    if not noted:
        assert torch.load(tmp_path / "last.ckpt", weights_only=True)["a"].shape == (8,)

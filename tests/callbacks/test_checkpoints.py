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

from attnlab.callbacks.checkpoints import AtomicCheckpointIO
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

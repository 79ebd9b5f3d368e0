"""The lock of a run directory: as long as its process lives, no other run writes there.

The file `.lock` in the directory is locked by the system (flock), which frees it however the process ends. Its text
says which process that is.
"""

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from attnlab.errors import LockedError
from attnlab.run.files import writing

NAME = ".lock"
ENDING = 60.0  # seconds that a run may take to end once its record says that it does not go on


def holder_of(directory: Path) -> str | None:
    """The live process that uses a run directory, for people; None: there is none."""
    with contextlib.suppress(OSError), (directory / NAME).open(encoding="utf-8", errors="replace") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read(200) or "another process"
    return None


@contextlib.contextmanager
def locked(directory: Path, wait: float = ENDING) -> Iterator[Path]:
    """Hold the lock of an existing directory inside the block.

    Args:
        wait: seconds to wait for a run whose record says that it does not go on.

    Yields:
        The lock file.

    Raises:
        LockedError: another process uses the directory.
        WriteError: the lock file cannot be written.
    """
    path = directory / NAME
    lock = FileLock(path)
    with writing(path):
        try:
            lock.acquire(timeout=wait if _ending(directory) else 0.5, poll_interval=0.05)
        except Timeout:
            raise _refusal(directory, holder_of(directory)) from None
    try:
        with writing(path):
            since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
            path.write_text(f"process {os.getpid()} on {socket.gethostname()} since {since}")
        yield path
    finally:
        with contextlib.suppress(OSError):  # the directory may be gone
            path.unlink()
        lock.release()


def refuse_live(directory: Path) -> None:
    """Refuse to use a run that is in progress.

    Raises:
        LockedError: a live process uses the directory.
    """
    if holder := holder_of(directory):
        raise _refusal(directory, holder)


def _ending(directory: Path) -> bool:
    """Whether a record says that its run has ended or was interrupted."""
    try:
        return bool(json.loads((directory / "record.json").read_bytes())["status"] != "running")
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _refusal(directory: Path, holder: str | None) -> LockedError:
    by = holder or "another process"
    then = "wait for its end, end it, or take another hydra.run.dir"
    return LockedError(f"{directory}: a run is in progress there: {by}; {then}")

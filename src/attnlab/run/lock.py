"""The lock of a run directory: as long as its process lives, no other run writes there.

The file `.lock` in the directory says who holds it. On one host the lock is the system's own (flock), which ends with
the process however it ends. Between hosts, and on file systems without flock, the file's time is a sign of life that
is renewed every minute; after five minutes without one the holder counts as dead.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from attnlab.errors import LockedError, WriteError, printable
from attnlab.run.parents import Process, parent

NAME = ".lock"
EVERY = 60.0  # seconds between two signs of life
SILENT = 300.0  # seconds after which a holder on another host counts as dead
VANISHING = 10.0  # seconds that a process which is gone may take to let go of its files
ENDING = 60.0  # seconds that an interrupted run may take to end
SETTLING = 0.5  # seconds in which others that came at the same moment have written their names
UNSUPPORTED = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)

_descriptors: set[int] = set()  # of the locks that this process holds


@dataclass(frozen=True)
class Holder:
    """The process that holds a run directory.

    Args:
        pid: of the process, on its host.
        started: when the process started, in seconds since 1970.
        host: its host's name.
        since: when it locked the directory, ISO 8601 with the time zone.
        inode: of the lock file: a copy of the file locks nothing.
        flock: whether the file system has locks of its own.
        parent: the process that started it as a part of something larger, a multirun; None: a person did.
        ending: whether a signal has ended it, or its parent is gone: it is about to end.
    """

    pid: int
    started: float
    host: str
    since: str
    inode: int
    flock: bool
    parent: Process | None = None
    ending: bool = False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


class Lock:
    """A lock that is held.

    Args:
        descriptor: of the open lock file.
        holder: this process.
    """

    def __init__(self, descriptor: int, holder: Holder) -> None:
        self.descriptor, self.holder = descriptor, holder
        self.write()

    def write(self) -> None:
        """Write the holder into the file.

        Raises:
            OSError: the disk is full, or another error of the file system.
        """
        content = json.dumps(asdict(self.holder)).encode()
        os.pwrite(self.descriptor, content, 0)
        os.ftruncate(self.descriptor, len(content))

    def end(self) -> None:
        """Say that this process is about to end: who wants the directory may wait for it."""
        self.holder = replace(self.holder, ending=True)
        with contextlib.suppress(OSError):  # called by a signal's handler, which has more important things to do
            self.write()


def held(directory: Path, name: str = NAME) -> Holder | None:
    """The live process that holds a run directory; None: nobody does.

    Args:
        directory: of a run.
        name: of the lock file.
    """
    for attempt in range(10):
        try:
            descriptor = os.open(directory / name, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            free = _flock(descriptor, fcntl.LOCK_SH)
            holder = _read(descriptor)
            if holder is None and free is not False:
                return None
            if holder is not None and _lives(holder, descriptor, free):
                return replace(holder, ending=holder.ending or _orphaned(holder))
            if free is not False:
                return None
        finally:
            os.close(descriptor)
        if attempt < 9:
            time.sleep(0.05)  # its holder has not yet written who it is, or is gone and lets go in a moment
    return holder


def alive(record: Mapping[str, Any], directory: Path) -> bool:
    """Whether a run is in progress. A record that says "running" and whose process is gone is that of a dead run.

    Args:
        record: the run's.
        directory: the run's.
    """
    return record.get("status") == "running" and held(directory) is not None


@contextlib.contextmanager
def locked(directory: Path, wait: float = ENDING, name: str = NAME) -> Iterator[Lock]:
    """Hold a run directory inside the block.

    Args:
        directory: an existing folder.
        wait: how many seconds to wait for a holder that is about to end.
        name: of the lock file.

    Raises:
        LockedError: another process holds it.
        WriteError: the lock file cannot be written.
    """
    path = directory / name
    try:
        descriptor, supported = _acquire(path, wait)
        _descriptors.add(descriptor)
        here = psutil.Process()
        now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        inode = os.fstat(descriptor).st_ino
        holder = Holder(here.pid, here.create_time(), socket.gethostname(), now, inode, supported, parent())
        lock = Lock(descriptor, holder)
        if not supported:
            _settle(directory, descriptor, holder)
    except OSError as error:
        if isinstance(error, WriteError):
            raise
        raise WriteError(error.errno, error.strerror or str(error), str(path)) from error
    over = threading.Event()
    threading.Thread(target=_beat, args=(descriptor, over), name="lock", daemon=True).start()
    try:
        yield lock
    finally:
        over.set()
        if os.getpid() == holder.pid:  # not in a process that was forked inside the block
            with contextlib.suppress(OSError):  # the directory may be gone
                if os.stat(path).st_ino == inode:
                    os.unlink(path)
            _descriptors.discard(descriptor)
            os.close(descriptor)


def refuse_live(directory: Path) -> None:
    """Refuse to use a run that is in progress.

    Args:
        directory: of the run.

    Raises:
        LockedError: a live process holds it.
    """
    if holder := held(directory):
        raise _refusal(directory, holder)


def _acquire(path: Path, wait: float) -> tuple[int, bool]:
    """The open lock file, held by this process, and whether the file system has locks of its own."""
    directory, began, said = path.parent, time.monotonic(), False
    while True:
        # the file is written: a link to another one is refused
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        free = _flock(descriptor, fcntl.LOCK_EX)
        holder = _read(descriptor)
        lives = holder is not None and _lives(holder, descriptor, free)
        if free is not False and not lives and _is_at(path, descriptor):
            return descriptor, bool(free)
        os.close(descriptor)
        if free is not False and not lives:
            continue  # the holder before has just removed the file
        ending = holder is not None and lives and (holder.ending or _orphaned(holder))
        patience = wait if ending else 0.0 if lives else min(wait, VANISHING)
        if time.monotonic() - began > patience:
            raise _refusal(directory, holder)
        if ending and not said:
            print(printable(f"{directory}: waiting for the end of {holder}"), file=sys.stderr)
            said = True
        time.sleep(0.1)


def _settle(directory: Path, descriptor: int, holder: Holder) -> None:
    """Of several that came at the same moment, where no system decides, the last to write its name has the lock."""
    time.sleep(SETTLING)
    found = _read(descriptor)
    if found != holder:
        _descriptors.discard(descriptor)
        os.close(descriptor)
        raise _refusal(directory, found)


def _refusal(directory: Path, holder: Holder | None) -> LockedError:
    by = str(holder or "another process")
    away = holder is not None and holder.host != socket.gethostname()
    after = f" (dead after {SILENT / 60:.0f} minutes without a sign of life)" if away else ""
    return LockedError(
        f"{directory}: a run is in progress there: {by}{after}; wait for its end, end it, or take another hydra.run.dir"
    )


def _flock(descriptor: int, kind: int) -> bool | None:
    """Whether the system's lock was free and is now ours; None: the file system has none."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in UNSUPPORTED:
            return None
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def _read(descriptor: int) -> Holder | None:
    """Who the file names; None: nobody yet, or it is being written."""
    try:
        found = json.loads(os.pread(descriptor, 4096, 0))
        found["parent"] = found["parent"] and Process(**found["parent"])
        return Holder(**found)
    except (ValueError, TypeError, KeyError):
        return None


def _lives(holder: Holder, descriptor: int, free: bool | None) -> bool:
    """Whether the process that a lock file names still holds it.

    Args:
        holder: what the file says.
        descriptor: the open file.
        free: whether the system's lock was free; None: the file system has none.
    """
    state = os.fstat(descriptor)
    if holder.inode != state.st_ino and free is not False:
        return False  # a copy
    if holder.host != socket.gethostname():
        return abs(time.time() - state.st_mtime) < SILENT  # a time in the future was not renewed either
    if free and holder.flock:
        return False
    return Process(holder.pid, holder.started).alive()


def _orphaned(holder: Holder) -> bool:
    same_host = holder.host == socket.gethostname()
    return same_host and holder.parent is not None and not holder.parent.alive()


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.stat(path).st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False


def _beat(descriptor: int, over: threading.Event) -> None:
    while not over.wait(EVERY):
        with contextlib.suppress(OSError):  # a server that is away for a moment
            os.utime(descriptor)


def _after_fork() -> None:
    """A forked process, for instance one that loads data, must not hold the lock after the run's process is gone."""
    while _descriptors:
        os.close(_descriptors.pop())


os.register_at_fork(after_in_child=_after_fork)

"""Processes that end with the process that started them: jobs of a multirun, its workers, the ranks of a run."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil

PARENT = "ATTNLAB_PARENT"  # the environment variable that tells a process by whom it was started
EVERY = 0.5  # seconds between two looks at the parent
GRACE = 15.0  # seconds for the end that SIGTERM asks for
SAME = 5.0  # seconds by which two readings of a process' start may differ: the clock may have been set
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>

_parent: "Process | None" = None
_last_words: list[Callable[[], None]] = []


@dataclass(frozen=True)
class Process:
    """A process of this host.

    Args:
        pid: its number, which the system gives to another process later.
        started: when it started, in seconds since 1970.
    """

    pid: int
    started: float

    def alive(self) -> bool:
        """Whether it still runs."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started) < SAME
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.AccessDenied:  # of another user: it exists
            return True
        except psutil.NoSuchProcess:
            return False


def environment() -> dict[str, str]:
    """The environment for a process that shall end with this one; it calls :func:`watch_given_parent` first."""
    return os.environ | {PARENT: str(os.getpid())}


def watch_given_parent() -> None:
    """End this process with the one that started it, if that gave it :func:`environment`."""
    number = os.environ.pop(PARENT, None)  # what this process starts for itself is no job
    if number is not None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # see attnlab.run.signals.starting
        end_with_parent(int(number))


def end_with_parent(number: int) -> None:
    """End this process with SIGTERM as soon as its parent has ended, whatever ended it.

    On Linux the system sends the signal. A thread looks, too, for other systems and for a main thread that does not
    come to handle it: after 15 s the process writes its record (see :func:`on_parent_end`) and ends.

    Args:
        number: the process id of the parent.
    """
    global _parent
    if _parent is not None and _parent.pid == number and os.getppid() == number:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    try:
        _parent = Process(number, psutil.Process(number).create_time())
    except psutil.NoSuchProcess:
        _parent = Process(number, 0.0)
    if os.getppid() != number:  # it had ended before the system was asked
        os._exit(128 + signal.SIGTERM)
    threading.Thread(target=_watch, args=(number,), name="parent", daemon=True).start()


def parent() -> Process | None:
    """The process with which this one ends; None: it was started by a person."""
    return _parent


def orphaned() -> bool:
    """Whether the process with which this one ends has ended.

    A killed process stays this one's parent until its last thread is gone, while the system's signal comes when the
    thread that started this process is.
    """
    return _parent is not None and (os.getppid() != _parent.pid or not _parent.alive())


@contextlib.contextmanager
def on_parent_end(say: Callable[[], None]) -> Iterator[None]:
    """Inside the block, call `say` before an orphaned process is ended that did not end by itself.

    Args:
        say: called in another thread.
    """
    _last_words.append(say)
    try:
        yield
    finally:
        _last_words.remove(say)


def _watch(number: int) -> None:
    while os.getppid() == number:
        time.sleep(EVERY)
    if sys.platform != "linux":
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    try:
        for say in list(_last_words):
            say()
    finally:
        os._exit(128 + signal.SIGTERM)

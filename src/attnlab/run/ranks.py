"""The other processes of a run on this host: how one of them ended, where the run cannot go on without it."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping

EVERY = 0.2  # seconds between two looks
PATIENCE = 10.0  # seconds in which rank zero should notice by itself: its collective operation fails

_processes: dict[int, subprocess.Popen[bytes]] = {}
_ends: list[Callable[[str], None]] = []


def watch(processes: Mapping[int, "subprocess.Popen[bytes]"]) -> None:
    """End this process, rank zero, when another rank has failed and rank zero waits for it for ever.

    Args:
        processes: the others by rank, which this process has started.
    """
    _processes.update(processes)
    threading.Thread(target=_watch, name="ranks", daemon=True).start()


def failure(wait: float = 0.0) -> str | None:
    """How the first rank that failed has ended; None: none has.

    Args:
        wait: seconds to wait for one that ends at this moment: its connections are closed before it is gone.
    """
    deadline = time.monotonic() + wait
    while _processes:
        for rank, process in _processes.items():
            if code := process.poll():
                return f"rank {rank} ended with {ending(code)}"
        if time.monotonic() >= deadline:
            break
        time.sleep(EVERY)
    return None


def ending(code: int) -> str:
    """The words for the exit code of a process.

    Args:
        code: not zero; negative: a signal's, as `subprocess` has it; above 128: it ended itself after a signal.
    """
    number = -code if code < 0 else code - 128
    if number not in [known.value for known in signal.Signals]:
        return f"exit code {code}"
    name = signal.Signals(number).name
    return name + " (out of memory?)" * (name == "SIGKILL")


@contextlib.contextmanager
def losing(end: Callable[[str], None]) -> Iterator[None]:
    """Inside the block, call `end` before this process is ended because another rank has failed.

    Args:
        end: called in another thread with how that rank has ended.
    """
    _ends.append(end)
    try:
        yield
    finally:
        _ends.remove(end)


def _watch() -> None:
    while (how := failure()) is None:
        if all(process.poll() == 0 for process in _processes.values()):
            return
        time.sleep(EVERY)
    time.sleep(PATIENCE)
    try:
        for end in list(_ends):
            end(how)
    finally:
        for process in _processes.values():
            process.kill()
        sys.stderr.flush()
        os._exit(1)

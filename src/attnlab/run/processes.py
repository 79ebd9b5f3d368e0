"""The processes of runs and sweeps: what a signal does, and which process ends with the one that started it."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

# SIGUSR2: a cluster's, some minutes before the time limit
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>

Handler = Callable[[int, FrameType | None], None]


class Interrupted(KeyboardInterrupt):
    """A signal ended the run. It is a KeyboardInterrupt because Lightning then ends the processes it has started."""


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Ask Linux to send this process a signal when the one that started it has ended. Other systems cannot do this."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


@contextlib.contextmanager
def handling(handler: Handler) -> Iterator[None]:
    """Give :data:`SIGNALS` to `handler` inside the block.

    A signal that is ignored when the block begins stays ignored, as SIGHUP under nohup. In a thread other than the main
    one nothing is changed, because Python allows signal handlers in the main thread only.
    """
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for caught, previous in before.items():
            signal.signal(caught, previous)


@contextlib.contextmanager
def interruptible(save: Callable[[str], None]) -> Iterator[list[int]]:
    """Raise Interrupted at the first signal inside the block. A second signal ends the process at once.

    A second SIGUSR2 does nothing: a cluster may send it to every process of a job, which also gets it from its parent.

    Args:
        save: called with the first signal's name, in the signal handler and before the exception is raised: the
            process may be killed before anything else runs. Further signals are ignored until it returns.

    Yields:
        A list that receives the number of the first signal. Libraries may catch the exception, so look here too.
    """
    received: list[int] = []
    saved, process = False, os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal saved
        if number == signal.SIGUSR2 and os.getpid() != process:  # a forked process, which reads data
            return
        if received:
            if saved and number != signal.SIGUSR2:
                os._exit(128 + number)
            return
        received.append(number)
        save(signal.Signals(number).name)
        saved = True
        raise Interrupted(signal.Signals(number).name)

    with handling(handle):
        yield received

"""What SIGINT, SIGTERM, SIGHUP and SIGUSR2 do while a run or a multirun is in progress."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

# SIGUSR2: a cluster's, some minutes before the time limit
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)

Handler = Callable[[int, FrameType | None], None]


class Interrupted(KeyboardInterrupt):
    """A signal ended the run. It is a KeyboardInterrupt because Lightning then ends the processes it has started."""


@contextlib.contextmanager
def handling(handler: Handler) -> Iterator[None]:
    """Give :data:`SIGNALS` to `handler` inside the block.

    A signal that is ignored when the block begins stays ignored, as with nohup and SIGHUP. In a thread other than
    the main one nothing is changed, because Python allows signal handlers in the main thread only.
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
def starting() -> Iterator[None]:
    """Inside the block, a process of this package can be started: SIGINT waits until that process is ready for it.

    Python prints a traceback if SIGINT arrives while it starts. What is blocked here is inherited, and unblocked by
    :func:`attnlab.run.parents.watch_given_parent`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def interruptible(save: Callable[[str], None]) -> Iterator[list[int]]:
    """Raise Interrupted at the first signal inside the block; a second signal ends the process at once.

    Not a second SIGUSR2: a cluster may send it to every process of a job, which then also gets it from its parent.

    Args:
        save: called with the first signal's name, in the signal handler and before the exception is raised: the
            process may be killed before anything else runs. Further signals are ignored until it returns.

    Yields:
        A list that receives the number of the first signal. Libraries may catch the exception, so look here too.
    """
    received: list[int] = []
    saved, here = False, os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal saved
        if number == signal.SIGUSR2 and os.getpid() != here:  # a forked process, which reads data
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

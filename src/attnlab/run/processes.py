"""The processes of runs and sweeps: signals, parents, the server of a sweep's jobs, and jobs on a cluster.

Submitit runs one task of the sweep on each node of a job. It starts the run as a new process, which starts the other
processes of its node. The first node decides what the job does. Some minutes before the time limit every task gets
SIGUSR2, passes it on and waits for the end of the run. Then the first one queues the job again.
"""

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from types import FrameType
from typing import Any

# SIGUSR2: a cluster's, some minutes before the time limit
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
FIRST_PORT, PORTS = 15000, 10000


class Interrupted(KeyboardInterrupt):
    """A signal ended the run. It is a KeyboardInterrupt because Lightning then ends the processes it has started."""


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Ask Linux to send this process a signal when the one that started it has ended. Other systems cannot do this."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


@contextlib.contextmanager
def handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Give :data:`SIGNALS` to `handler` inside the block.

    An ignored signal stays ignored, as SIGHUP under nohup. Python has signal handlers in the main thread only: in
    another one nothing is changed.
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

    A second SIGUSR2 does nothing: a process may get it from the cluster and from its parent.

    `save` is called with the name of the first signal, in the signal handler and before the exception is raised: the
    process may be killed before anything else runs. Yields a list that receives the number of the first signal:
    libraries may catch the exception.
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


# --- the jobs of a sweep ------------------------------------------------------------------------------------------

FORKING = multiprocessing.get_context("forkserver")


def start_job(words: Sequence[str], environment: Mapping[str, str], modules: Sequence[str]) -> ForkServerProcess:
    """The process of a command line, to be started. It is forked from a server that has imported `modules` once."""
    FORKING.set_forkserver_preload(["attnlab.cli", *modules])
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # the jobs unblock them as soon as they can handle them
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return FORKING.Process(target=_run, args=(list(words), dict(environment)))


def _run(words: list[str], environment: dict[str, str]) -> None:
    """Run a command line in this process, as `python -m attnlab` does. It ends with the sweep, and with the server."""
    os.setsid()  # Ctrl-C arrives once, through the sweep
    end_with_parent()
    threading.Thread(target=_end_with_sweep, daemon=True).start()
    multiprocessing.set_start_method(None, force=True)  # the workers that read data start as in any process
    os.environ.clear()
    os.environ.update(environment)
    main: Any = importlib.import_module("attnlab.__main__")
    sys.modules["__main__"] = main  # Lightning starts other ranks by its name
    sys.argv = [str(main.__file__), *words]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    main.main()


def _end_with_sweep() -> None:
    """Wait for the end of the sweep, which is not this process' parent. Its end frees the server too."""
    sweep = multiprocessing.parent_process()
    assert sweep is not None
    sweep.join()
    os.kill(os.getpid(), signal.SIGTERM)


# --- a cluster ----------------------------------------------------------------------------------------------------


def in_submitit() -> bool:
    """Whether this process, or the one that started it, is a task of submitit."""
    return "SUBMITIT_EXECUTOR" in os.environ


def nodes() -> int:
    """The number of nodes of the job of this process; 1 without a job."""
    return int(os.environ.get("SLURM_JOB_NUM_NODES", 1)) if in_submitit() else 1


def first_node() -> bool:
    """Whether this process runs on the first node of its job, or in none."""
    return nodes() == 1 or int(os.environ["SLURM_NODEID"]) == 0


def start_number() -> str:
    """The same on all nodes of a job, and another one when the job is queued again."""
    return "-".join(os.environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"))


def rendezvous() -> dict[str, str]:
    """The environment variables by which the processes of a job on several nodes find each other. Else empty."""
    if nodes() == 1:
        return {}
    port = FIRST_PORT + int(os.environ["SLURM_JOB_ID"]) % PORTS
    command = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return {
        "MASTER_ADDR": names[0],
        "MASTER_PORT": os.environ.get("MASTER_PORT", str(port)),
        "NODE_RANK": os.environ["SLURM_NODEID"],
    }


def queue_again() -> None:
    """Call submitit's handler of SIGUSR2, which queues the job again and ends this process; without one, end it.

    On other nodes than the first nothing is done. SystemExit: always on the first node.
    submitit.core.utils.UncompletedJobError: the job has reached its time limit too often.
    """
    if not first_node():
        return
    if in_submitit():
        signal.raise_signal(signal.SIGUSR2)
    sys.exit(128 + signal.SIGUSR2)

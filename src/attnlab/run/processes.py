"""The processes of runs and sweeps: signals, parents, the server of a sweep's jobs, and jobs on a cluster.

Submitit runs one task of the sweep on each node of a job. It starts the run as a new process, which starts the other
processes of its node. The first node decides what the job does. Some minutes before the time limit every task gets
SIGUSR2, passes it on and waits for the end of the run. Then the first one queues the job again.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
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


class JobServer:
    """A process that imports modules once and forks a process for each job.

    It does nothing else, so it has neither threads of Python nor a CUDA context. It leaves :data:`SIGNALS` to the jobs
    and ends with the process that started it; its job then gets SIGTERM.
    `modules` are names, and `environment` is that of all jobs.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._connection, other = Pipe()
        self._job: int | None = None
        with other:
            code = f"from attnlab.run.processes import serve; serve({other.fileno()}, {list(modules)})"
            options: Any = {"pass_fds": [other.fileno()], "start_new_session": True}  # Ctrl-C arrives by `send_signal`
            self._process = subprocess.Popen([sys.executable, "-c", code], env=environment, **options)
        atexit.register(self.close)

    def run(self, words: Sequence[str]) -> int:
        """Run a command line in a new process. Returns its exit code, negative: the signal that ended it or the server.

        After a negative code, a job whose server was ended may still be writing its record.
        """
        try:
            self._connection.send((list(words), os.getcwd()))
            self._job = self._connection.recv()
            return self._connection.recv()
        except (EOFError, ConnectionError):
            return self._process.wait()
        finally:
            self._job = None

    def send_signal(self, number: int) -> None:
        """Send the job a signal. Without a job, kill the server."""
        if self._job is None:
            self._process.kill()
            return
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(self._job, number)

    def usable(self, environment: Mapping[str, str]) -> bool:
        """Whether the server can start a job with these environment variables."""
        return self._environment == environment and self._process.poll() is None

    def close(self) -> None:
        """End the server and wait for its end: its processor time is then counted as that of a child."""
        if self._job is not None:  # a thread waits for it
            self._process.kill()
        self._connection.close()
        self._process.wait()


def serve(descriptor: int, modules: Sequence[str]) -> None:
    """Import modules, then fork a process for each command line that arrives at the connection `descriptor`.

    In the forked process the command runs as by `python -m attnlab`, in a session of its own.
    """
    end_with_parent(signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    gc.disable()  # it would visit every import in vain
    for name in ("attnlab.__main__", "attnlab.cli", *modules):
        with contextlib.suppress(Exception):  # the job imports it again, and reports the error
            importlib.import_module(name)
    connection, server = Connection(descriptor), os.getpid()
    while True:
        try:
            words, folder = connection.recv()
        except EOFError:
            os._exit(0)
        job = os.fork()
        if not job:
            break
        connection.send(job)
        connection.send(os.waitstatus_to_exitcode(os.waitpid(job, 0)[1]))
    connection.close()
    os.setsid()
    end_with_parent()
    if os.getppid() != server:  # it was ended before
        os._exit(128 + signal.SIGTERM)
    os.chdir(folder)
    main = sys.modules["__main__"] = sys.modules["attnlab.__main__"]  # Lightning starts other ranks by its name
    sys.argv = [str(main.__file__), *words]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    main.main()


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

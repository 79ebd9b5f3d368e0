"""Jobs on a cluster, through submitit: how the processes of a job find each other, and how it is queued again.

Submitit runs one task on each node. The task is a part of the sweep and starts the run as a new process, which starts
the other processes of its node. The task of the first node decides what the job does. Some minutes before the time
limit every task gets SIGUSR2, passes it on and waits for the end of the run. Then the first one queues the job again.
"""

import os
import signal
import subprocess
import sys

FIRST_PORT, PORTS = 15000, 10000


def inside() -> bool:
    """Whether this process, or the one that started it, is a task of submitit."""
    return "SUBMITIT_EXECUTOR" in os.environ


def nodes() -> int:
    """The number of nodes of this process' job; 1 where there is no job."""
    return int(os.environ.get("SLURM_JOB_NUM_NODES", 1)) if inside() else 1


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
    """Call submitit's own handler of SIGUSR2, which queues the job again and ends this process; without one, end it.

    On other nodes than the first nothing is done: the whole job is queued again from there.

    Raises:
        SystemExit: always on the first node.
        submitit.core.utils.UncompletedJobError: the job has reached its time limit too often.
    """
    if not first_node():
        return
    if inside():
        signal.raise_signal(signal.SIGUSR2)
    sys.exit(128 + signal.SIGUSR2)

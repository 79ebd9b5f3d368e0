"""`sbatch`, `srun`, `scontrol` and `sacct` for tests: as much of SLURM as submitit uses, on this machine.

Called by the name of a link to this file. Everything that the commands tell each other lies in the folder FAKE_SLURM:
`pids/<job>.<task>`, and `requeue/<job>` while a job is to be started again. The nodes of a job are this host.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

JOB = 4242


def sbatch(folder: Path, script: Path) -> int:
    text = script.read_text()
    (folder / "script").write_text(text)
    array = re.search(r"--array='?0-(\d+)", text)
    nodes = re.search(r"--nodes='?(\d+)", text)
    for index in range(int(array[1]) + 1 if array else 1):
        job = {"SLURM_JOB_ID": str(JOB + index), "SLURM_JOB_NUM_NODES": nodes[1] if nodes else "1"}
        if array:
            job |= {"SLURM_ARRAY_JOB_ID": str(JOB), "SLURM_ARRAY_TASK_ID": str(index)}
        command = [sys.executable, __file__, "controller", str(script)]
        with (folder / "controller.log").open("ab") as log:
            subprocess.Popen(command, env=os.environ | job, start_new_session=True, stdout=log, stderr=log)
    print(f"Submitted batch job {JOB}")
    return 0


def controller(folder: Path, script: Path) -> int:
    """Runs a job, and again whenever it is to be queued again."""
    index = os.environ.get("SLURM_ARRAY_TASK_ID")
    name = str(JOB) if index is None else f"{JOB}_{index}"
    for start in range(5):
        (folder / "requeue" / name).unlink(missing_ok=True)
        subprocess.run(["bash", str(script)], env=os.environ | {"SLURM_RESTART_COUNT": str(start)}, check=False)
        if not (folder / "requeue" / name).exists():
            break
    return 0


def srun(folder: Path, *arguments: str) -> int:
    command = list(arguments[next(i for i, text in enumerate(arguments) if text == sys.executable) :])
    nodes = os.environ["SLURM_JOB_NUM_NODES"]
    tasks = []
    for number in map(str, range(int(nodes))):
        about = {"SLURM_PROCID": number, "SLURM_NODEID": number, "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0"}
        about |= {"SLURM_NTASKS": nodes, "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_NAME": "attnlab"}
        with (folder / f"{os.environ['SLURM_JOB_ID']}.{number}.log").open("ab") as log:
            tasks.append(subprocess.Popen(command, env=os.environ | about, stdout=log, stderr=log))
        (folder / "pids" / f"{os.environ['SLURM_JOB_ID']}.{number}").write_text(str(tasks[-1].pid))
    return max([abs(task.wait()) for task in tasks])


def scontrol(folder: Path, what: str, *arguments: str) -> int:
    if what == "show":
        print("localhost")
        return 0
    (job,) = arguments
    (folder / "requeue" / job).touch()
    with (folder / "requeued").open("a") as file:
        file.write(f"{job}\n")
    return int(what != "requeue")


def sacct(folder: Path, *arguments: str) -> int:
    print("JobID|State|NodeList")
    print(f"{JOB}|RUNNING|localhost")
    return 0


def install(folder: Path) -> dict[str, str]:
    """Put the commands into a folder; the environment variables with which they are found."""
    for name in ("pids", "requeue", "bin"):
        (folder / name).mkdir(parents=True)
    for name in ("sbatch", "srun", "scontrol", "sacct"):
        path = folder / "bin" / name
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" {name} "$@"\n')
        path.chmod(0o755)
    return {"FAKE_SLURM": str(folder), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}


if __name__ == "__main__":
    place = Path(os.environ["FAKE_SLURM"])
    name, *arguments = sys.argv[1:]
    if name in ("sbatch", "controller"):
        sys.exit((sbatch if name == "sbatch" else controller)(place, Path(arguments[-1])))
    others: dict[str, Callable[..., int]] = {"srun": srun, "scontrol": scontrol, "sacct": sacct}
    sys.exit(others[name](place, *arguments))

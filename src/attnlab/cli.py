"""attnlab's one command: attnlab task=mustc attention=mtla stride=2

Checks the command line first, before anything heavy is imported; then Hydra makes the run directory and calls the job.
Exit codes: 0 finished, 1 failed, 2 the command line or a configuration file is wrong, 130 and 143 interrupted.
"""

import io
import os
import signal
import sys
import traceback
from datetime import datetime

import hydra
from omegaconf import DictConfig

from attnlab.config.build import CONF
from attnlab.config.check import Plan, check
from attnlab.config.compose import one_line
from attnlab.errors import AttnlabError, ConfigError
from attnlab.runs import record as records
from attnlab.runs.job import job

STAMP = "ATTNLAB_STAMP"  # when the run began: names its directory, and hands it on to the processes of the same run
ASKING = {"--help", "-h", "--hydra-help", "--version", "--info", "-i", "--shell-completion", "-sc"}


def main() -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a letter must not end a run
    full = os.environ.get("HYDRA_FULL_ERROR")
    plan = None
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda text: "=" in text and text[0] != "-")  # -m may stand anywhere
    try:
        os.environ[STAMP] = stamp(sys.argv[1:])
        if not ASKING & set(sys.argv[1:]):
            plan = check(sys.argv[1:])

        def task(cfg: DictConfig) -> None:
            os.environ["HYDRA_FULL_ERROR"] = full or "0"
            job(cfg)

        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then leaves its own errors to this function
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(task)()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SystemExit as end:  # the end of a single run, or of a multirun that was interrupted
        code = end.code if isinstance(end.code, int) else 1
        return max(code, summarize(plan)) if plan and plan.multirun else code
    except Exception as error:
        if full == "1":
            traceback.print_exc()
        known = isinstance(error, AttnlabError)
        print(f"error: {'' if known else f'{type(error).__name__}: '}{one_line(error)}", file=sys.stderr)
        return error.exit_code if isinstance(error, AttnlabError) else 1
    return summarize(plan) if plan and plan.multirun else 0


def stamp(arguments: list[str]) -> str:
    """When this run began. The processes of one run must agree on it, or each would write to a directory of its own."""
    first = records.first_process()
    if not first and STAMP in os.environ:
        return os.environ[STAMP]  # Lightning started this process
    if "SLURM_STEP_ID" in os.environ:
        return f"slurm-{os.environ['SLURM_JOB_ID']}-{os.environ['SLURM_STEP_ID']}"
    several = not first or int(os.environ.get("WORLD_SIZE", 1)) > 1
    if several and not any(text.startswith("hydra.run.dir=") for text in arguments):
        raise ConfigError("processes started from outside (torchrun) need one directory: hydra.run.dir=outputs/<name>")
    return datetime.now().strftime("%Y-%m-%d_%H-%M-%S_%f")


def summarize(plan: Plan) -> int:
    """Say on stderr how a multirun's jobs ended, from their records. 0 if all have finished, else 1."""
    ends = {path.parent.name: records.read(path.parent) for path in sorted(plan.sweep_directory.glob("*/record.json"))}
    finished = [name for name, record in ends.items() if record["status"] == "finished"]
    print(f"{len(finished)} of {len(plan.jobs)} jobs finished: {plan.sweep_directory}", file=sys.stderr)
    for name, record in ends.items():
        print(f"  {name}: {record['status']}  {record.get('error', '')}".rstrip(), file=sys.stderr)
    return int(len(finished) < len(plan.jobs))

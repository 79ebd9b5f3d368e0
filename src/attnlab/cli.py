"""The command `attnlab`: check the command line, then run the job or the jobs that it describes.

The command line is checked before anything heavy is imported. Exit codes: 0 finished, 1 failed, 2 the command line or
a configuration file is wrong, 128 plus the signal's number (130, 143) interrupted.
"""

import atexit
import contextlib
import io
import logging.config
import math
import os
import platform
import re
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import InterpolationResolutionError

from attnlab import __version__
from attnlab.config import stack
from attnlab.config.build import CONF
from attnlab.config.check import Plan, check
from attnlab.config.compose import one_line
from attnlab.config.listing import help_text, listing
from attnlab.config.present import check_present
from attnlab.config.spelling import spelled
from attnlab.config.sweeps import SWEEPER
from attnlab.errors import AttnlabError, ConfigError, DataError, TrainingError, printable
from attnlab.run import job, sweep
from attnlab.run.loading import load
from attnlab.run.processes import end_with_parent
from attnlab.run.record import first_process
from attnlab.tasks import complete

STAMP = "ATTNLAB_STAMP"  # when the run began: part of its directory's name; the processes of one run inherit it
HELP = {"--help", "-h"}
VERSIONS = ("torch", "lightning", "transformers", "timm", "hydra-core")  # that decide what a run does, beside attnlab
INFORMATION = {"--hydra-help", "--shell-completion", "-sc"}  # Hydra answers without a configuration
INFO = {"--info", "-i"}  # Hydra shows how the configuration is composed
TEXTS = ("prompt", "input", "output")  # keys whose values are quoted, so that a person need not


def main() -> int:
    """Run the command line in `sys.argv`; the exit code."""
    code = command()
    if code > 128:
        leave(code)
    return code


def leave(code: int) -> NoReturn:
    """End the process of an interrupted run at once.

    Python would first take the libraries down, which lasts seconds, and wait for threads; one that is still inside a
    library (:func:`attnlab.run.progress.waited`) would even abort the process then.

    Args:
        code: the exit code.
    """
    atexit._run_exitfuncs()  # loggers of services, worker processes, temporary folders
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or the reader has gone
            stream.flush()
    os._exit(code)


def command() -> int:
    """Run the command line in `sys.argv`; the exit code."""
    if not first_process() and STAMP in os.environ:  # Lightning started this process
        end_with_parent(signal.SIGKILL)  # it may wait for the others inside a library, where no handler runs
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without some letter must not end a run
    full = os.environ.get("HYDRA_FULL_ERROR")
    plan: Plan | None = None
    try:
        if sys.argv[1:2] == ["report"]:
            from attnlab.report import command

            return command.main(sys.argv[2:])
        sys.argv[1:] = sorted(sys.argv[1:], key=lambda text: "=" in text and text[0] != "-")  # -m may stand anywhere
        if sys.argv[1:2] == ["runs"]:
            from attnlab.report import runs

            return runs.main(sys.argv[2:])
        if said := information(sys.argv[1:]):
            print(printable(said, keep="\n"), flush=True)
            return 0
        os.environ[STAMP] = stamp(sys.argv[1:])
        flags = {text.partition("=")[0] for text in sys.argv[1:]}
        if not INFORMATION & flags:
            several = {"-m", "--multirun"} & set(sys.argv[1:])
            given = [text if several else quoted(text) for text in spelled(stack.plain(sys.argv[1:]))]
            plan = check(given, load, complete)
            sys.argv[1:] = plan.arguments
            if INFO & flags:
                plan = None  # nothing runs
            elif plan.multirun and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
                signal.signal(signal.SIGINT, signal.default_int_handler)  # a launcher may have jobs to end
            for cfg in plan.jobs if plan and plan.here else []:
                check_present(cfg)
            created = bool(plan and plan.directory and not plan.directory.exists())
            if plan and not plan.keeps:
                log_to_the_console()
                return job.run(plan.jobs[0], job.command_line(given), None)

        launching = os.getpid()

        def task(cfg: DictConfig) -> float:
            if os.getpid() != launching and os.getppid() == launching:  # a launcher's worker, which outlives its pool
                end_with_parent()
            os.environ["HYDRA_FULL_ERROR"] = full or "0"
            assert plan is not None
            sys.argv[1:] = given  # what the other processes of this run are started with
            return run(plan, given, created)

        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises its errors instead of printing them
        alone = sweep.begun(plan.sweep_directory) if plan and plan.multirun else contextlib.nullcontext()
        with alone:
            hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(task)()
        code = 0
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # of `attnlab list ... | head`: the reader has what it wanted
        return 128 + signal.SIGPIPE
    except SystemExit as end:  # a single run ends like this, and a multirun that is interrupted
        code = end.code if isinstance(end.code, int) else 1
    except Exception as error:
        if full == "1":
            traceback.print_exc()
        if isinstance(error, InterpolationResolutionError):
            error = ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}")
        elif isinstance(error, OSError) and not isinstance(error, AttnlabError) and error.filename:
            error = DataError(f"{error.filename}: {error.strerror}")
        known = isinstance(error, AttnlabError)
        print(f"error: {'' if known else f'{type(error).__name__}: '}{one_line(error)}", file=sys.stderr)
        return error.exit_code if isinstance(error, AttnlabError) else 1
    return end_of_multirun(plan, code) if plan and plan.multirun else code


def end_of_multirun(plan: Plan, code: int) -> int:
    """Say how the jobs ended, compare them in a table, and write the table beside them.

    Args:
        plan: the checked command line.
        code: the exit code so far.

    Returns:
        The exit code: `code`, or 1 if it was 0 and a job has not finished or the table could not be written.
    """
    from attnlab.report import sweep as comparison

    code = max(code, sweep.summarize(plan.sweep_directory, None if plan.searches else len(plan.jobs)))
    try:
        for path in comparison.render(plan.sweep_directory, [] if plan.searches else plan.jobs, plan.swept):
            print(printable(str(path)), file=sys.stderr)
    except AttnlabError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return max(code, error.exit_code)
    return code


def information(arguments: Sequence[str]) -> str:
    """What `attnlab --help`, `attnlab --version` and `attnlab list` print; empty for any other command.

    Args:
        arguments: as in sys.argv[1:].

    Raises:
        ConfigError: `list` of a group that does not exist.
    """
    if HELP & set(arguments):
        name = Path(sys.argv[0]).name
        return help_text(name if name == "attnlab" else f"python -m {'src.run' if name == 'run.py' else 'attnlab'}")
    if "--version" in arguments:
        return f"attnlab {__version__} ({', '.join(_versions())}, python {platform.python_version()})"
    return listing(list(arguments[1:])) if arguments[:1] == ["list"] else ""


def _versions() -> Iterator[str]:
    """Name and version of the packages of VERSIONS that are installed."""
    for name in VERSIONS:
        with contextlib.suppress(PackageNotFoundError):
            yield f"{name} {version(name)}"


def run(plan: Plan, given: list[str], created: bool) -> float:
    """Run one job, in this process or, in a multirun, in a new one. Hydra calls this.

    Args:
        plan: the checked command line.
        given: the command line as it was given.
        created: whether the directory of a single run did not exist before.

    Returns:
        What a sweeper optimizes: the best value of the validation metric that the task monitors; NaN if there is none.


    Raises:
        SystemExit: the end of a single run, with its exit code.
        TrainingError: a sweeper that searches gets no value.
    """
    context = HydraConfig.get()
    directory = Path(context.runtime.output_dir)
    if context.mode != RunMode.MULTIRUN:
        arguments = [text for text in given if not text.startswith("hydra.")]
        raise SystemExit(job.run(plan.jobs[0], job.command_line(arguments), directory, created))
    added = [source.path for source in context.runtime.config_sources if source.provider == "command-line"]
    name = [f"--config-name={context.job.config_name}"] * (context.job.config_name != "config")
    arguments = [*(f"--config-dir={path}" for path in added), *name, *stack.plain(map(str, context.overrides.task))]
    cfg = check(arguments, load, complete).jobs[0] if plan.searches else plan.jobs[context.job.num]
    value = sweep.run_job(cfg, context.job.num, arguments, directory, plan.sweep_directory)
    if math.isnan(value) and context.runtime.choices[SWEEPER] != "basic":
        raise TrainingError(f"{directory}: the run has no value to optimize")
    return value


def quoted(text: str) -> str:
    """A setting whose value is a text or a path of a person, in the quotes that Hydra needs for commas and the like.

    Args:
        text: one word of the command line, `key=value` or a flag. Only `prompt=`, `input=` and `output=` are
            changed.
    """
    key, equals, value = text.partition("=")
    if not equals or key not in TEXTS or value in ("", "null") or value[0] in "'\"":
        return text
    escaped = re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + "\\'" * bool(found[2]), value, count=0)
    return f"{key}='{escaped}'"


def log_to_the_console() -> None:
    """Set up logging as Hydra does for a run, without the file in the run's directory."""
    settings = yaml.safe_load((CONF / "hydra" / "job_logging" / "attnlab.yaml").read_text(encoding="utf-8"))
    del settings["handlers"]["file"]
    settings["root"]["handlers"].remove("file")
    logging.config.dictConfig(settings)


def stamp(arguments: list[str]) -> str:
    """When this run began, the same in all processes of the run: each would write to another directory otherwise.

    Args:
        arguments: as in sys.argv[1:].

    Raises:
        ConfigError: torchrun or the like started several processes, and no `hydra.run.dir=` is given.
    """
    first = first_process()
    if not first and STAMP in os.environ:
        return os.environ[STAMP]  # Lightning started this process
    if "SLURM_STEP_ID" in os.environ:
        return f"slurm-{os.environ['SLURM_JOB_ID']}-{os.environ['SLURM_STEP_ID']}"
    several = not first or int(os.environ.get("WORLD_SIZE", 1)) > 1
    if several and not any(text.startswith("hydra.run.dir=") for text in arguments):
        raise ConfigError("processes started by torchrun need one directory: give hydra.run.dir=outputs/<name>")
    return datetime.now().strftime("%Y-%m-%d_%H-%M-%S_%f")

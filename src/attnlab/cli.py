"""The command `attnlab`: check the command line, then run the job or the jobs that it describes.

The command line is checked before anything heavy is imported. Exit codes: 0 finished, 1 failed, 2 the command line or
a configuration file is wrong, 128 plus the signal's number (130, 143) interrupted. If standard output is closed, a run
goes on and the code is 141 (`| head`); if it cannot be written, as on a full disk, 1. The record says that it finished.
"""

import atexit
import contextlib
import copy
import gc
import io
import math
import os
import platform
import signal
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from datetime import datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NoReturn

from hydra._internal.utils import _run_hydra, get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import configure_log
from hydra.version import setbase
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationResolutionError

from attnlab import __version__
from attnlab.config.build import CONF, escaped, written
from attnlab.config.check import Command, check, check_present, parse_flags
from attnlab.config.compose import one_line
from attnlab.config.explain import explain, help_text, listing
from attnlab.errors import AttnlabError, ConfigError, DataError, TrainingError, printable
from attnlab.run import job, sweep
from attnlab.run.console import Output, progress
from attnlab.run.loading import load
from attnlab.run.processes import end_with_parent
from attnlab.run.record import first_process

STAMP = "ATTNLAB_STAMP"  # when the run began: part of its directory's name; the processes of one run inherit it
VERSIONS = ("torch", "lightning", "transformers", "timm", "hydra-core")  # that decide what a run does, beside attnlab


def leave(code: int) -> NoReturn:
    """End the process at once, without waiting for libraries and threads."""
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
    with_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    output, errors = Output(sys.stdout), Output(sys.stderr)
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            code = run(sys.argv[1:])
        except BaseException as error:
            code = report_error(error, with_traceback)
        output.flush()
        if code or output.error is None:
            return code
        if isinstance(output.error, BrokenPipeError):  # of `... | head`: the reader has what it wanted
            return 128 + signal.SIGPIPE
        print(f"error: standard output: {output.error.strerror}", file=sys.stderr)
        return 1


def report_error(error: BaseException, with_traceback: bool) -> int:
    """Print an error as one line; the exit code."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if with_traceback:
        traceback.print_exception(error)
    if isinstance(error, InterpolationResolutionError):
        error = ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}")
    elif isinstance(error, OSError) and not isinstance(error, AttnlabError) and error.filename:
        error = DataError(f"{error.filename}: {error.strerror}")
    kind, code = ("", error.exit_code) if isinstance(error, AttnlabError) else (f"{type(error).__name__}: ", 1)
    print(f"error: {kind}{one_line(error)}", file=sys.stderr)
    return code


def run(words: Sequence[str]) -> int:
    """Run a command line, as in sys.argv[1:]; the exit code."""
    words = sorted(words, key=lambda word: word.startswith("--config-dir="))  # explain, list and others come first
    if words[:1] == ["report"]:
        from attnlab.report import command

        gc.enable()
        return command.main(words[1:])
    if words[:1] == ["runs"]:
        from attnlab.report import runs

        gc.enable()
        return runs.main(words[1:])
    if words[:1] in (["list"], ["explain"]) or {"--help", "-h", "--version"} & set(words):
        print(printable(information(words), keep="\n"), flush=True)
        return 0
    os.environ[STAMP] = stamp(words)
    flags = parse_flags(words)
    if flags.hydra_help or flags.shell_completion:
        call_hydra(flags, lambda cfg: None)
        return 0
    with progress("checking the command line", None):  # which imports libraries for some models
        checked = check(words, load)
        for cfg in checked.jobs if checked.here and not flags.info else []:
            check_present(cfg)
    if flags.cfg:
        print(shown(checked), end="")
    elif flags.info:
        call_hydra(flags, lambda cfg: None, checked.for_hydra)
    else:
        return run_jobs(checked) if checked.line.multirun else run_job(checked)
    return 0


def call_hydra(flags: Namespace, task: Callable[[DictConfig], Any], settings: Sequence[str] | None = None) -> None:
    """Give a command line, or other settings, to Hydra: a multirun, whose jobs `task` gets, or information."""
    flags = copy.copy(flags)
    flags.overrides = list(flags.overrides if settings is None else settings)
    before = os.environ.get("HYDRA_FULL_ERROR")

    def job(cfg: DictConfig) -> Any:
        os.environ["HYDRA_FULL_ERROR"] = before or "0"  # a job's process inherits it, and prints a traceback if 1
        try:
            return task(cfg)
        finally:
            os.environ["HYDRA_FULL_ERROR"] = "1"

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises its errors instead of printing them
    try:
        setbase("1.3")
        _run_hydra(flags, get_args_parser(), job, str(CONF), "config")
    finally:
        os.environ["HYDRA_FULL_ERROR"] = before or "0"


def shown(checked: Command) -> str:
    """The text of --cfg: the composed configuration of the first job, Hydra's node, or both, as YAML."""
    flags, cfg = checked.line.flags, copy.deepcopy(checked.hydra)
    plain = written(cfg.hydra)  # the types of Hydra keep every key
    with open_dict(cfg):
        del cfg["hydra"]
        if flags.cfg != "job":
            cfg.hydra = {key: value for key, value in plain.items() if key not in ("help", "hydra_help")}
    if flags.cfg == "hydra":
        cfg = OmegaConf.masked_copy(cfg, "hydra")
    if flags.resolve:
        OmegaConf.resolve(cfg)
    node = OmegaConf.select(cfg, flags.package) if flags.package else cfg
    return (f"# @package {flags.package}\n" if flags.package else "") + OmegaConf.to_yaml(node)


def run_job(checked: Command) -> int:
    """Run a single job in this process; the exit code."""
    directory = checked.directory if checked.keeps else None
    created: list[Path] = []
    if directory:
        directory = directory.absolute()
        created = [path for path in (directory, *directory.parents) if not path.exists()]
        directory.mkdir(parents=True, exist_ok=True)
    set_up_logging(checked.hydra, directory)
    words = [word for word in checked.line.words if not word.startswith("hydra.")]
    with checked.line.composer.hydra():  # the search path, for what a measurement compares with
        return job.run(checked.jobs[0], job.command_line(words), directory, created)


def set_up_logging(composed: DictConfig, directory: Path | None) -> None:
    """Set up logging as the configuration says; without a directory no file is written."""
    cfg = copy.deepcopy(composed)
    place = escaped(escaped(str(directory)))  # references are looked for twice: below, and by Hydra
    OmegaConf.update(cfg, "hydra.runtime.output_dir", place, force_add=True)
    settings: Any = OmegaConf.to_container(cfg.hydra.job_logging, resolve=True)
    if directory is None and "file" in settings.get("handlers", {}):
        del settings["handlers"]["file"]
        settings["root"]["handlers"].remove("file")
    configure_log(DictConfig(settings), cfg.hydra.verbose)


def run_jobs(checked: Command) -> int:
    """Run the jobs of a multirun by Hydra's sweeper and launcher; the exit code."""
    gc.enable()  # a sweep may last for days
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a launcher may have jobs to end
    launching, code = os.getpid(), 0

    def task(cfg: DictConfig) -> float:
        if os.getpid() != launching and os.getppid() == launching:  # a launcher's worker, which outlives its pool
            end_with_parent()
        return run_one(checked)

    try:
        with sweep.begun(checked.directory):
            call_hydra(checked.line.flags, task, checked.for_hydra)
    except SystemExit as end:  # it was interrupted
        code = end.code if isinstance(end.code, int) else 1
    return end_of_multirun(checked, code)


def end_of_multirun(checked: Command, code: int) -> int:
    """Print how the jobs ended and write a table of them.

    Returns `code`, or 1 if it was 0 and a job has not finished or the table could not be written.
    """
    from attnlab.report import sweep as comparison

    jobs = None if checked.line.searches else len(checked.jobs) or None
    code = max(code, sweep.summarize(checked.directory, jobs))
    try:
        for path in comparison.render(checked.directory):
            print(printable(str(path)), file=sys.stderr)
    except AttnlabError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        code = max(code, error.exit_code)
    return code


def information(arguments: Sequence[str]) -> str:
    """The text of `attnlab --help`, `attnlab --version`, `attnlab list` and `attnlab explain`."""
    if {"--help", "-h"} & set(arguments):
        name = Path(sys.argv[0]).name
        return help_text(name if name == "attnlab" else f"python -m {'src.run' if name == 'run.py' else 'attnlab'}")
    if "--version" in arguments:
        installed = {name: distribution.version for name in VERSIONS for distribution in distributions(name=name)}
        versions = ", ".join(f"{name} {version}" for name, version in installed.items())
        return f"attnlab {__version__} ({versions}, python {platform.python_version()})"
    return (explain if arguments[0] == "explain" else listing)(list(arguments[1:]))


def run_one(checked: Command) -> float:
    """Run one job of a multirun in a new process. Hydra calls this.

    Returns the best value of the validation metric that the task monitors, or NaN. TrainingError: a sweeper that
    searches gets no value.
    """
    context = HydraConfig.get()
    number, directory = context.job.num, Path(context.runtime.output_dir)
    if checked.line.searches:
        words = checked.line.of_job(list(context.overrides.task))
        cfg = check(words, load).jobs[0]
    else:
        words, cfg = checked.line.of_job(checked.texts[number]), checked.jobs[number]
    value = sweep.run_job(cfg, number, words, directory, checked.directory)
    if math.isnan(value) and checked.line.searches:
        raise TrainingError(f"{directory}: the run has no value to optimize")
    return value


def stamp(arguments: Sequence[str]) -> str:
    """The start of this run, the same in all its processes. ConfigError: torchrun without `hydra.run.dir=`."""
    first = first_process()
    if not first and STAMP in os.environ:
        return os.environ[STAMP]  # Lightning started this process
    if "SLURM_STEP_ID" in os.environ:
        return f"slurm-{os.environ['SLURM_JOB_ID']}-{os.environ['SLURM_STEP_ID']}"
    several = not first or int(os.environ.get("WORLD_SIZE", 1)) > 1
    if several and not any(text.startswith("hydra.run.dir=") for text in arguments):
        raise ConfigError("processes started by torchrun need one directory: give hydra.run.dir=outputs/<name>")
    return datetime.now().strftime("%Y-%m-%d_%H-%M-%S_%f")

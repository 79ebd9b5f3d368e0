"""Trainings and sweeps started from Python, each in a new process: this one keeps its memory, signals and settings."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlab.config.check import check
from attnlab.config.compose import quoted
from attnlab.errors import AttnlabError, ConfigError, DataError
from attnlab.run import loading
from attnlab.run import record as records
from attnlab.run.directory import near, refuse_live
from attnlab.run.processes import end_with_parent
from attnlab.run.sweep import listed

if TYPE_CHECKING:
    from attnlab.trained import Model


@dataclass(frozen=True, repr=False)
class Run:
    """The directory of a run. :func:`attnlab.train` returns it.

    Args:
        directory: contains config.yaml, record.json, the log and the weights.
        config_dir: directory of the YAML files that name the user's own classes, or None.

    Example:
        >>> run = attnlab.Run(Path("outputs/mustc/mtla/RUN"))
        >>> run
        Run(outputs/mustc/mtla/RUN, no record)
    """

    directory: Path
    config_dir: str | None = None

    def __repr__(self) -> str:
        return f"Run({near(self.directory)}, {self.status})"

    @property
    def status(self) -> str:
        """State of the run: "finished", "failed", "interrupted", "running", or "no record"."""
        return str(records.recorded(self.directory).get("status", "no record"))

    @property
    def record(self) -> dict[str, Any]:
        """Content of record.json: quality, sizes, speeds, settings. DataError: the file is missing or damaged."""
        if values := records.recorded(self.directory):
            return values
        raise DataError(f"{self.directory / records.RECORD}: no record that can be read; has the run begun?")

    def load(self, *settings: str) -> Model:
        """Load the trained model, see :func:`attnlab.load`."""
        from attnlab import load

        return load(self.directory, *settings, config_dir=self.config_dir)


def train(*settings: str) -> Run:
    """Train and score a model, as the command `attnlab SETTINGS` does.

    The run has a process of its own, whose lines are printed. An interrupt is passed to it, so that it can be resumed.

    Args:
        settings: words of the command line, such as "task=mustc", "attention=mtla", "stride=2". The first mode of the
            task is the default; "mode=compress" and other modes that write a run directory work too.

    Returns:
        The run, with `directory`, `record` and `load()`.

    Raises:
        ConfigError: a setting is wrong.
        AttnlabError: the run has failed.

    Example:
        >>> run = attnlab.train("task=wikitext2", "attention=mtla", "stride=2")
        >>> run.record["quality"]["perplexity"], run.directory
    """
    checked = check(settings, loading.load)
    if checked.line.multirun:
        raise ConfigError("attnlab.train starts one run: leave -m out, or call attnlab.sweep")
    directory = checked.directory.absolute()
    if error := _process([*settings, f"hydra.run.dir={quoted(str(directory))}"]):
        raise error
    return Run(directory, checked.line.flags.config_dir)


def sweep(*settings: str) -> list[Run]:
    """Run a job for every combination of settings, as the command `attnlab -m SETTINGS` does.

    Jobs that are finished already are not repeated.

    Args:
        settings: words of the command line; a comma separates the values of a setting: "attention=mha,mtla".

    Returns:
        The runs in the order of the jobs. A job that failed is among them if another one has finished: `status` says
        so, and `record["error"]` why.

    Raises:
        ConfigError: a setting is wrong.
        AttnlabError: no job has finished.

    Example:
        >>> for run in attnlab.sweep("task=wikitext2", "attention=mha,mtla"):
        ...     print(run.record["attention"], run.record["quality"]["perplexity"])
    """
    checked = check(settings if "-m" in settings else ["-m", *settings], loading.load)
    directory = checked.directory.absolute()
    refuse_live(directory)
    error = _process([*checked.line.words, f"hydra.sweep.dir={quoted(str(directory))}"])
    if isinstance(error, ConfigError):
        raise error
    runs = [Run(job.directory, checked.line.flags.config_dir) for job in listed(directory)]
    if error and not any(run.status == "finished" for run in runs):
        raise error
    return runs


def _process(words: Sequence[str]) -> AttnlabError | None:
    """Run a command line in a new process and print its lines. Returns its error, or None.

    KeyboardInterrupt: this process was interrupted. The run has saved what `resume=` needs.
    """
    command, last = [sys.executable, "-m", "attnlab", *words], ""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,  # a notebook shows what Python prints
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C arrives once, see below
        preexec_fn=end_with_parent,
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                with contextlib.suppress(OSError):  # whoever reads this program's output is gone: the run goes on
                    print(line, end="", flush=True)
                last = line.removeprefix("error: ").strip() if line.startswith("error: ") else last
        except BaseException:
            process.send_signal(signal.SIGINT)
            print(process.communicate()[0], end="", flush=True)
            raise
    if process.returncode < 0:
        last = f"killed by {signal.Signals(-process.returncode).name} (out of memory?)"
    kind = ConfigError if process.returncode == ConfigError.exit_code else AttnlabError
    return kind(last or f"exit code {process.returncode}") if process.returncode else None

"""The life of one run: its directory, its record, its end, whatever that is."""

import contextlib
import errno
import importlib
import logging
import os
import shlex
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from attnlab.config.build import freeze
from attnlab.config.compose import one_line
from attnlab.errors import AttnlabError
from attnlab.runs import record as records
from attnlab.runs.files import write_bytes

log = logging.getLogger("attnlab.run")


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM. A KeyboardInterrupt, because Lightning then ends the processes it has started."""


def job(cfg: DictConfig) -> None:
    """What Hydra calls for each job. A single run ends the process with its exit code; a multirun goes on."""
    hydra = HydraConfig.get()
    directory = Path(hydra.runtime.output_dir)
    added = [source.path for source in hydra.runtime.config_sources if source.provider == "command-line"]
    arguments = [*(f"--config-dir={path}" for path in added), *map(str, hydra.overrides.task)]
    if hydra.mode == RunMode.MULTIRUN:
        run_apart(arguments, directory)
    else:
        raise SystemExit(run(freeze(cfg, hydra.runtime.choices), command_line(arguments), directory))


def command_line(arguments: list[str]) -> str:
    """The command that does this run again."""
    root = [f"DATA_ROOT={shlex.quote(os.environ['DATA_ROOT'])}"] if os.environ.get("DATA_ROOT") else []
    return " ".join([*root, "python -m attnlab", *map(shlex.quote, arguments)])


def run(cfg: DictConfig, command: str, directory: Path) -> int:
    """Run the mode and keep its record, which is written first, last, and at once when a signal arrives.

    Returns the exit code: 0, the error's own, 1, or 128 and the signal's number. One line on stderr says what
    happened; the traceback lies in the run directory's log, and on stderr as well with HYDRA_FULL_ERROR=1.
    """
    first = records.first_process()
    record = records.new(cfg, command)

    def save() -> None:
        if first:
            records.write(record, directory)

    def interrupt(name: str) -> None:
        record.update(status="interrupted", error=f"interrupted by {name}")
        save()

    logging.raiseExceptions = False  # a log that cannot be written (full disk) must not hide what happened
    received: list[int] = []
    earlier = _Earlier(directory) if first else None
    with _signals(received, interrupt):
        try:
            if first:
                OmegaConf.save(cfg, directory / "config.yaml")
            save()
            record["environment"] = records.environment(cfg.hardware.accelerator)
            importlib.import_module("attnlab.torchvision_schemas")  # whatever a mode imports first
            mode = importlib.import_module(f"attnlab.modes.{cfg.mode}")
            _quiet(first)
            with contextlib.redirect_stdout(sys.stderr) if cfg.mode == "describe" else contextlib.nullcontext():
                mode.run(cfg, record, directory)
            if received:  # somebody's `except` has taken the exception that the signal raised
                raise Interrupted(signal.Signals(received[0]).name)
            record["status"] = "finished"
            save()
        except BaseException as error:
            code, message = _verdict(error, received, directory)
            if first or not received:
                _report(message)
            if not received:
                record.update(status="failed", error=message)
            try:
                if earlier and earlier.untouched():
                    earlier.restore()
                else:
                    save() if first or received else _blame(directory, message)
            except OSError as cannot:
                print(f"error: the record could not be written: {one_line(cannot)}", file=sys.stderr)
            return code
    if first and cfg.mode == "describe":
        print(records.dumps(record))
    return 0


class _Earlier:
    """What a run directory said of itself before a resumed run came: it stands again if that run trained nothing."""

    def __init__(self, directory: Path) -> None:
        paths = [directory / name for name in ("record.json", "config.yaml")]
        self.contents = {path: path.read_bytes() for path in paths if path.is_file()}
        self.last = directory / "checkpoints" / "last.ckpt"
        self.written = self._written()

    def _written(self) -> int | None:
        return self.last.stat().st_mtime_ns if self.last.is_file() else None

    def untouched(self) -> bool:
        return bool(self.contents) and self._written() == self.written

    def restore(self) -> None:
        for path, content in self.contents.items():
            write_bytes(path, content)


def _quiet(first: bool) -> None:
    """One voice on the console: Lightning's own handlers and its advice go, and all but errors of other processes."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).setLevel(logging.WARNING)
        logging.getLogger(name).propagate = True
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # Lightning 2.6 beside torch 2.13
    for handler in logging.getLogger().handlers:
        if not first and not isinstance(handler, logging.FileHandler):
            handler.setLevel(logging.ERROR)


def _verdict(error: BaseException, received: list[int], directory: Path) -> tuple[int, str]:
    """Exit code and one line."""
    if received:
        name = signal.Signals(received[0]).name
        resumable = (directory / "checkpoints" / "last.ckpt").is_file()
        return 128 + received[0], f"interrupted by {name}" + f"; resume={directory} goes on from here" * resumable
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted"
    if isinstance(error, AttnlabError):
        return error.exit_code, one_line(error)
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code or 1, f"the run ended itself with exit code {error.code}"
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    for cause in causes:
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return 1, f"disk full: {one_line(cause)} (run directory: {directory})"
    hint = f"traceback: {directory / 'run.log'}, or set HYDRA_FULL_ERROR=1"
    return 1, f"{type(error).__name__}: {one_line(error)} ({hint})"


def _report(message: str) -> None:
    """One line on stderr; the traceback into the run's log, for which the console has no ear."""
    log.debug("%s", message, exc_info=True)
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        traceback.print_exc()
    print(f"{'' if records.first_process() else f'{_rank()}: '}error: {message}", file=sys.stderr)


def _rank() -> str:
    return f"rank {os.environ.get('RANK') or os.environ.get('LOCAL_RANK')}"


def _blame(directory: Path, message: str) -> None:
    """A process that is not the first says in the record that it failed: the first may be killed before it can."""
    record = records.read(directory)
    if record["status"] == "running":
        records.write(record | {"status": "failed", "error": f"{_rank()}: {message}"}, directory)


Handler = Callable[[int, FrameType | None], None]


@contextlib.contextmanager
def _handling(handler: Handler) -> Iterator[None]:
    """Give SIGINT, SIGTERM and SIGHUP to `handler`, but for those that whoever started this process switched off."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():  # no other thread may have handlers
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for caught, previous in before.items():
            signal.signal(caught, previous)


def _signals(received: list[int], note: Callable[[str], None]) -> contextlib.AbstractContextManager[None]:
    """Turn the first signal into Interrupted, after `note` has been told its name; the second ends at once."""

    noted: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if received:
            if noted:
                os._exit(128 + number)
            return  # the record is being written
        received.append(number)
        note(signal.Signals(number).name)
        noted.append(number)
        raise Interrupted(signal.Signals(number).name)

    return _handling(handle)


def run_apart(arguments: list[str], directory: Path) -> None:
    """Run one job of a multirun as a process of its own.

    So a job's memory is its own and a job that is killed takes no other with it. Raises SystemExit if a person
    interrupts: that ends the jobs that wait, too.
    """
    place = str(directory).replace("'", "\\'")
    command = [sys.executable, "-m", "attnlab", *arguments, f"hydra.run.dir='{place}'"]
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        process.send_signal(number)

    process = subprocess.Popen(command, start_new_session=True)  # a terminal's Ctrl-C comes once, through `forward`
    with _handling(forward):
        code = process.wait()
    if code < 0:
        _mark_killed(directory, command_line(arguments), signal.Signals(-code).name)
    if received:
        raise SystemExit(128 + received[0])


def _mark_killed(directory: Path, command: str, name: str) -> None:
    """The record of a job that could not end its record itself."""
    message = f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    print(f"error: {command}: {message}", file=sys.stderr)
    if (directory / "record.json").is_file():
        records.write(records.read(directory) | {"status": "failed", "error": message}, directory)

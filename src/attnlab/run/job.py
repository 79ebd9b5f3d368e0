"""One run: its mode is called, and its record is written at the beginning and at the end, however it ends."""

import contextlib
import errno
import importlib
import logging
import os
import re
import shlex
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterable
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from attnlab.config.compose import one_line
from attnlab.errors import AttnlabError, ConfigError, LockedError, WriteError, printable
from attnlab.run import ranks
from attnlab.run import record as records
from attnlab.run.description import show
from attnlab.run.directory import refuse_foreign
from attnlab.run.files import remove_partial, write_bytes, write_text
from attnlab.run.identity import NOTHING_READ
from attnlab.run.lock import NAME as LOCK
from attnlab.run.lock import held, locked, refuse_live
from attnlab.run.loggers import close_loggers
from attnlab.run.parents import on_parent_end, orphaned, parent
from attnlab.run.signals import Interrupted, interruptible

log = logging.getLogger("attnlab.run")

VOCABULARIES = ("vocabulary.json", "tokenizer.model", "ctc_tokenizer.model", "classes.json")
OF_A_REFUSED_RUN = {"config.yaml", "record.json", "run.log", LOCK, "curves", "pretraining", *VOCABULARIES}
VANISHING = 10.0  # seconds that a process which is gone may take to let go of its files
BACKENDS = "attnlab.attention.ops.backends"  # which notes what computed each operation of attention


def command_line(arguments: Iterable[str]) -> str:
    """The shell command that repeats a run, `DATA_ROOT` included.

    Args:
        arguments: as in sys.argv[1:].
    """
    root = [f"DATA_ROOT={shlex.quote(os.environ['DATA_ROOT'])}"] if os.environ.get("DATA_ROOT") else []
    return " ".join([*root, "python -m attnlab", *map(shlex.quote, arguments)])


def run(cfg: DictConfig, command: str, directory: Path | None, created: bool = False) -> int:
    """Lock the run directory, call the mode and keep the record. It is also written at once when a signal arrives.

    An error is printed to stderr as one line. The traceback goes to the run directory's log, and to stderr as well if
    `HYDRA_FULL_ERROR=1`.

    Args:
        cfg: the fixed configuration.
        command: the command that repeats the run.
        directory: the run directory; None: the mode uses a run and keeps nothing.
        created: whether the directory was made for this run: a command that is refused then leaves none.

    Returns:
        The exit code: 0, the error's own, 1, or 128 plus the signal's number.
    """
    with contextlib.ExitStack() as stack:
        lock = None
        if directory and records.first_process():
            try:
                if not (cfg.resume and Path(cfg.resume).samefile(directory)) and held(directory) is None:
                    refuse_foreign(directory)
                lock = stack.enter_context(locked(directory))
                if cfg.resume and not Path(cfg.resume).samefile(directory):
                    refuse_live(Path(cfg.resume))
                if not cfg.resume:
                    _refuse_done(directory)
                remove_partial(directory)
            except (ConfigError, LockedError, WriteError) as error:  # nothing is written: the log is another run's
                print(f"error: {one_line(error)}", file=sys.stderr)
                return error.exit_code
        code = _run(cfg, command, directory)
        refused = created and code == ConfigError.exit_code and lock is not None and not cfg.resume
        if not (directory and refused and _remove_refused(directory)):
            return code
    with contextlib.suppress(OSError):  # another run has just taken the name
        directory.rmdir()
    return code


def _remove_refused(directory: Path) -> bool:
    """Remove what a refused command has written into a new directory; False: it has results, or other files."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.close()
    saved_files = {path.name for path in directory.iterdir()}
    if not saved_files <= OF_A_REFUSED_RUN:
        return False
    for name in saved_files - {LOCK}:
        path = directory / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return True


def _refuse_done(directory: Path) -> None:
    """Refuse a directory whose run has finished, or has weights: its configuration and its record would be replaced."""
    kept = any((directory / "checkpoints" / name).is_file() for name in ("averaged.safetensors", "last.ckpt"))
    try:
        finished = records.read(directory)["status"] == "finished"
    except (OSError, ValueError, LookupError, TypeError):
        finished = False
    if kept or finished:
        what = "a trained" if kept else "a finished"
        raise ConfigError(
            f"hydra.run.dir={directory}: {what} run, whose config.yaml and record.json would be replaced; take another "
            f"directory, or remove this one (checkpoint={directory} uses the run, resume={directory} continues it)"
        )


def _run(cfg: DictConfig, command: str, directory: Path | None) -> int:
    first = records.first_process()
    if backends := sys.modules.get(BACKENDS):  # of an earlier run in this process
        backends.forget()
    shown = directory is not None or cfg.mode == "describe"  # else the record is not kept: no weights are digested
    if cfg.resume and directory and Path(cfg.resume).samefile(directory):
        command = _first_command(directory) or command
    record = records.new(cfg, command, None if shown else {})

    def save() -> None:
        if backends := sys.modules.get(BACKENDS):  # no run without attention loads it
            record["environment"]["kernels"] = backends.used()
        if first and directory:
            records.write(record, directory)

    def save_interrupted(name: str) -> None:
        if record["status"] != "finished":  # it has everything: only the loggers are being closed
            record.update(status="interrupted", error=f"interrupted by {name}{_why()}")
            save()
        if directory and not first and orphaned():
            _record_rank_zero(directory)

    def save_lost(how: str) -> None:
        if not received and record["status"] == "running":
            print(f"error: {printable(how)}", file=sys.stderr)
            record.update(status="failed", error=_told(directory, how))
            save()

    logging.raiseExceptions = False  # a log that cannot be written (full disk) must not hide the error
    previous = _PreviousFiles(directory) if first and directory else None
    with (
        interruptible(save_interrupted) as received,
        on_parent_end(lambda: save_interrupted("SIGTERM")),
        ranks.losing(save_lost),
    ):
        try:
            if first and directory:
                write_text(directory / "config.yaml", OmegaConf.to_yaml(cfg))  # other nodes may be reading it
            save()
            if cfg.mode == "predict":
                log.info("loading libraries and weights")  # nothing else is said for several seconds
            record["environment"] = records.environment(cfg.hardware.accelerator)
            importlib.import_module("attnlab.torchvision_schemas")  # before any mode imports lightning
            if cfg.mode not in ("describe", "export"):
                device = importlib.import_module("attnlab.run.device")  # it imports torch
                device.check_devices(cfg)
                device.check_compiler(cfg)
                device.prepare_device(cfg, record["environment"])
            mode = importlib.import_module(f"attnlab.modes.{cfg.mode}")
            _quiet_libraries(first)
            with contextlib.redirect_stdout(sys.stderr) if cfg.mode == "describe" else contextlib.nullcontext():
                mode.run(cfg, record, directory)
            if received:  # a library has caught the exception
                raise Interrupted(signal.Signals(received[0]).name)
            if record["identity"]["corpus"] == records.NOT_RUN:
                records.identify(record, NOTHING_READ)
            record["status"] = "finished"
            save()
            if first and directory and cfg.get("logger"):
                close_loggers(cfg, record, directory)
        except BaseException as error:
            code, message = _exit_code_and_message(error, received, directory, cfg.mode)
            if first and not received and _lost_connection(error) and (how := ranks.failure(wait=5.0)):
                message = _told(directory, how)
            if first or not received:
                _print_error(message)
            if not received:
                record.update(status="failed", error=message)
            try:
                if previous and previous.still_valid() and record["status"] != "finished":
                    previous.restore()
                elif first or received:
                    save()
                elif directory and not _lost_rank_zero(error):
                    _record_failure(directory, message)
                elif directory:
                    _record_rank_zero(directory)
            except OSError as cannot:
                print(f"error: the record could not be written: {one_line(cannot)}", file=sys.stderr)
            return code
    if first and cfg.mode == "describe":
        show(record) if sys.stdout.isatty() else print(records.dumps(record))
    return 0


FOREIGN = (  # warnings of Lightning that say nothing to a reader of the log
    ".*LeafSpec.*",  # Lightning 2.6 with torch 2.13
    r"The number of training batches \(\d+\) is smaller than the logging interval",
    "You're resuming from a checkpoint that ended before the epoch ended",  # data continue there: callbacks/resume.py
    "Checkpoint directory .* exists and is not empty",  # every resumed run
    r"`ModelCheckpoint\(monitor=.*could not find the monitored key",  # of a run without a validation: fit says so
    "You're using the WeightAveraging callback with a model that overrides the configure_model",  # fsdp is refused
)


class _PreviousFiles:
    """Record and config that a resumed run found: they are restored if it fails before it saves a checkpoint."""

    def __init__(self, directory: Path) -> None:
        paths = [directory / name for name in ("record.json", "config.yaml")]
        self.contents = {path: path.read_bytes() for path in paths if path.is_file()}
        if paths[0] in self.contents and (dead := _dead(directory)):
            self.contents[paths[0]] = dead
        self.last = directory / "checkpoints" / "last.ckpt"
        self.saved = self._saved()

    def _saved(self) -> int | None:
        return self.last.stat().st_mtime_ns if self.last.is_file() else None

    def still_valid(self) -> bool:
        return bool(self.contents) and self._saved() == self.saved

    def restore(self) -> None:
        for path, content in self.contents.items():
            write_bytes(path, content)


def _first_command(directory: Path) -> str:
    """The command of the run that continues: with that it can be repeated elsewhere. Empty: its record has none."""
    try:
        return str(records.read(directory)["command"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def _dead(directory: Path) -> bytes | None:
    """The record of a run that was killed, as it would have said so itself; None: it has ended otherwise."""
    try:
        record = records.read(directory)
        running = record["status"] == "running"
    except (ValueError, LookupError, TypeError):
        return None
    killed = {"status": "failed", "error": "its process was killed (out of memory?)"}
    return (records.dumps(record | killed) + "\n").encode() if running else None


def _quiet_libraries(first: bool) -> None:
    """Remove Lightning's own log handlers and advice; from processes other than rank zero print errors only."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).setLevel(logging.WARNING)
        logging.getLogger(name).propagate = True
    for message in FOREIGN:
        warnings.filterwarnings("ignore", message=message)
    for handler in logging.getLogger().handlers:
        if not first and not isinstance(handler, logging.FileHandler):
            handler.setLevel(logging.ERROR)


def _lost_connection(error: BaseException) -> bool:
    """Whether this is what a process notices when another one has ended."""
    said = ("Connection closed", "Connection reset", "Broken pipe", "NCCL")
    return isinstance(error, RuntimeError) and any(words in str(error) for words in said)


def _told(directory: Path | None, how: str) -> str:
    """What a rank has written into the record before it ended; `how` it ended if it has not."""
    try:
        error = str(records.read(directory).get("error", "")) if directory else ""
    except (OSError, ValueError):
        error = ""
    return error if error.startswith(f"{' '.join(how.split()[:2])}: ") else how


def _lost_rank_zero(error: BaseException) -> bool:
    """Whether this rank failed because rank zero had ended: the news may come a moment later than the error."""
    deadline = time.monotonic() + 2.0
    while _lost_connection(error) and not orphaned() and time.monotonic() < deadline:
        time.sleep(0.1)
    return orphaned()


def _record_rank_zero(directory: Path) -> None:
    """Record the end of rank zero, which could not do so itself, if nobody has taken the directory since."""
    by, deadline = parent(), time.monotonic() + VANISHING
    while by and by.alive() and time.monotonic() < deadline:  # its last thread lets go of the lock
        time.sleep(0.05)
    with contextlib.suppress(LockedError), locked(directory):
        if dead := _dead(directory):
            write_bytes(directory / "record.json", dead)


def _why() -> str:
    """The cause of the signal, where it is known."""
    by = parent()
    return f": process {by.pid}, which had started the run, has ended" if by and orphaned() else ""


def _exit_code_and_message(
    error: BaseException, received: list[int], directory: Path | None, mode: str
) -> tuple[int, str]:
    if received:
        name = signal.Signals(received[0]).name
        resumable = directory is not None and (directory / "checkpoints" / "last.ckpt").is_file()
        said = f"interrupted by {name}{_why()}"
        if resumable:
            said += f"; resume={directory} continues the run"
        elif directory is not None and mode in ("train", "convert", "compress"):
            said += "; the same command starts again, with what is complete in the cache"
        return 128 + received[0], said
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted"
    if isinstance(error, AttnlabError):
        return error.exit_code, one_line(error)
    if isinstance(error, BrokenPipeError) and directory is None:  # of `attnlab mode=predict ... | head`
        return 128 + signal.SIGPIPE, "standard output was closed before everything was written"
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code or 1, f"the mode ended the process with exit code {error.code}"
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    for cause in causes:
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return 1, f"disk full: {one_line(cause)}" + (f" (run directory: {directory})" if directory else "")
        if size := re.search(r"can't allocate memory: you tried to allocate (\d+) bytes", str(cause)):  # torch, CPU
            needed = f"a tensor of {int(size[1]) / 2**30:.1f} GiB does not fit"
            return 1, f"out of memory: {needed}; lower the sizes in task.model, attention or task.data, or the batch"
    hint = "set HYDRA_FULL_ERROR=1"
    hint = f"traceback: {directory / 'run.log'}, or {hint}" if directory else f"{hint} for the traceback"
    return 1, f"{type(error).__name__}: {one_line(error)} ({hint})"


def _print_error(message: str) -> None:
    log.debug("%s", message, exc_info=True)  # the run directory's log has it; the console's level is INFO
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        traceback.print_exc()
    print(f"{'' if records.first_process() else f'{_rank()}: '}error: {printable(message)}", file=sys.stderr)


def _rank() -> str:
    return f"rank {os.environ.get('RANK') or os.environ.get('LOCAL_RANK')}"


def _record_failure(directory: Path, message: str) -> None:
    """Record the failure of a process other than rank zero, which may be killed before it can write."""
    record = records.read(directory)
    if record["status"] == "running":
        records.write(record | {"status": "failed", "error": f"{_rank()}: {message}"}, directory)

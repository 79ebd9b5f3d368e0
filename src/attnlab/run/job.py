"""One run: its mode is called, and its record is written at the beginning and at the end, however it ends."""

import contextlib
import errno
import gc
import importlib
import logging
import os
import re
import shlex
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from attnlab.config.compose import one_line
from attnlab.config.schema import constant
from attnlab.errors import AttnlabError, ConfigError, LockedError, WriteError, printable
from attnlab.run import record as records
from attnlab.run.console import printed_at_the_end
from attnlab.run.directory import WEIGHTS, locked, near, refuse_live, refuse_used
from attnlab.run.files import remove_partial, write_text
from attnlab.run.identity import NOTHING_READ
from attnlab.run.processes import Interrupted, interruptible

log = logging.getLogger("attnlab.run")

BACKENDS = "attnlab.attention.ops.backends"  # which notes what computed each operation of attention
FOREIGN = (  # warnings of Lightning that say nothing to a reader of the log
    ".*LeafSpec.*",  # Lightning 2.6 with torch 2.13
    r"The number of training batches \(\d+\) is smaller than the logging interval",
    "You're resuming from a checkpoint that ended before the epoch ended",  # data continues there
    "Checkpoint directory .* exists and is not empty",  # every resumed run
    r"`ModelCheckpoint\(monitor=.*could not find the monitored key",  # of a run without a validation: fit says so
    "You're using the WeightAveraging callback with a model that overrides the configure_model",  # fsdp is refused
)


def command_line(arguments: Iterable[str]) -> str:
    """The shell command that repeats a run, `DATA_ROOT` included. `arguments`: as in sys.argv[1:]."""
    root = [f"DATA_ROOT={shlex.quote(os.environ['DATA_ROOT'])}"] if os.environ.get("DATA_ROOT") else []
    return " ".join([*root, "python -m attnlab", *map(shlex.quote, arguments)])


def run(cfg: DictConfig, command: str, directory: Path | None, created: Sequence[Path] = ()) -> int:
    """Lock the run directory, call the mode and write the record, also if the run fails or a signal arrives.

    An error is printed to stderr as one line. The traceback goes to the log, and to stderr with `HYDRA_FULL_ERROR=1`.
    A command that is refused removes `created`, the folders made for it, the directory first. Without a `directory`
    no record is written. Returns the exit code: 0, that of the error, 1, or 128 plus the number of the signal.

    What a mode prints on standard output appears when its record is written, unless the mode `PRINTS_AT_ONCE`.
    """
    at_once = constant(f"attnlab.modes.{cfg.mode}.PRINTS_AT_ONCE") is True
    with contextlib.nullcontext() if at_once else printed_at_the_end():
        return _locked(cfg, command, directory, created)


def _locked(cfg: DictConfig, command: str, directory: Path | None, created: Sequence[Path]) -> int:
    if not directory or not records.first_process():
        return _run(cfg, command, directory)
    try:
        with locked(directory):
            if not _continues(cfg, directory):
                refuse_used(directory)
                if cfg.resume:
                    refuse_live(Path(cfg.resume))
            remove_partial(directory)
            code = _run(cfg, command, directory)
    except (ConfigError, LockedError, WriteError) as error:  # nothing is written: the log is another run's
        print(f"error: {one_line(error)}", file=sys.stderr)
        code = error.exit_code
    if created and code == ConfigError.exit_code and not any((directory / name).exists() for name in WEIGHTS):
        shutil.rmtree(directory, ignore_errors=True)
        with contextlib.suppress(OSError):  # another run has just begun in one of them
            for folder in created[1:]:
                folder.rmdir()
    return code


def _continues(cfg: DictConfig, directory: Path) -> bool:
    """Whether the run continues in the directory that it began in."""
    return bool(cfg.resume) and Path(cfg.resume).samefile(directory)


def _run(cfg: DictConfig, command: str, directory: Path | None) -> int:
    if backends := sys.modules.get(BACKENDS):  # of an earlier run in this process
        backends.forget()
    untouched = directory is not None and _continues(cfg, directory)
    if directory and untouched:
        command = records.recorded(directory).get("command", command)  # the first one can be repeated elsewhere
    recorded = directory is not None or cfg.mode == "describe"  # else no weights are digested
    record = records.new(cfg, command, None if recorded else {})

    def save_interrupted(name: str) -> None:
        if record["status"] != "finished":  # it has everything: only the loggers are being closed
            record.update(status="interrupted", error=f"interrupted by {name}")
            _save(record, None if untouched else directory)

    logging.raiseExceptions = False  # a log that cannot be written (full disk) must not hide the error
    with interruptible(save_interrupted) as received:
        try:
            _prepare(cfg, record, directory)
            untouched = False
            if directory and records.first_process():
                write_text(directory / "config.yaml", OmegaConf.to_yaml(cfg))  # other nodes may be reading it
            _save(record, directory)
            mode = importlib.import_module(f"attnlab.modes.{cfg.mode}")
            _quiet_libraries()
            gc.freeze()  # modules stay, so later collections need not visit them
            gc.enable()  # `attnlab.__main__` has disabled it
            with contextlib.redirect_stdout(sys.stderr) if cfg.mode == "describe" else contextlib.nullcontext():
                mode.run(cfg, record, directory)
            if received:  # a library has caught the exception
                raise Interrupted(signal.Signals(received[0]).name)
            if record["identity"]["corpus"] == records.NOT_RUN:
                records.identify(record, NOTHING_READ)
            record["status"] = "finished"
            _save(record, directory)
            if directory and cfg.get("logger") and records.first_process():
                importlib.import_module("attnlab.training.trainer").close_loggers(cfg, record, directory)
        except BaseException as error:
            return _failed(error, received, record, directory, untouched)
    if cfg.mode == "describe" and records.first_process():
        mode.show(record)
    return 0


def _failed(
    error: BaseException, received: list[int], record: dict[str, Any], directory: Path | None, untouched: bool
) -> int:
    """Print and record an error; `untouched`: the directory has an earlier run's record. Returns the exit code."""
    code, message = _exit_code_and_message(error, received, directory, record["mode"])
    if not received:
        earlier = str(records.recorded(directory).get("error")) if directory and records.first_process() else ""
        message = earlier if earlier.startswith("rank ") else message  # another rank's, which caused this one
        record.update(status="failed", error=message)
    if records.first_process() or not received:
        log.debug("%s", message, exc_info=True)  # the run directory's log has it; the console's level is INFO
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            traceback.print_exc()
        print(f"{'' if records.first_process() else f'{_rank()}: '}error: {printable(message)}", file=sys.stderr)
    try:
        _save(record, None if untouched else directory)
    except OSError as cannot:
        print(f"error: the record could not be written: {one_line(cannot)}", file=sys.stderr)
    return code


def _prepare(cfg: DictConfig, record: dict[str, Any], directory: Path | None) -> None:
    """Import torch, and check and set up the device. Nothing is written before."""
    if records.first_process():  # libraries load for several seconds
        names = [str(record[name]) for name in ("task", "attention", "compress", "scale") if record[name] != "none"]
        where = f"{near(directory)} · " if directory else ""
        log.info("mode=%s, %s: %sloading libraries", cfg.mode, " · ".join(names), where)
        if directory and cfg.mode == "train" and "tensorboard" in cfg.get("logger", {}):
            log.info("curves: tensorboard --logdir %s", near(directory))
    record["environment"] = records.environment(cfg.hardware.accelerator, packages=cfg.mode != "describe")
    importlib.import_module("attnlab.torchvision_schemas")  # before any mode imports lightning
    if cfg.mode not in ("describe", "export"):
        device = importlib.import_module("attnlab.run.device")  # it imports torch
        device.check_devices(cfg)
        if device.device_of(cfg).type == "cuda":
            device.prepare_cuda(cfg, record["environment"])


def _save(record: dict[str, Any], directory: Path | None) -> None:
    """Write the record, on rank zero; another rank records its failure, because rank zero may be killed next."""
    if backends := sys.modules.get(BACKENDS):  # no run without attention loads it
        record["environment"]["kernels"] = backends.used()
    if directory and records.first_process():
        records.write(record, directory)
    elif directory and record["status"] == "failed":
        running = records.recorded(directory)
        if running.get("status") == "running":
            records.write(running | {"status": "failed", "error": f"{_rank()}: {record['error']}"}, directory)


def _quiet_libraries() -> None:
    """Remove Lightning's log handlers and advice; from processes other than rank zero print errors only."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).setLevel(logging.WARNING)
        logging.getLogger(name).propagate = True
    for message in FOREIGN:
        warnings.filterwarnings("ignore", message=message)
    for handler in logging.getLogger().handlers:
        if not records.first_process() and not isinstance(handler, logging.FileHandler):
            handler.setLevel(logging.ERROR)


def _exit_code_and_message(
    error: BaseException, received: list[int], directory: Path | None, mode: str
) -> tuple[int, str]:
    if received:
        message = f"interrupted by {signal.Signals(received[0]).name}"
        if directory is not None and (directory / "checkpoints" / "last.ckpt").is_file():
            message += f"; resume={directory} continues the run"
        elif directory is not None and mode in ("train", "convert", "compress"):
            what = "checkpoint" if mode == "train" else "result"
            message += f"; no {what} yet: the same command starts again, with what is complete in the cache"
        return 128 + received[0], message
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted"
    if isinstance(error, AttnlabError):
        return error.exit_code, one_line(error)
    if isinstance(error, BrokenPipeError):  # of `attnlab mode=predict ... | head`
        return 128 + signal.SIGPIPE, "standard output was closed before everything was written"
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code or 1, f"the mode ended the process with exit code {error.code}"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return 1, f"disk full: {one_line(cause)}" + (f" (run directory: {directory})" if directory else "")
        if size := re.search(r"can't allocate memory: you tried to allocate (\d+) bytes", str(cause)):  # torch, CPU
            needed = f"a tensor of {int(size[1]) / 2**30:.1f} GiB does not fit"
            return 1, f"out of memory: {needed}; lower the sizes in task.model, attention or task.data, or the batch"
        cause = cause.__cause__ or cause.__context__
    hint = "set HYDRA_FULL_ERROR=1"
    hint = f"traceback: {directory / 'run.log'}, or {hint}" if directory else f"{hint} for the traceback"
    return 1, f"{type(error).__name__}: {one_line(error)} ({hint})"


def _rank() -> str:
    return f"rank {os.environ.get('RANK') or os.environ.get('LOCAL_RANK')}"

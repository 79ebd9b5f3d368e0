"""Removing run directories: only what is one for sure, has no other run in it, and is in use by nobody."""

import contextlib
import errno
import json
import os
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from attnlab.errors import DataError
from attnlab.runs import lock
from attnlab.runs import record as records
from attnlab.runs.ledger import BROKEN, RECORD, Run, status_of

OF_A_RECORD = {"schema", "status", "mode", "command", "task", "started", "quality", "kv_cache", "environment"}
OF_A_CONFIG = {"mode", "task", "choices", "attention", "hardware", "seed", "data_root", "cache_dir"}
LAST = ("run.log", "config.yaml", RECORD)  # removed at the end: what is left after an error is still seen as a run
OF_ANOTHER = {RECORD, "run.log", "checkpoints", ".jobs"}  # in a folder below a run: another run, or a multirun's locks
LARGEST = 2**20  # bytes of a config.yaml


def refusal(directory: Path, root: Path) -> str:
    """Why a directory is not removed; empty: it may be.

    Args:
        directory: below `root`.
        root: the folder that the user has named.
    """
    if directory == root or os.path.realpath(directory) == os.path.realpath(root):
        return "it is the folder that was named; name the one above it"
    parts = directory.relative_to(root).parts
    if any(root.joinpath(*parts[:n]).is_symlink() for n in range(1, len(parts) + 1)):
        return "it is reached through a link"
    if not is_run(directory):
        return "not a run for sure: expected a record.json of a run, or its config.yaml with its run.log"
    try:
        other = _inside(directory)
    except OSError as error:
        return f"{error.filename or directory}: cannot be read ({error.strerror})"
    return f"another run or a live process has {other}" if other else ""


def is_run(directory: Path) -> bool:
    """Whether a folder has a record.json of attnlab's own form, or a config.yaml of that form and a run.log.

    Args:
        directory: of any content.
    """
    with contextlib.suppress(OSError, ValueError, RecursionError):
        record = json.loads(_content(directory / RECORD))
        known = isinstance(record, dict) and record.keys() >= OF_A_RECORD and type(record["schema"]) is int
        if known and record["status"] in records.STATUSES:
            return True
    with contextlib.suppress(OSError):
        text = _content(directory / "config.yaml", LARGEST).decode("utf-8", "replace")
        keys = {line.partition(":")[0] for line in text.splitlines()}  # of the top level: those below are indented
        return keys >= OF_A_CONFIG and stat.S_ISREG((directory / "run.log").lstat().st_mode)
    return False


def remove(directory: Path, root: Path, what: Collection[str]) -> None:
    """Remove a run directory while its lock is held. Links in it are removed, not what they lead to.

    Args:
        directory: below `root`.
        root: the folder that the user has named.
        what: the statuses of runs that are removed.

    Raises:
        LockedError: a process uses it.
        DataError: it is not to be removed (see :func:`refusal`), or is of another status now.
        OSError: a file cannot be removed; what is left is still a run.
    """
    if why := refusal(directory, root):
        raise DataError(why)
    with lock.locked(directory, wait=0):
        status = status_of(directory)
        status = "interrupted" if status == "running" else status  # the lock is ours
        if why := f"it is {status} now" * (status not in what) or refusal(directory, root):
            raise DataError(why)
        for path in sorted(directory.iterdir(), key=lambda path: (path.name in LAST, path.name)):
            if path.name == lock.NAME:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    try:
        directory.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):  # another run has just taken the name
            raise


def users(directories: Iterable[Path], runs: Iterable[Run], root: Path) -> dict[Path, Path]:
    """Which of these directories other runs were made from or compared with, and one such run of each.

    Args:
        directories: of runs.
        runs: those whose configurations are looked at.
        root: the folder of the runs; relative paths in configurations count from the working directory, and from the
            folder above it.
    """
    wanted = {form: path for path in directories for form in (os.path.abspath(path), os.path.realpath(path))}
    bases, names = {os.getcwd(), os.path.dirname(os.path.abspath(root))}, {os.path.basename(path) for path in wanted}
    found: dict[Path, Path] = {}
    for run in runs if wanted else ():
        if run.status == BROKEN:
            continue
        try:
            record = records.read(run.directory)
        except (OSError, ValueError, RecursionError):
            continue
        for text in _texts(record.get("config") if isinstance(record, dict) else None):
            if not names.intersection(text.split("/")):
                continue
            for place in (Path(os.path.normpath(os.path.join(base, os.path.expanduser(text)))) for base in bases):
                used = next((wanted[str(one)] for one in (place, *place.parents) if str(one) in wanted), None)
                if used and used != run.directory:
                    found.setdefault(used, run.directory)
    return found


def _inside(directory: Path) -> Path | None:
    """A folder below a run that has another run, or a lock that is held; None: there is none."""

    def fail(error: OSError) -> None:
        raise error

    for folder, folders, files in os.walk(directory, onerror=fail):
        here = Path(folder)
        if here != directory and (OF_ANOTHER.intersection((*folders, *files))):
            return here
        if here == directory and ".jobs" in folders:
            return here / ".jobs"
        if here != directory and lock.NAME in files and lock.held(here):
            return here
    return None


def _content(path: Path, largest: int = -1) -> bytes:
    """What a file holds that is no link, pipe or device."""
    state = path.lstat()
    if not stat.S_ISREG(state.st_mode) or 0 <= largest < state.st_size:
        raise OSError(errno.EINVAL, "not a file of a run", str(path))
    return path.read_bytes()


def _texts(value: Any) -> Iterator[str]:
    """All texts in a configuration, however deep."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list):
            left += value
        elif isinstance(value, str) and "\0" not in value:
            yield value

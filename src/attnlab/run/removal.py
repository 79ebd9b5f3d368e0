"""Removing run directories: only what is one for sure, holds nothing else, and is in use by nobody."""

import errno
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from attnlab.errors import DataError
from attnlab.run import lock
from attnlab.run import record as records
from attnlab.run.directory import CONFIG, RECORD, foreign, is_run
from attnlab.run.ledger import BROKEN, Run, status_of

LAST = ("run.log", CONFIG, RECORD)  # removed at the end: what is left after an error is still seen as a run


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
        names = foreign(directory)
    except OSError as error:
        return f"{error.filename or directory}: cannot be read ({error.strerror})"
    return f"it holds what no run has written: {', '.join(names[:5])}{', …' * (len(names) > 5)}" if names else ""


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
        last = [directory / name for name in LAST]
        for folder, folders, files in os.walk(directory, topdown=False):
            for path in (Path(folder, name) for name in (*files, *folders)):
                if path.is_dir() and not path.is_symlink():
                    path.rmdir()
                elif path not in last and path != directory / lock.NAME:
                    path.unlink()
        for path in last:
            path.unlink(missing_ok=True)
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

"""Removing run directories: only what is one for sure, contains nothing else, and is not in use."""

import os
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

from attnlab.config.build import leaves
from attnlab.errors import DataError
from attnlab.run import lock
from attnlab.run import record as records
from attnlab.run.directory import CONFIG, RECORD, foreign, is_run
from attnlab.run.ledger import LedgerEntry, status_of

LAST = ("run.log", CONFIG, RECORD)  # removed at the end: what is left after an error is still seen as a run


def refusal(directory: Path, root: Path) -> str:
    """Why a directory below `root`, the folder that the user has named, is not removed; empty: it may be."""
    if os.path.realpath(directory) == os.path.realpath(root):
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
    """Remove a run directory of one of the statuses `what`. Links in it are removed, not what they lead to.

    Raises:
        LockedError: a process uses it.
        DataError: it is not to be removed (see :func:`refusal`), or is of another status now.
        OSError: a file cannot be removed; what is left is still a run.
    """
    with lock.locked(directory, wait=0):
        status = status_of(directory)
        status = "interrupted" if status == "running" else status  # the lock is ours
        if why := f"it is {status} now" * (status not in what) or refusal(directory, root):
            raise DataError(why)
        for path in directory.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name not in (*LAST, lock.NAME):
                path.unlink()
        for name in LAST:
            (directory / name).unlink(missing_ok=True)
    if not os.listdir(directory):  # else another run has just taken the name
        directory.rmdir()


def users(directories: Iterable[Path], runs: Iterable[LedgerEntry], root: Path) -> dict[Path, Path]:
    """Which of these run directories the configurations of other runs name, with the first such run.

    Relative paths in configurations count from the working directory and from the folder above `root`.
    """
    wanted = {os.path.realpath(path): path for path in directories}
    names, users = {os.path.basename(path) for path in wanted}, dict[Path, Path]()
    for run in runs if wanted else ():
        try:
            values = [value for _, value in leaves(records.read(run.directory)["config"]) if isinstance(value, str)]
        except (OSError, *records.UNREADABLE):
            continue
        for text in values:
            if "\0" in text or not names.intersection(text.split("/")):
                continue
            for base in (Path.cwd(), root.absolute().parent):
                path = Path(os.path.realpath(base / os.path.expanduser(text)))
                for used in wanted.keys() & {str(folder) for folder in (path, *path.parents)}:
                    if wanted[used] != run.directory:
                        users.setdefault(wanted[used], run.directory)
    return users

"""Folders in the cache: computed once, opened by name, checked when they are opened, computed again when damaged.

The name of a folder ends in a digest of everything that its content depends on, such as the files of a corpus. An
interrupted command continues after the last complete folder.
"""

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from filelock import AcquireReturnProxy, FileLock, Timeout

from attnlab.errors import DataError
from attnlab.run.console import progress
from attnlab.run.files import digest_of, replacing_folder, write_text, writing

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

INDEX = "index.json"
MANIFEST = ".manifest.json"  # hidden: it is no part of a corpus
TENSORS = "tensors.safetensors"
BY_SIZE = (".wav", ".flac", ".png")  # files that a manifest lists with their size alone

Content = TypeVar("Content")


class Damaged(DataError):
    """A stored folder is missing, or does not hold what was written to it."""


def stored(folder: Path, read: Callable[[Path], Content], write: Callable[[Path], None]) -> Content:
    """Open a stored folder, which is computed if it is missing or damaged. Other processes wait for it meanwhile.

    `read` opens a folder; any exception means that it is damaged. `write` fills a new, empty folder. DataError: the
    folder cannot be written, or not read afterwards.
    """
    try:
        return opened(folder, read)
    except Damaged:  # or missing
        pass
    with _locked(folder):
        try:
            return opened(folder, read)  # another process may have been faster
        except Damaged as error:
            if folder.is_dir():
                log.warning("%s; computing it again", error)
        with writing(folder), replacing_folder(folder) as partial:
            write(partial)
        return opened(folder, read)


def opened(folder: Path, read: Callable[[Path], Content]) -> Content:
    """The result of `read` for a stored folder. Damaged: `read` has raised an exception."""
    try:
        return read(folder)
    except Exception as error:  # libraries raise many classes for damaged files
        why = f"{type(error).__name__} " * (not isinstance(error, Damaged)) + " ".join(str(error).split())[:120]
        raise Damaged(f"{folder}: damaged ({why})") from error


def stored_files(folder: Path, write: Callable[[Path], None]) -> Path:
    """:func:`stored` for plain files, whose sizes and contents are checked against a manifest."""

    def fill(folder: Path) -> None:
        write(folder)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        states = {path.relative_to(folder).as_posix(): _state(path) for path in files}
        (folder / MANIFEST).write_text(json.dumps(states))

    return stored(folder, _check_manifest, fill)


def write_index(folder: Path, index: dict[str, Any]) -> None:
    """Write plain values with their checksum into a stored folder."""
    (folder / INDEX).write_text(json.dumps({**index, "check": digest(index)}))


def read_index(folder: Path) -> dict[str, Any]:
    """The values that :func:`write_index` has written. Raises :class:`Damaged` or what reading raises."""
    index: dict[str, Any] = json.loads((folder / INDEX).read_bytes())
    if index.pop("check") != digest(index):
        raise Damaged("its index is not what was written")
    return index


def write_tensors(folder: Path, tensors: "Mapping[str, Tensor]", about: Any = None) -> None:
    """Write `tensors` of any shape, by name, and plain values that describe them into a stored folder."""
    from safetensors.torch import save

    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    (folder / TENSORS).write_bytes(save(plain, metadata={"about": json.dumps(about)}))


def read_tensors(folder: Path) -> "tuple[dict[str, Tensor], Any]":
    """The tensors and the values that :func:`write_tensors` has written. Raises what reading raises."""
    from safetensors import safe_open

    with safe_open(folder / TENSORS, "pt") as content:
        about = json.loads(content.metadata()["about"])
        return {name: content.get_tensor(name) for name in content.keys()}, about  # noqa: SIM118


def digest(plain: Any) -> str:
    """SHA-256 of plain values, 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def file_digests(paths: Iterable[Path], memo_path: Path) -> dict[Path, str]:
    """SHA-256 of the bytes of each file. DataError: a file cannot be read.

    The JSON file `memo_path` stores the digests; a file is read again if its size or its time of change differs.
    """
    memo: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError, TypeError):  # missing or damaged: everything is hashed again
        memo.update(json.loads(memo_path.read_bytes()))
    names = {path: str(path.absolute()) for path in paths}
    entries: dict[str, list[Any]] = {}
    with ThreadPoolExecutor() as pool, progress("computing checksums of the corpus", len(names)) as advance:
        computed = pool.map(lambda path: _entry(path, memo.get(names[path])), names)
        for name, entry in zip(names.values(), computed, strict=True):
            entries[name] = entry
            advance(1)
    if (updated := memo | entries) != memo:
        write_text(memo_path, json.dumps(updated))
    return {path: entries[name][2] for path, name in names.items()}


def _entry(path: Path, known: Any) -> list[Any]:
    """Size, time of change and digest of a file; `known` is the entry of an earlier call."""
    try:
        state = path.stat()
        about = [state.st_size, state.st_mtime_ns]
        return known if isinstance(known, list) and known[:2] == about else [*about, digest_of(path)]
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _check_manifest(folder: Path) -> Path:
    states = json.loads((folder / MANIFEST).read_bytes())
    wrong = next((name for name, state in states.items() if _state(folder / name) != state), None)
    if wrong is not None or not states:
        raise Damaged(f"{wrong or MANIFEST} is not what was written")
    return folder


def _state(path: Path) -> list[int | str]:
    size = path.stat().st_size
    return [size] if path.suffix in BY_SIZE else [size, digest_of(path)]


def _locked(folder: Path) -> AcquireReturnProxy:
    """The only writer of `folder` while it lasts; the system frees the lock when its holder dies."""
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    with writing(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            return lock.acquire(timeout=0)
        except Timeout:
            log.info("%s: waiting for another process that computes it", folder.name)
            return lock.acquire()

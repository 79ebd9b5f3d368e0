"""Fingerprints of files, pretrained weights and corpora: short texts that change with the content."""

import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from attnlab.errors import DataError
from attnlab.run.cache import digest
from attnlab.run.console import progress
from attnlab.run.files import digest_of, write_text

LARGEST = 256 * 2**20  # bytes of a corpus file whose content is read; of a larger one, only the size counts
BINARY = frozenset((  # recordings, images, archives and arrays: name and size identify them
    ".ark", ".arrow", ".bin", ".bmp", ".bz2", ".flac", ".gz", ".h5", ".hdf5", ".jpeg", ".jpg", ".mp3", ".npy", ".npz",
    ".ogg", ".opus", ".parquet", ".png", ".pt", ".safetensors", ".sph", ".tar", ".tgz", ".wav", ".webp", ".xz", ".zip",
    ".zst",
))  # fmt: skip
WEIGHTS = ("manifest.json", "compressed/manifest.json", "checkpoints/averaged.safetensors")


def file_digests(paths: Iterable[Path], memo_path: Path) -> dict[Path, str]:
    """SHA-256 of the bytes of each file. DataError: a file cannot be read.

    The JSON file `memo_path` stores the digests; a file is read again if its size or its time of change differs.
    """
    try:
        memo = dict(json.loads(memo_path.read_bytes())) if memo_path.exists() else {}
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{memo_path}: damaged ({error}); remove it: everything is then hashed again") from error
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


def weights(source: str, cache_dir: Path) -> str:
    """Pretrained weights by content: "sha256:..." of a local file or folder; a hub name stays as it is written.

    Of a run directory or a compressed model the files that a run loads count; of any other folder all files but
    hidden ones. DataError: a file cannot be read.
    """
    path = Path(source).expanduser()
    memo = cache_dir.expanduser() / "digests.json"
    if path.is_file():
        return f"sha256:{file_digests([path], memo)[path]}"
    if not path.is_dir():
        return source
    files = [file for name in WEIGHTS if (file := path / name).is_file()]
    # other programs write files named manifest.json too
    files = [file for file in files if file.suffix != ".json" or any(file.parent.glob("weights-*.safetensors"))]
    files = files or sorted(
        file
        for file in path.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    digests = file_digests(files, memo)
    if len(files) == 1 and files[0].suffix == ".safetensors":
        return f"sha256:{digests[files[0]]}"  # a run directory and its file are the same weights
    return f"sha256:{digest([[file.relative_to(path).as_posix(), digests[file]] for file in files])}"


def corpus(root: Path, cache_dir: Path) -> str:
    """A corpus by the names and sizes of its files, and by the content of those that are not in BINARY.

    The place of the corpus and hidden files do not count. Returns "sha256:" and 64 hexadecimal digits. DataError: a
    file or folder cannot be read.
    """
    folders, seen = [root], set()
    texts: list[Path] = []
    listed: list[list[str]] = []
    while folders:
        folder = folders.pop()
        if (real := folder.resolve()) in seen:
            continue  # a link to a folder above
        seen.add(real)
        binary = []
        try:
            for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
                path = folder / entry.name
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    folders.append(path)
                elif entry.is_file() and (path.suffix.lower() in BINARY or entry.stat().st_size > LARGEST):
                    binary.append((entry.name, entry.stat().st_size))
                elif entry.is_file():
                    texts.append(path)
        except OSError as error:
            raise DataError(f"{error.filename or folder}: cannot be read ({error.strerror})") from error
        listed.append([folder.relative_to(root).as_posix(), digest(sorted(binary))])
    contents = [
        [path.relative_to(root).as_posix(), content]
        for path, content in file_digests(texts, cache_dir.expanduser() / "digests.json").items()
    ]
    return f"sha256:{digest([sorted(listed), sorted(contents)])}"

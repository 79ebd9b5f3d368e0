"""What a file, pretrained weights or a corpus contain, as a short text that changes with the content."""

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
    """SHA-256 of each file's bytes. A file is read again only when its size or its time of change differs.

    Args:
        memo_path: a JSON file that stores the digests between calls.

    Raises:
        DataError: a file cannot be read.
    """
    try:
        memo = dict(json.loads(memo_path.read_bytes())) if memo_path.exists() else {}
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{memo_path}: damaged ({error}); remove it: everything is then hashed again") from error
    paths = list(paths)

    def entry_of(path: Path) -> list[Any]:
        try:
            state = path.stat()
            known = memo.get(str(path.absolute()))
            about = [state.st_size, state.st_mtime_ns]
            return known if isinstance(known, list) and known[:2] == about else [*about, digest_of(path)]
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from error

    entries = {}
    with ThreadPoolExecutor() as pool, progress("computing checksums of the corpus", len(paths)) as advance:
        for path, entry in zip(paths, pool.map(entry_of, paths), strict=True):
            entries[path] = entry
            advance(1)
    updated = memo | {str(path.absolute()): entry for path, entry in entries.items()}
    if updated != memo:
        write_text(memo_path, json.dumps(updated))
    return {path: entry[2] for path, entry in entries.items()}


def weights(source: str, cache_dir: Path) -> str:
    """Pretrained weights by content: "sha256:..." of a local file or folder; a hub name stays as it is written.

    Of a run directory, or a folder with a compressed model, what a run would load counts; of any other folder all
    its files do, those of its subfolders included, without hidden ones. Nothing is fetched.

    Raises:
        DataError: the file or folder cannot be read.
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
    """A corpus by the names and sizes of its files, and by the content of those that are not binary (see BINARY).

    Where the corpus lies does not count. Hidden files do not either. The sizes are read each time, as a file that
    is overwritten in place leaves its folder's time of change as it was; contents are read when a text has changed.

    Returns "sha256:" and 64 hexadecimal digits. DataError: a file or folder cannot be read.
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

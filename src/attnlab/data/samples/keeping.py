"""Sample corpora on disk: written whole or not at all, found again by content, mended when damaged."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import soxr

from attnlab.data.samples.speech import synthesizer_version
from attnlab.errors import DataError

MANIFEST = "manifest.json"
AUDIO = (".wav", ".flac")


def keep(cache_dir: Path, name: str, fingerprint: str, write: Callable[[Path], None]) -> Path:
    """The directory `<name>-<fingerprint>` under `cache_dir`, which `write` fills unless it is there already.

    A corpus that is incomplete or damaged is written anew; a half-written one is never seen under its name, also when
    several processes write at once.  Raises DataError where it cannot be written.
    """
    target = Path(cache_dir) / f"{name}-{fingerprint}"
    try:
        if is_intact(target):
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as directory:
            fresh = Path(directory, "fresh")
            write(fresh)
            files = {f.relative_to(fresh).as_posix(): _state(f) for f in sorted(fresh.rglob("*")) if f.is_file()}
            (fresh / MANIFEST).write_text(json.dumps(files, indent=1), encoding="utf-8")
            _install(fresh, target, aside=Path(directory, "damaged"))
    except OSError as error:
        raise DataError(f"the sample corpus cannot be written to {target}: {error.strerror or error}") from error
    return target


def fingerprint(modules: Sequence[ModuleType | str], seed: int, spoken: bool = True) -> str:
    """Changes with everything that the bytes of a corpus depend on: this code, the synthesizer, the seed."""
    files = [module if isinstance(module, str) else str(module.__file__) for module in modules]
    versions = [synthesizer_version(), np.__version__, soxr.__version__] if spoken else []
    return hashlib.sha256(repr(([Path(f).read_bytes() for f in files], versions, seed)).encode()).hexdigest()[:12]


def write_lines(path: Path, lines: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")


def is_intact(root: Path) -> bool:
    try:
        manifest = json.loads((root / MANIFEST).read_text(encoding="utf-8"))
        return bool(manifest) and all(_state(root / name) == state for name, state in manifest.items())
    except (FileNotFoundError, NotADirectoryError, ValueError, AttributeError):
        return False  # what is missing or garbled is written anew


def _state(file: Path) -> dict[str, int | str]:
    """Size, and for the small text files the content as well."""
    state: dict[str, int | str] = {"size": file.stat().st_size}
    if file.suffix not in AUDIO:
        state["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    return state


def _install(fresh: Path, target: Path, aside: Path) -> None:
    """Puts `fresh` in the place of a missing or damaged `target`; a good one of another process stays."""
    if is_intact(target):
        return
    if target.exists():
        target.rename(aside)
    try:
        fresh.rename(target)
    except OSError:
        if not is_intact(target):  # not another process that was faster
            raise

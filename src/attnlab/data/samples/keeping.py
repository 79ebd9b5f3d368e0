"""What the generators of sample corpora share: the name of a corpus, and lines of text.

A corpus is stored by :func:`attnlab.runs.cache.stored_files`.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import soxr

from attnlab.data.samples.speech import synthesizer_version


def fingerprint(modules: Sequence[ModuleType | str], seed: int, spoken: bool = True) -> str:
    """Changes with everything that the bytes of a corpus depend on: this code, the synthesizer, the seed."""
    files = [module if isinstance(module, str) else str(module.__file__) for module in modules]
    versions = [synthesizer_version(), np.__version__, soxr.__version__] if spoken else []
    return hashlib.sha256(repr(([Path(f).read_bytes() for f in files], versions, seed)).encode()).hexdigest()[:12]


def write_lines(path: Path, lines: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")

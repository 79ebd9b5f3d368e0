"""The name under which a sample corpus is stored, and files of lines.

A corpus is stored by :func:`attnlab.run.cache.stored_files`.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import soxr

from attnlab.data.samples.speech import synthesizer_version


def fingerprint(modules: Sequence[ModuleType | str], seed: int, spoken: bool = True) -> str:
    """A hash of everything that the bytes of a corpus depend on: the code, the synthesizer, the seed.

    Args:
        modules: the modules that generate the corpus, or their files.
        seed: of the corpus.
        spoken: whether the corpus has synthetic speech, whose libraries then count.

    Returns:
        12 hexadecimal digits.

    Raises:
        DataError: the package of espeak-ng is not installed, with `spoken`.
    """
    files = [module if isinstance(module, str) else str(module.__file__) for module in modules]
    versions = [synthesizer_version(), np.__version__, soxr.__version__] if spoken else []
    return hashlib.sha256(repr(([Path(f).read_bytes() for f in files], versions, seed)).encode()).hexdigest()[:12]


def write_lines(path: Path, lines: Sequence[str]) -> None:
    """Write each of `lines` and a line feed to `path`, as UTF-8; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")

"""The C++ of this folder, which computes on a CPU in float32.

The system's C++ compiler builds it at the first use, in five seconds. The result is stored in a folder of
ATTNLAB_CACHE that the user alone can read and write. Its name has a digest of what it was built from and one of its
content, so that a damaged file or one for another processor is never loaded. Without a compiler torch computes the
same.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

FLAGS = ("-std=gnu++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
SLOWER = "training and decoding on a CPU take longer"
NUMBER: Any = ctypes.c_int
POINTER: Any = ctypes.c_void_p
REAL: Any = ctypes.c_float
_STEP = [POINTER, NUMBER, POINTER] + [NUMBER] * 4 + [POINTER]
FUNCTIONS = {  # and the types of their arguments
    "linear": [NUMBER] * 4 + [POINTER] * 3,
    "rms_norm": [NUMBER] * 2 + [POINTER] * 2 + [REAL, POINTER],
    "feed_forward": [NUMBER] * 4 + [POINTER] * 3 + [REAL] + [POINTER] * 4,
    "heads_step": _STEP,
    "factors_step": _STEP,
    "latents_step": _STEP,
    "merged_forward": [POINTER],
    "merged_backward": [POINTER],
}
LIMIT = 300  # seconds, for the compiler and for another process that builds
BUILDING = "building-"  # the beginning of the names of temporary folders
log = logging.getLogger(__name__)


@cache
def library() -> ctypes.CDLL | None:
    """The compiled library; None: there is no compiler, or the library cannot be built or loaded, which is logged."""
    name = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    files, compiler = sorted(Path(__file__).parent.glob("*.cpp")), shutil.which(name)
    if not files:  # an exported folder has Python alone
        return None
    if compiler is None:
        log.warning("there is no %s: %s (variable CXX)", name, SLOWER)
        return None
    try:
        folder = _own_folder()
        key = _key(compiler, files)
        if (stored := _stored(folder, key)) is not None:
            return stored
        with _locked(folder):
            return _stored(folder, key) or _load(_built(folder, key, compiler, files))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        lines = (getattr(error, "stderr", None) or b"").decode(errors="replace").splitlines() or [str(error)]
        reason = next((line for line in lines if "error" in line), lines[0])
        where = "ATTNLAB_CACHE names another folder for the library"
        log.warning("%s cannot build %s: %s: %s; %s", name, files[0].parent, SLOWER, reason, where)
        return None


def _own_folder() -> Path:
    """The folder of this user's libraries. OSError: another user may write there, or programs may not run from it."""
    cache = Path(os.environ.get("ATTNLAB_CACHE") or "~/.cache/attnlab").expanduser().absolute()
    folder = cache / f"native-{os.getuid()}"
    cache.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.lstat()
    if folder.is_symlink() or about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise PermissionError(f"{folder}: expected a folder of this user, which no other can read or write (chmod 700)")
    if os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0):
        raise PermissionError(f"{folder}: its disk is mounted noexec")
    return folder


def _key(compiler: str, files: list[Path]) -> str:
    """A digest of what decides the machine code: the sources, the flags, the compiler, and what `native` means."""
    content = b"".join(file.read_bytes() for file in (*files, *sorted(Path(__file__).parent.glob("*.h"))))
    processor = _run([compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull])
    parts = (content, " ".join(FLAGS).encode(), os.path.realpath(compiler).encode(), _run([compiler, "--version"]))
    return hashlib.sha256(b"\0".join((*parts, processor))).hexdigest()[:16]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time build. OSError: another one takes longer than LIMIT."""
    import fcntl  # which Windows lacks, where exported folders have a copy of this module

    with (folder / "lock").open("w") as file:
        end = time.monotonic() + LIMIT
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise TimeoutError(f"{file.name}: another process has it for {LIMIT} seconds") from None
                time.sleep(0.05)
        yield


def _stored(folder: Path, key: str) -> ctypes.CDLL | None:
    """A library that was built before; damaged ones are removed."""
    for file in sorted(folder.glob(f"{key}-*.so")):
        if hashlib.sha256(file.read_bytes()).hexdigest() != file.stem.partition("-")[2]:
            file.unlink(missing_ok=True)
            continue
        try:
            return _load(file)
        except OSError as error:  # of a system with other libraries, for instance
            log.info("%s: built anew: %s", file, error)
    return None


def _built(folder: Path, key: str, compiler: str, files: list[Path]) -> Path:
    """The file of a new library."""
    for left in folder.glob(f"{BUILDING}*"):  # by a killed process
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=BUILDING, dir=folder) as partial:
        made = Path(partial) / "library.so"
        _run([compiler, *FLAGS, "-o", str(made), *map(str, files)], TMPDIR=partial)
        with made.open("rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return made.rename(folder / f"{key}-{digest}.so")


def _run(command: list[str], **variables: str) -> bytes:
    """What a compiler prints. SubprocessError: it fails, or takes longer than LIMIT, and is ended with its children."""
    with subprocess.Popen(
        command,
        env=os.environ | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            printed, errors = process.communicate(timeout=LIMIT)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command[0], printed, errors)
    return printed


def _load(file: Path) -> ctypes.CDLL:
    """A library with the types of its functions. OSError: it cannot be loaded, or lacks one."""
    loaded = ctypes.CDLL(str(file))
    for function, argtypes in FUNCTIONS.items():
        if not hasattr(loaded, function):
            raise OSError(f"{file} lacks the function {function}")
        getattr(loaded, function).argtypes = argtypes
    return loaded


@cache
def matrix_product() -> int | None:
    """The address of torch's own BLAS function `sgemm_`; None: this build of torch does not export it."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    function = getattr(ctypes.CDLL(str(path)), "sgemm_", None) if path.exists() else None
    return ctypes.cast(function, ctypes.c_void_p).value if function else None

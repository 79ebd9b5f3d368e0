"""The C++ of this folder, which computes on a CPU in float32.

The system's C++ compiler builds it at the first use, in five seconds. The result is stored in ATTNLAB_CACHE. Without
a compiler torch computes the same.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
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
_QUIET: dict[str, Any] = {"check": True, "capture_output": True}
log = logging.getLogger(__name__)


@cache
def library() -> ctypes.CDLL | None:
    """The compiled library; None: there is no compiler, or it fails."""
    name = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    files, compiler = sorted(Path(__file__).parent.glob("*.cpp")), shutil.which(name)
    if not files:  # an exported folder has Python alone
        return None
    if compiler is None:
        log.warning("there is no %s: %s (variable CXX)", name, SLOWER)
        return None
    try:
        target = subprocess.run([compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull], **_QUIET).stdout
        content = b"".join(file.read_bytes() for file in (*files, *Path(__file__).parent.glob("*.h")))
        key = hashlib.sha256(content + target + " ".join(FLAGS).encode()).hexdigest()[:16]
        folder = Path(os.environ.get("ATTNLAB_CACHE", "~/.cache/attnlab")).expanduser()
        built = folder / f"native-{key}.so"
        if not built.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as partial:
                made = Path(partial) / built.name
                subprocess.run([compiler, *FLAGS, "-o", str(made), *map(str, files)], **_QUIET)
                made.replace(built)
        loaded = ctypes.CDLL(str(built.resolve()))
    except (OSError, subprocess.CalledProcessError) as error:
        printed: Any = getattr(error, "stderr", b"") or str(error).encode()
        reason = printed.decode(errors="replace")
        log.warning("%s cannot build %s: %s: %s", name, files[0].parent, SLOWER, reason)
        return None
    for function, argtypes in FUNCTIONS.items():
        getattr(loaded, function).argtypes = argtypes
    return loaded


@cache
def matrix_product() -> int | None:
    """The address of torch's own BLAS function `sgemm_`; None: this build of torch does not export it."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    function = getattr(ctypes.CDLL(str(path)), "sgemm_", None) if path.exists() else None
    return ctypes.cast(function, ctypes.c_void_p).value if function else None

"""The command in a process of its own, and the weights of the run that it leaves."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

ROOT = Path(__file__).parents[1]


def environment(**variables: str) -> dict[str, str]:
    """The variables of a process with this checkout's code, and none that a person has set for a command."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("ATTNLAB_STAMP", "DATA_ROOT", "HYDRA_FULL_ERROR")}
    return inherited | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"} | variables


def run_command(
    *words: str, cwd: Path | None = None, standard_input: str | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "attnlab", *words]
    options: dict[str, Any] = {"cwd": cwd, "env": environment(**variables), "input": standard_input}
    return subprocess.run(command, capture_output=True, text=True, timeout=900, **options)


def weights(run: Path) -> dict[str, Tensor]:
    """The averaged weights of a run."""
    return load_file(run / "checkpoints" / "averaged.safetensors")

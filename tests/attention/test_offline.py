"""The Triton kernels compile for GPUs, without one: the interpreter runs code that the compiler refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
def test_kernels_compile_for_gpus_and_fit_their_shared_memory() -> None:
    script = Path(__file__).with_name("offline.py")
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600, env=environment)
    assert run.returncode == 0, run.stderr
    result = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(result) == 20
    for name, taken, there in result:
        assert taken <= there, name

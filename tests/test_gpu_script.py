"""experiments/gpu/run.sh: without a GPU it says `not run`, and with tiny shapes every step ends well on a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "experiments" / "gpu" / "run.sh"


def results(out: Path, **env: str) -> tuple[int, dict[str, str]]:
    done = subprocess.run(
        ["bash", SCRIPT, out], env=os.environ | {"PYTHON": sys.executable} | env, capture_output=True, text=True
    )
    lines = (out / "summary.md").read_text(encoding="utf-8").splitlines()[4:]
    cells = [line.strip("| ").split(" | ") for line in lines]
    return done.returncode, {name: result for name, result, _ in cells}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="it would be measured")
def test_without_a_gpu_nothing_is_run(tmp_path: Path) -> None:
    code, found = results(tmp_path / "out")
    assert code == 1 and len(found) == 15
    assert set(found.values()) == {"not run: no CUDA device"}


@pytest.mark.slow
def test_every_step_ends_well_with_tiny_shapes(tmp_path: Path) -> None:
    code, found = results(tmp_path / "out", TINY="1")
    assert code == 0 and set(found.values()) == {"finished"}, found


@pytest.mark.slow
def test_steps_can_be_chosen_and_the_time_limited(tmp_path: Path) -> None:
    code, found = results(tmp_path / "out", TINY="1", STEPS="lm", BUDGET="10")
    assert code == 0 and found["lm"] == "not run: no time left" and found["st"] == "not run: not asked for"

"""The project's own commands: Makefile and CI."""

import os
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_torchvision_imports_beside_this_torch() -> None:
    script = "import attnlab.torchvision_schemas, torchvision, torchmetrics, torch;"
    script += "print(torch.ops.torchvision.nms.default._schema)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "torchvision::nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def make(*arguments: str) -> str:
    alone = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    done = subprocess.run(["make", *arguments], cwd=ROOT, env=alone, capture_output=True, text=True, check=True)
    return done.stdout  # as if `make check` had not started these tests


def test_make_help_lists_the_targets_and_their_commands() -> None:
    lines = make().splitlines()
    targets = "help install demo test check docs size kill-test prove tables table-% figures figure-% clean"
    assert [line.split()[1] for line in lines] == targets.split()
    for target, path in {
        "table-irratt-1": "irratt/table1",
        "table-t6-10": "t6/table10",
        "figure-t6-2": "t6/figure2",
        "figure-t6-context": "t6/figure_context",
    }.items():
        assert f"attnlab report {target.partition('-')[0]} experiments/{path}.yaml" in make("-n", target)
    assert "attnlab report table experiments" in make("-n", "tables")
    assert "attnlab report figure experiments" in make("-n", "figures")
    assert ".venv/bin/python -m src.run task=mustc attention=mtla stride=2" in make("-n", "demo").splitlines()[-1]
    assert "make check" in (ROOT / ".ci" / "run").read_text()


def test_the_constraints_pin_all_that_is_installed() -> None:
    """Everything that attnlab[dev] needs, directly or through others. CUDA packages are pinned by torch."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(line.partition("==")[0]): line.partition("==")[2] for line in lines if line[0] != "#"}
    todo, seen = [Requirement("attnlab[dev]")], set()
    while todo:
        requirement = todo.pop()
        key = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if key in seen or key[0].startswith(("nvidia-", "cuda-", "triton")):
            continue
        seen.add(key)
        installed = distribution(requirement.name)
        if key[0] != "attnlab":
            assert pinned.get(key[0]) == installed.version.partition("+")[0], requirement
        for more in map(Requirement, installed.requires or []):
            if any(not more.marker or more.marker.evaluate({"extra": extra}) for extra in requirement.extras or {""}):
                todo.append(more)
    assert len(seen) > 80

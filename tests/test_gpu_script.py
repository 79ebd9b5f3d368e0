"""experiments/gpu/run.sh: its commands are right, and with tiny shapes every step ends well on a CPU."""

import os
import re
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from attnlab.attention import MLA
from attnlab.bench.variants import lineup
from attnlab.config.build import instantiate
from attnlab.config.check import check
from attnlab.models.build import build_attention, without_memory
from attnlab.run.loading import load

SCRIPT = Path(__file__).parents[1] / "experiments" / "gpu" / "run.sh"
TEXT = SCRIPT.read_text(encoding="utf-8")
PARTS = [names.split() for names in re.findall(r'^    [1-9]\) STEPS="(.*)" ;;$', TEXT, re.MULTILINE)]
CORPORA = ("lm_wikitext2", "st_digits_en_de", "asr_an4_mfcc")
Commands = dict[str, tuple[int, list[str]]]  # by step: its seconds, and its words


def started(out: Path, **env: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "ATTNLAB_CORPORA"}
    environment = inherited | {"PYTHON": sys.executable} | env
    return subprocess.run(["bash", SCRIPT, out], env=environment, capture_output=True, text=True)


def results(out: Path, **env: str) -> tuple[int, dict[str, str]]:
    done = started(out, **env)
    lines = (out / "summary.md").read_text(encoding="utf-8").splitlines()[4:]
    cells = [line.strip("| ").split(" | ") for line in lines]
    return done.returncode, {name: result for name, result, _ in cells}


def commands(out: Path, **env: str) -> Commands:
    lines = [shlex.split(line) for line in started(out, DRY="1", **env).stdout.splitlines()]
    return {name: (int(most), words) for name, most, *words in lines}


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> Commands:
    root = tmp_path_factory.mktemp("corpora")
    for folder in CORPORA:
        (root / folder).mkdir()
    return commands(root / "out", ATTNLAB_CORPORA=str(root))


@pytest.mark.parametrize("name", [name for part in PARTS for name in part if not name.startswith("tests")])
def test_a_command_composes(name: str, dry: Commands) -> None:
    """As it runs on a GPU: no seconds of one are spent on a wrong key."""
    words = dry[name][1]
    assert words[1:3] == ["-m", "src.run"] and words[-1].endswith(f"/{name}/run")
    (cfg,) = check(words[3:-1], load).jobs
    if cfg.mode == "bench":
        with without_memory():
            layers = [build_attention(variant.cfg, 0) for variant in lineup(cfg, instantiate(cfg.bench))]
        assert len(layers) > 3
        assert all(a.latent_dim == 4 * a.head_dim for a in layers if isinstance(a, MLA))  # not another one's rank


def test_each_part_ends_within_nine_minutes_and_all_within_thirty(dry: Commands) -> None:
    assert sorted(name for part in PARTS for name in part) == sorted(dry) and len(PARTS) == 4
    assert all(sum(dry[name][0] for name in part) <= 540 for part in PARTS)
    assert sum(most for most, _ in dry.values()) <= 1800


def test_the_tests_of_a_gpu_are_all_named(dry: Commands) -> None:
    """Only files that have such tests are named: importing others may need packages that the machine lacks."""
    named = {word for step in ("tests", "tests_bench") for word in dry[step][1] if word.startswith("tests/")}
    root = SCRIPT.parents[2]
    files = [path for path in (root / "tests").rglob("test_*.py") if "mark." + "gpu" in path.read_text()]
    assert named == {str(path.relative_to(root)) for path in files}


def test_tiny_commands_have_the_keys_of_those_for_a_gpu(dry: Commands, tmp_path: Path) -> None:
    tiny = commands(tmp_path / "out", TINY="1")
    assert list(tiny) == list(dry)
    for name in [name for name in dry if not name.startswith("tests")]:
        real, small = ({word.partition("=")[0] for word in steps[name][1]} for steps in (dry, tiny))
        assert real <= small, name


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="it would be measured")
def test_without_a_gpu_nothing_is_run(tmp_path: Path) -> None:
    code, ended = results(tmp_path / "out")
    assert code == 1 and len(ended) == 23
    assert set(ended.values()) == {"not run: no CUDA device"}
    assert started(tmp_path / "out", PART="5").returncode == 2


@pytest.mark.slow
def test_every_step_ends_well_with_tiny_shapes(tmp_path: Path) -> None:
    code, ended = results(tmp_path / "out", TINY="1")
    missing = {name: result for name, result in ended.items() if result != "finished"}
    assert code == 0 and set(missing.values()) == {f"not run: no ATTNLAB_CORPORA/{folder}" for folder in CORPORA}
    assert len(missing) == 5
    with tarfile.open(tmp_path / "out" / "gpu.tgz") as archive:
        names = archive.getnames()
    assert {"summary.md", "records/kernels_cpu.json", "./kernels/log.txt"} <= set(names)

"""`resume=` continues one run: what shapes its numbers cannot change, and a finished run is left alone."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from attnlab.config.check import compose
from attnlab.errors import ConfigError
from attnlab.runs.resuming import check_resumed

STARTED = ("task=wikitext2", "attention=mtla", "task.train.max_steps=20")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """An interrupted run with these settings."""
    OmegaConf.save(compose(*STARTED), tmp_path / "config.yaml")
    (tmp_path / "record.json").write_text(json.dumps({"status": "interrupted"}))
    return tmp_path


def resume(run: Path, *overrides: str) -> None:
    check_resumed(compose(*STARTED, f"resume='{run}'", *overrides))


@pytest.mark.parametrize(
    "override",
    [
        "task.train.max_steps=40",
        "hardware=cpu",
        "task.sampling.tokens=5",
        "task.train.keep_best=2",
        "cache_dir=/elsewhere",
    ],
)
def test_limits_hardware_and_scoring_may_change(run: Path, override: str) -> None:
    resume(run)
    resume(run, override)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("seed=7", "seed=1;"),
        ("task.optimizer.lr=0.5", "task.optimizer.lr=0"),
        ("stride=4", "attention.stride=2;"),
        ("attention=mha", "attention._target_=MTLA, "),
        ("hardware.precision=bf16-mixed", "hardware.precision=32-true;"),
    ],
)
def test_other_changes_are_refused_by_key(run: Path, override: str, told: str) -> None:
    with pytest.raises(ConfigError, match=f"the run was started with .*{told}.*give the same values"):
        resume(run, override)


def test_a_finished_run_continues_only_with_a_higher_limit(run: Path) -> None:
    (run / "record.json").write_text(json.dumps({"status": "finished"}))
    with pytest.raises(ConfigError, match="the run is finished; raise task.train.max_steps"):
        resume(run)
    resume(run, "task.train.max_steps=40")


def test_a_file_that_is_no_configuration_is_named(run: Path) -> None:
    (run / "config.yaml").write_text("[1, 2")
    with pytest.raises(ConfigError, match=r"config\.yaml: not the configuration of a run"):
        resume(run)

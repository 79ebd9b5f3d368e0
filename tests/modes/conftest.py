from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from tests.export.trained import run_directory
from tests.tasks.conftest import cache, root, start  # noqa: F401

TrainedRun = Callable[..., tuple[Path, Any]]


@pytest.fixture(scope="session")
def _runs() -> dict[tuple[str, ...], tuple[Path, Any]]:
    return {}


@pytest.fixture
def trained_run(
    _runs: dict[tuple[str, ...], tuple[Path, Any]], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> TrainedRun:
    """trained_run(*settings) -> a run directory with random weights, tmp_path / "run", and its module."""

    def make(*settings: str) -> tuple[Path, Any]:
        if settings not in _runs:
            _runs[settings] = run_directory(tmp_path_factory.mktemp("trained") / "run", *settings)
        directory, module = _runs[settings]
        return copytree(directory, tmp_path / "run"), deepcopy(module)

    return make

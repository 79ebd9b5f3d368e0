"""attnlab.load of an exported folder gives the predictions of its run."""

from pathlib import Path
from typing import Any

import pytest
import torch

import attnlab
from attnlab.config.check import check
from attnlab.errors import ConfigError
from attnlab.run.loading import load
from attnlab.tasks.base import Trains, task_of
from tests.modes.conftest import TrainedRun
from tests.modes.test_export_trained import IMAGES, LANGUAGE


def exported(run: Path, place: Path, format: Any = "hf") -> Path:
    cfg = check(("mode=export", f"checkpoint='{run}'", "hardware=cpu"), load).jobs[0]
    task_of(cfg, Trains).export(place, format, {"task": cfg.task.name, "attention": "mtla"})
    return place


@pytest.mark.parametrize("attention", ["gqa", "mtla"])
def test_a_language_model(attention: str, trained_run: TrainedRun, tmp_path: Path) -> None:
    run, _ = trained_run(*LANGUAGE, f"attention={attention}")
    model: Any = attnlab.load(exported(run, tmp_path / "folder"))
    assert repr(model).startswith(f"ExportedText({tmp_path / 'folder'}, ")
    expected = attnlab.load(run).predict(["w3 w4", "w5"], temperature=0, tokens=5)
    assert model.predict(["w3 w4", "w5"], temperature=0, tokens=5) == expected
    sampled = model.predict("w3 w4", top_k=4, tokens=3)
    state = torch.get_rng_state()
    assert model.predict("w3 w4", top_k=4, tokens=3) == sampled and torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ConfigError, match="its settings are tokens, temperature"):
        model.predict("w3", beam=2)


def test_images(trained_run: TrainedRun, tmp_path: Path) -> None:
    run, _ = trained_run(*IMAGES)
    model: Any = attnlab.load(exported(run, tmp_path / "folder"))
    assert repr(model) == f"ExportedImages({tmp_path / 'folder'}, 3 classes)"
    pictures = list(torch.rand(3, 3, 40, 50, generator=torch.Generator().manual_seed(0)))
    for result, expected in zip(
        model.predict(pictures, top=2), attnlab.load(run).predict(pictures, top=2), strict=True
    ):
        assert result["prediction"] == expected["prediction"]
        for one, other in zip(result["classes"], expected["classes"], strict=True):
            assert one["probability"] == pytest.approx(other["probability"], abs=1e-5)


def test_plain_weights_are_refused(trained_run: TrainedRun, tmp_path: Path) -> None:
    run, _ = trained_run(*LANGUAGE, "attention=gqa")
    with pytest.raises(ConfigError, match="load their run directory"):
        attnlab.load(exported(run, tmp_path / "folder", "safetensors"))

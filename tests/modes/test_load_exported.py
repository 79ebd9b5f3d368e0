"""attnlab.load of an exported folder gives the predictions of its run."""

from typing import Any

import pytest
import torch

import attnlab
from attnlab.errors import ConfigError
from tests.modes.conftest import TrainedRun
from tests.modes.test_export_trained import IMAGES, LANGUAGE, exported


@pytest.mark.parametrize("attention", ["gqa", "mtla"])
def test_a_language_model(attention: str, trained_run: TrainedRun) -> None:
    run, _ = trained_run(*LANGUAGE, f"attention={attention}")
    model: Any = attnlab.load(exported(run))
    assert repr(model).startswith(f"ExportedText({run / 'exported'}, ")
    expected = attnlab.load(run).predict(["w3 w4", "w5"], temperature=0, tokens=5)
    assert model.predict(["w3 w4", "w5"], temperature=0, tokens=5) == expected
    sampled = model.predict("w3 w4", top_k=4, tokens=3)
    state = torch.get_rng_state()
    assert model.predict("w3 w4", top_k=4, tokens=3) == sampled and torch.equal(torch.get_rng_state(), state)
    with pytest.raises(TypeError, match="no setting 'beam'; there are: seed, temperature, tokens"):
        model.predict("w3", beam=2)


def test_images(trained_run: TrainedRun) -> None:
    run, _ = trained_run(*IMAGES)
    model: Any = attnlab.load(exported(run))
    assert repr(model) == f"ExportedImages({run / 'exported'}, 3 classes)"
    pictures = list(torch.rand(3, 3, 40, 50, generator=torch.Generator().manual_seed(0)))
    both = model.predict(pictures, top=2), attnlab.load(run).predict(pictures, top=2)
    for result, expected in zip(*both, strict=True):
        assert result["prediction"] == expected["prediction"]
        for one, other in zip(result["classes"], expected["classes"], strict=True):
            assert one["probability"] == pytest.approx(other["probability"], abs=1e-5)
    with pytest.raises(TypeError, match="no setting 'tops'; nearest: top"):
        model.predict(pictures, tops=2)


def test_plain_weights_are_refused(trained_run: TrainedRun) -> None:
    run, _ = trained_run(*LANGUAGE, "attention=gqa")
    with pytest.raises(ConfigError, match="load their run directory"):
        attnlab.load(exported(run, "format=safetensors"))

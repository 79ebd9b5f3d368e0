"""record.json: its skeleton, its writing, what a good one is."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from attnlab.config.check import compose
from attnlab.run import record as records
from attnlab.run.record import NOT_RUN, problems

PROMISED = {  # the keys that tables may count on, schema 2
    "schema status mode command config task corpus attention stride rank compress scale seed": None,
    "parameters": "total attention trainable",
    "kv_cache": "elements_per_token_per_layer bytes_predicted bytes_measured",
    "quality": "",
    "inference": "seconds tokens_per_second peak_memory_mib mean_memory_mib batch beam dtype protocol",
    "training": "steps seconds tokens_per_second final_loss",
    "environment": "torch device git packages_hash",
}


@pytest.fixture(scope="module")
def skeleton() -> dict[str, Any]:
    return records.new(compose("attention=mtla", "seed=3"), "python -m attnlab attention=mtla seed=3")


def test_a_new_record_has_every_promised_key_and_no_number_yet(skeleton: dict[str, Any]) -> None:
    for keys, inner in PROMISED.items():
        assert all(key in skeleton for key in keys.split())
        if inner is not None:
            assert set(inner.split()) <= set(skeleton[keys])
            assert set(skeleton[keys].values()) <= {NOT_RUN}
    assert problems(skeleton) == []
    assert (skeleton["attention"], skeleton["stride"], skeleton["seed"]) == ("mtla", 2, 3)
    assert skeleton["status"] == "running"
    assert records.new(compose("attention=mha"), "")["stride"] is None


def test_the_environment_names_what_ran(skeleton: dict[str, Any]) -> None:
    environment = records.environment("cpu")
    assert environment["torch"] == torch.__version__
    assert environment["device"].startswith("cpu: ") and environment["device"] != "cpu: "
    packages = environment["packages_hash"]
    assert len(packages) == 64 and packages == records.environment("cpu")["packages_hash"]
    assert problems(skeleton | {"environment": environment}) == []


def test_what_is_not_json_becomes_json(tmp_path: Path) -> None:
    values = {"nan": math.nan, "inf": -math.inf, "numpy": np.float32(0.5), "torch": torch.tensor(3), "path": Path("x")}
    records.write({"values": values, "list": (1, math.nan)}, tmp_path)
    text = (tmp_path / "record.json").read_text()
    assert json.loads(text) == {
        "values": {"nan": "nan", "inf": "-inf", "numpy": 0.5, "torch": 3, "path": "x"},
        "list": [1, "nan"],
    }


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"schema": 3}, "schema 3"),
        ({"status": "done"}, "status 'done'"),
        ({"seed": "1"}, "seed: expected int"),
        ({"corpus": None}, "corpus: expected str"),
        ({"parameters": {"total": 1}}, "parameters.attention: expected float"),
        ({"parameters": {"total": None, "attention": 1, "trainable": 1}}, "parameters.total: expected float"),
        ({"training": NOT_RUN}, "training: expected dict"),
        ({"identity": {"recipe": "a", "run": "b", "corpus": "c"}}, "identity.weights: expected dict"),
        ({"identity": {"recipe": 1, "run": "b", "corpus": "c", "weights": {}}}, "identity.recipe: expected str"),
        ({"status": "failed"}, "an error belongs to"),
        ({"error": "x"}, "an error belongs to"),
        *(({"bench": bench}, "bench: expected") for bench in (None, {"rows": [1]}, {"rows": None})),
        ({"config": {"task": 3}}, "config.task: expected dict"),
    ],
)
def test_a_bad_record_is_recognised(skeleton: dict[str, Any], change: dict[str, Any], problem: str) -> None:
    assert problem in " · ".join(problems(skeleton | change))


def test_the_speed_of_an_older_training_on_images_has_its_unit(skeleton: dict[str, Any]) -> None:
    config = OmegaConf.to_container(compose("task=imagenet", "compress=none"), resolve=True)
    for node, images, tokens in ((config, 20.0, NOT_RUN), (skeleton["config"], None, 20.0)):
        old = skeleton | {"config": node, "training": skeleton["training"] | {"tokens_per_second": 20.0}}
        training = records.upgraded(old)["training"]
        assert (training.get("images_per_second"), training["tokens_per_second"]) == (images, tokens)


def test_the_git_state_is_a_commit_or_the_reason_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "ROOT", tmp_path)
    assert records.environment("cpu")["git"] == "not a checkout"
    (tmp_path / ".git").mkdir()
    assert records.environment("cpu")["git"].startswith("unknown: ")

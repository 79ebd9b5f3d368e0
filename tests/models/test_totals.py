"""Parameter totals of the papers' systems, to the unit; the MTLA paper's translation system has 8,000 pieces."""

from typing import Any

import pytest
import torch
from torch import nn

from attnlab.config.check import compose
from attnlab.models import SpeechToText
from attnlab.models.build import build_model
from attnlab.tasks.base import Task, task_of
from tests.attention.mechanisms import composed

TOTALS = {"mtla": 78_119_808, "mla": 77_823_744, "mha": 77_690_112, "gqa": 74_144_256, "mqa": 73_553_280}
DECODER_LAYERS = {"mtla": 3_200_128, "mla": 3_167_232, "mha": 3_152_384, "gqa": 2_758_400, "mqa": 2_692_736}


def size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def paper(name: str, *overrides: str, ctc: int | None = None) -> SpeechToText:
    with torch.device("meta"):
        return build_model(composed(name, "scale=paper", *overrides), vocab_size=8000, ctc_vocab_size=ctc)


@pytest.mark.parametrize("name", TOTALS)
def test_totals(name: str) -> None:
    model = paper(name)
    assert size(model) == TOTALS[name]
    assert [size(layer) for layer in model.decoder.layers] == 9 * [DECODER_LAYERS[name]]


def test_options_change_the_total_by_what_they_are() -> None:
    base = TOTALS["mtla"]
    assert size(paper("mtla", ctc=100)) == base + 512 * 100 + 100
    assert size(paper("mtla", "task.model.decoder.tie_embeddings=true")) == base - 8_000 * 512
    assert size(paper("mtla", "task.model.decoder.final_norm=false")) == base - 1_024


# --- the other tasks -----------------------------------------------------------------------------------------------

OTHERS = {
    ("ami", "mtla"): 67_407_844,
    ("ami", "mla"): 67_111_780,
    ("ami", "mha"): 66_978_148,
    ("slurp", "mtla"): 103_055_320,
    ("slurp", "mla"): 102_759_256,
    ("slurp", "mha"): 102_625_624,
    ("xsum", "mtla"): 78_698_368,
    ("xsum", "mla"): 78_402_304,
    ("xsum", "mha"): 78_268_672,
    ("wmt16", "mha"): 44_138_496 + 16_000 * 512,  # the Transformer's base model
}


@pytest.mark.parametrize(("task", "name"), OTHERS)
def test_totals_of_the_other_tasks(task: str, name: str) -> None:
    assert described(f"task={task}", f"attention={name}", "scale=paper")["total"] == OTHERS[task, name]


def test_recognition_as_the_recipe_trains_it() -> None:
    """The encoder of the translation model, and six of the Transformer's decoder layers with two embeddings."""
    encoder = 410_624 + 2_622_464 + 12 * 3_152_384 + 1_024
    layer = 2 * 1_050_624 + 2_099_712 + 3 * 1_024
    cross = described("experiment=mtla/asr_pretraining_cross")["total"]
    assert cross == encoder + 6 * layer + 1_024 + 2 * 5_000 * 512 == 71_207_936
    prefix = described("experiment=mtla/asr_pretraining")["total"]
    assert prefix == TOTALS["mha"] - 2 * 3_000 * 512


def test_wide_features_bring_a_linear_layer_and_a_norm() -> None:
    """1024 -> 80 and LayerNorm(80), as the paper's trained front end has them, and its 25 weights of layers."""
    total = described("experiment=mtla/table3_mean", "attention=mtla")["total"]
    assert total == OTHERS["ami", "mtla"] + 82_000 + 160
    assert described("experiment=mtla/table3", "attention=mtla")["total"] == total + 25 == 67_490_029


def described(*overrides: str) -> dict[str, int]:
    record: dict[str, Any] = {"kv_cache": {}}
    task_of(compose(*overrides), Task).describe(record)
    parameters: dict[str, int] = record["parameters"]
    return parameters

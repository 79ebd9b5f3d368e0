"""Exported folders in a fresh environment with torch and transformers: every mechanism, loaded by its card."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from attnlab.attention import MLA
from attnlab.decoding import Sampling
from attnlab.export import language
from attnlab.models import Decoder, LanguageModel
from tests.attention.mechanisms import NAMES
from tests.export import alone
from tests.export.trained import T6, TENSORIZED, WORDS, config, fill, ids, model_of, record

PADDINGS = (0, 2, 2, 4)
CASES = {name: (name, T6) for name in (*NAMES, "hybrid")}
CASES["adaptive"] = ("multilinear_absolute", TENSORIZED)
CASES["deepseek"] = ("mla", {})


def asked() -> dict[str, Any]:
    """The inputs of the other process."""
    rows, mask = ids(4, 9), torch.stack([torch.arange(9) >= padding for padding in PADDINGS]).long()
    padded: dict[str, Any] = {"ids": rows.tolist(), "mask": mask.tolist(), "pad_token_id": WORDS.end}
    plain: dict[str, Any] = {"ids": ids(2, 9).tolist(), "max_new_tokens": 8}
    return {
        "ids": ids(2, 24).tolist(),
        "text": "w1 w2 nobody w26",
        "generate": {
            "greedy": plain,
            "sampled": {**plain, "do_sample": True, "top_k": 6},
            "sampled without a cache": {**plain, "do_sample": True, "top_k": 6, "use_cache": False},
            "beams": {**plain, "num_beams": 3},
            "beams without a cache": {**plain, "num_beams": 3, "use_cache": False},
            "padded": {**padded, "max_new_tokens": 6},
        },
    }


def decoder() -> Decoder:
    """A decoder that was converted to MLA."""

    def attention(layer: int) -> MLA:
        return MLA(32, 4, latent_dim=8, rope_dim=4, norm="none", rope_theta=None)

    model = Decoder(WORDS.size, 32, attention, num_layers=2, ffn_dim=24, max_length=24)
    fill(model)
    return model.eval()


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[LanguageModel, dict[str, Any]]]:
    place = tmp_path_factory.mktemp("alone")
    models = {}
    for name, (attention, model) in CASES.items():
        cfg = config(attention, model)
        models[name] = decoder() if name == "deepseek" else model_of(cfg)
        format: Any = "deepseek" if name == "deepseek" else "hf"
        language.export(models[name], cfg, WORDS, record(attention), place / name, format=format)
        (place / f"{name}.json").write_text(json.dumps(asked()))
    packages = alone.link_packages(place / "packages", "torch", "transformers", "safetensors")
    environment = os.environ | {"HF_MODULES_CACHE": str(place / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-IS", str(alone.__file__), str(packages), *(str(place / name) for name in CASES)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: (models[name], json.loads((place / f"{name}.answer").read_text())) for name in CASES}


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_transformers_alone_computes_the_same(
    name: str, answers: dict[str, tuple[LanguageModel, dict[str, Any]]]
) -> None:
    model, answer = answers[name]
    with_code = name not in ("mha", "gqa", "mqa", "deepseek")
    assert answer["other"] == [] and not answer["training"]
    stock = "DeepseekV3ForCausalLM" if name == "deepseek" else "LlamaForCausalLM"
    assert answer["class"] == ("AttnlabForCausalLM" if with_code else stock)
    torch.testing.assert_close(torch.tensor(answer["logits"]), model(ids(2, 24)), rtol=0, atol=1e-5)
    made, measured = answer["generate"], answer["bytes"]
    greedy = Sampling(tokens=8, temperature=0)
    assert made["greedy"] == greedy(model, ids(2, 9)).tolist()
    assert made["sampled"] == made["sampled without a cache"]
    assert made["beams"] == made["beams without a cache"]
    for row, padding in enumerate(PADDINGS):
        alone = Sampling(tokens=6, temperature=0)(model, ids(4, 9)[row : row + 1, padding:])
        assert made["padded"][row] == alone[0].tolist()
    if with_code:
        assert measured["greedy"] == sum(a.cache_elements(2, 16) for a in model.attentions) * 4
        assert measured["beams"] == sum(a.cache_elements(6, 16) for a in model.attentions) * 4
        assert measured["padded"] == 4 * sum(
            a.cache_elements(PADDINGS.count(padding), 14 - padding)
            for a in model.attentions
            for padding in set(PADDINGS)
        )
    assert answer["tokens"] == [WORDS.end, *answer["plain"]] and answer["plain"] == WORDS.ids("w1 w2 nobody w26")
    assert answer["text"] == "w1 w2 <unk> w26"

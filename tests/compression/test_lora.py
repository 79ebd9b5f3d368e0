"""LoRA of PEFT finds compressed projections under the names of the dense ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from attnlab.compression import compress
from attnlab.compression.lora import register
from attnlab.compression.methods.mlp_svd import MLPSVD
from attnlab.compression.methods.tensorllm import TensorLLM
from attnlab.compression.modules.base import Replacement
from attnlab.errors import ConfigError
from tests.pretrained.tiny import ids, logits, tiny

TARGETS = {  # in the two layers of each: names, and how many modules they name
    "llama": (["q_proj", "o_proj", "down_proj"], 6),  # factors without a bias have no parameter beside them
    "gpt2": (["c_attn", "c_fc"], 4),
    "gpt_neox": (["query_key_value", "dense_h_to_4h"], 4),
    "roberta": (["query", "output.dense"], 6),
}


def compressed(kind: str) -> nn.Module:
    model = tiny(kind)
    compress(model, TensorLLM(ranks=[10, 5]))
    compress(model, MLPSVD(5))
    return model


@pytest.mark.parametrize("kind", TARGETS)
def test_an_adapter_learns_on_factors(kind: str, tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft")
    names, count = TARGETS[kind]
    expected = logits(compressed(kind), ids())
    adapted = peft.get_peft_model(compressed(kind), register(peft.LoraConfig(r=2, target_modules=names)))
    assert torch.equal(logits(adapted, ids()), expected)  # B is zero at first
    on = [one.base_layer for one in adapted.modules() if isinstance(one, peft.tuners.lora.Linear)]
    assert len(on) == count and all(isinstance(one, Replacement) for one in on)
    trained = {name: value for name, value in adapted.named_parameters() if value.requires_grad}
    assert len(trained) == 2 * count and all(".lora_" in name for name in trained)
    assert all(value.dtype == torch.float32 for value in trained.values())
    optimizer = torch.optim.SGD(trained.values(), 0.5)
    for _ in range(2):
        logits(adapted.train(), ids()).square().mean().backward()
        optimizer.step()
    adapted.eval()
    assert not torch.equal(logits(adapted, ids()), expected)
    adapted.save_pretrained(tmp_path)
    config = register(peft.PeftConfig.from_pretrained(tmp_path))
    again = peft.PeftModel.from_pretrained(compressed(kind), tmp_path, config=config)
    assert torch.equal(logits(again, ids()), logits(adapted, ids()))
    with pytest.raises(ConfigError, match="cannot be merged into factors"):
        adapted.merge_and_unload()


@pytest.mark.parametrize("kind", ["gpt2", "roberta"])
def test_the_weight_of_a_module_in_place_of_a_matrix(kind: str) -> None:
    result: list[Any] = [one for one in compressed(kind).modules() if isinstance(one, Replacement)]
    for module in result:
        if hasattr(module, "in_features"):
            assert tuple(module.weight.shape) == (module.out_features, module.in_features)
            x = torch.randn(3, module.in_features)
            bias = module(torch.zeros_like(x))
            torch.testing.assert_close(module(x) - bias, x @ module.weight.T, rtol=0, atol=1e-5)

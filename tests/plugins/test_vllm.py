"""The plugin of vLLM: exported folders, decoded by an engine, whose python ATTNLAB_VLLM_PYTHON names."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab.export import language
from attnlab.models import LanguageModel
from tests.export.trained import T6, WORDS, config, model_of, record

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "plugins" / "vllm"
LONG = {**T6, "max_length": 384}
DECODER = {"_target_": "attnlab.models.Decoder", "num_layers": 2, "ffn_dim": 24, "max_length": 384, "positions": 384}
RAGGED = [1, 7, 37]
ENGINE = {"dtype": "float32", "block_size": 32, "max_num_batched_tokens": 16, "enable_prefix_caching": False}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("ATTNLAB_VLLM_PYTHON" not in os.environ, reason="ATTNLAB_VLLM_PYTHON names no engine's python"),
]


def exported(folder: Path, attention: str, model: dict[str, Any] = LONG, **options: Any) -> LanguageModel:
    cfg = config(attention, model, **options)
    built = model_of(cfg)
    language.export(built, cfg, WORDS, record(attention), folder)
    return built


def engine(folder: Path, prompts: list[list[int]], new: int = 40, passes: int = 1, **settings: Any) -> Any:
    """The answer of the engine, or the end of what it printed."""
    asked = {"prompts": prompts, "new": new, "passes": passes, "engine": ENGINE | settings}
    (folder / "asked.json").write_text(json.dumps(asked))
    installed = folder.parent / "installed" / "attnlab_vllm-0.1.0.dist-info"  # as pip would write it
    installed.mkdir(parents=True, exist_ok=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: attnlab-vllm\nVersion: 0.1.0\n")
    (installed / "entry_points.txt").write_text("[vllm.general_plugins]\nattnlab = attnlab_vllm:register\n")
    variables = {
        "PYTHONPATH": os.pathsep.join(map(str, (installed.parent, PLUGIN, ROOT / "src"))),
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    command = [os.environ["ATTNLAB_VLLM_PYTHON"], str(Path(__file__).with_name("engine.py")), str(folder)]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    return json.loads((folder / "answer.json").read_text()) if not done.returncode else done.stdout + done.stderr


@torch.no_grad()
def check(model: LanguageModel, prompts: list[list[int]], answer: Any) -> None:
    """The engine's tokens are the most probable ones of the parallel form, with its log-probabilities."""
    assert not isinstance(answer, str), answer[-3000:]
    for prompt, (tokens, logps, _) in zip(prompts * 2, answer["requests"], strict=False):
        text = torch.tensor([[*prompt, *tokens]])
        expected: Tensor = model(text)[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert tokens == expected.argmax(-1).tolist()
        torch.testing.assert_close(torch.tensor(logps), expected.max(-1).values, rtol=0, atol=1e-3)
    exact = sum(a.cache_elements_per_token for a in model.attentions) * 4
    assert answer["bytes_per_position"] == pytest.approx(exact, rel=0.01)


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(WORDS.size - 2, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize(
    ("attention", "options", "settings"),
    [
        ("mtla", {}, {}),
        ("mtla", {"stride": 3}, {"block_size": 96}),
        ("mtla", {"stride": 4, "model": DECODER}, {}),
        ("mla", {"model": DECODER}, {}),
        ("mla_t6", {}, {}),
        ("tpa", {}, {}),
        ("tpa_kvonly", {}, {}),
        ("tpa_noncontextual_a", {}, {}),
        ("tpa_noncontextual_b", {}, {}),
        ("tpa_shared_b", {}, {}),
        ("mha", {"qk_norm": True}, {}),
    ],
)
def test_ragged_prompts_in_chunks(attention: str, options: Any, settings: Any, tmp_path: Path) -> None:
    model, prompts = exported(tmp_path / "model", attention, **options), prompts_of(1, 7, 37, 130)
    check(model, prompts, engine(tmp_path / "model", prompts, **settings))

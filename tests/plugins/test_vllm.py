"""The plugin of vLLM: exported folders, decoded by the engine whose python ATTNLAB_VLLM_PYTHON names."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from attnlab.export import language, serving
from attnlab.models import LanguageModel
from tests.export.trained import T6, WORDS, config, model_of, record

ROOT = Path(__file__).parents[2]
LONG = {**T6, "max_length": 384}
DECODER = {"_target_": "attnlab.models.Decoder", "num_layers": 2, "ffn_dim": 24, "max_length": 384, "positions": 384}
ENGINE = {"dtype": "float32", "block_size": 32, "max_num_batched_tokens": 16, "enable_prefix_caching": True}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("ATTNLAB_VLLM_PYTHON" not in os.environ, reason="ATTNLAB_VLLM_PYTHON names no engine's python"),
]


def exported(folder: Path, attention: str, model: dict[str, Any] = LONG, **options: Any) -> LanguageModel:
    """A model and its folder; the mechanisms of a mixture are joined by +, `options` are those of each by its name."""
    first, *others = attention.split("+")
    cfg = config(first, model, **({} if others else options))
    if others:
        nodes = {
            str(i): OmegaConf.to_container(config(name, model, **options.get(str(i), {})).attention)
            for i, name in enumerate((first, *others))
        }
        cfg.attention = {"pattern": list(nodes), "mechanisms": nodes}
    built = model_of(cfg)
    language.export(built, cfg, WORDS, record(attention), folder)
    (folder / "modeling_attnlab.py").write_text("raise RuntimeError('the code of the folder was run')")
    return built


def engine(folder: Path, prompts: list[list[int]], new: int = 40, **settings: Any) -> Any:
    """The engine's answer for two passes over the prompts, or what it printed before it failed."""
    (folder / "asked.json").write_text(json.dumps({"prompts": prompts, "new": new, "engine": ENGINE | settings}))
    installed = folder.parent / "attnlab_vllm-0.1.0.dist-info"  # as an installation would leave it
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: attnlab-vllm\nVersion: 0.1.0\n")
    (installed / "entry_points.txt").write_text("[vllm.general_plugins]\nattnlab = attnlab_vllm:register\n")
    variables = {
        "PYTHONPATH": os.pathsep.join(map(str, (installed.parent, ROOT / "plugins" / "vllm", ROOT / "src"))),
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    command = [os.environ["ATTNLAB_VLLM_PYTHON"], str(Path(__file__).with_name("engine.py")), str(folder)]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    return json.loads((folder / "answer.json").read_text()) if not done.returncode else done.stdout + done.stderr


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(WORDS.size - 2, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def check(model: LanguageModel, prompts: list[list[int]], answer: Any, block: int = 32) -> None:
    """The tokens are the most probable ones of the parallel form, with its log-probabilities."""
    assert not isinstance(answer, str), answer[-3000:]
    for prompt, (tokens, chosen, _) in zip(prompts * 2, answer["requests"], strict=True):
        expected, best = model(torch.tensor([[*prompt, *tokens]]))[0, len(prompt) - 1 : -1].log_softmax(-1).max(-1)
        assert tokens == best.tolist()
        torch.testing.assert_close(torch.tensor(chosen), expected, rtol=0, atol=1e-3)
    assert answer["bytes_per_position"] == pytest.approx(serving.cache_bytes("plugin", model, block), rel=0.01)
    length, size = answer["request"]
    assert length == max(map(len, prompts)) + 1
    assert size == pytest.approx(serving.request_bytes("plugin", model, length, block), rel=0.01)


@pytest.mark.parametrize(
    ("attention", "options", "block"),
    [
        ("mtla", {}, 32), ("mtla", {"stride": 3}, 96), ("mtla", {"stride": 4, "model": DECODER}, 32),
        ("mla", {"model": DECODER}, 32), ("mla_t6", {}, 32), ("tpa", {}, 32), ("tpa_kvonly", {}, 32),
        ("tpa_noncontextual_a", {}, 32), ("tpa_noncontextual_b", {}, 32), ("tpa_shared_b", {}, 32),
        ("mha", {"qk_norm": True}, 32), ("mtla+tpa+mha", {}, 32), ("mtla_window", {}, 32),
        ("mtla_window", {"stride": 3, "recent": 3, "first": 5}, 96),
        ("mtla_window", {"stride": 4, "model": DECODER}, 32),
        ("mla+mla_window+mla_window", {"1": {"window": 5, "latent_dim": 12}, "2": {"window": 40, "rope_dim": 2}}, 32),
        ("sliding_window", {"window": 1}, 32),
        ("mla_window+mha+sliding_window+tpa", {"0": {"window": 9}, "2": {"window": 9}, "model": DECODER}, 32),
        ("mla+sliding_window", {"1": {"window": 3, "sinks": 30}}, 32),  # pages of 4 positions
        ("sliding_window", {"window": 1, "sinks": 2}, 32),
        ("mla_window+mha+sliding_window", {"0": {"window": 9, "sinks": 1}, "2": {"window": 9, "sinks": 6}}, 32),
        ("mla_window+mla_window", {"0": {"window": 40, "sinks": 4, "latent_dim": 6}, "1": {"sinks": 4}}, 32),
        ("mtla_window+mla+mla_window", {"2": {"window": 9, "sinks": 4}}, 32),  # as of convert=mtla
        ("mtla_window+mtla_window", {"0": {"stride": 3, "recent": 3, "first": 5}}, 96),
        ("mtla+mtla_window+sliding_window+tpa", {"1": {"stride": 4}, "2": {"window": 15}, "model": DECODER}, 32),
    ],
)  # fmt: skip
def test_ragged_prompts_in_chunks_and_again(attention: str, options: Any, block: int, tmp_path: Path) -> None:
    model, prompts = exported(tmp_path / "model", attention, **options), prompts_of(1, 7, 37, 130)
    prompts.append(prompts[3][:100] + prompts[2])
    answer = engine(tmp_path / "model", prompts, block_size=block)
    check(model, prompts, answer, block)
    assert [cached for *_, cached in answer["requests"][5:]] == [len(p) // block * block for p in prompts]


@pytest.mark.parametrize(
    ("attention", "options", "blocks"),
    [
        ("mtla", {}, 13), ("mtla_window", {}, 16), ("tpa", {}, 13), ("mla+mla_window", {}, 21),
        ("mla+mla_window", {"1": {"window": 20, "sinks": 4}}, 21),
        ("mtla_window+mla_window", {"1": {"window": 20, "sinks": 4}}, 25),
    ],
)  # fmt: skip
def test_a_preempted_request_is_the_same(attention: str, options: Any, blocks: int, tmp_path: Path) -> None:
    model, prompts = exported(tmp_path / "model", attention, **options), prompts_of(60, 61, 62)
    answer = engine(tmp_path / "model", prompts, new=120, num_gpu_blocks_override=blocks)
    check(model, prompts, answer)
    assert answer["preempted"]


@pytest.mark.parametrize(
    ("attention", "settings", "message"),
    [
        ("mtla", {"block_size": 33}, "--block-size 33: expected a multiple of the stride 2"),
        ("mtla", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "--speculative-config"),
        ("tpa", {"kv_offloading_size": 0.1}, "--kv-offloading-size"),
        ("multilinear_tied", {}, "TiedMultiLinear cannot be decoded"),
        ("mtla_window", {"disable_hybrid_kv_cache_manager": True}, "--disable-hybrid-kv-cache-manager"),
        ("mla_window", {"disable_hybrid_kv_cache_manager": True}, "--disable-hybrid-kv-cache-manager"),
        ("mla_window+mla_window+mla", {"block_size": 1}, "set --block-size 2, or double that"),
        ("mtla_window", {"block_size": 6}, "--block-size 6: expected a multiple of the stride 2 of MTLA, 8 or more"),
    ],
)
def test_what_is_refused(attention: str, settings: Any, message: str, tmp_path: Path) -> None:
    exported(tmp_path / "model", attention)
    assert message in engine(tmp_path / "model", prompts_of(3), **settings)

"""Folders for vLLM: their form, their sizes, and the proof in the engine itself."""

import json
import os
import re
import shlex
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from attnlab.attention import MHA, MLA, MTLA, Attention, MLAWindow
from attnlab.attention.mla import MLAQueryLatent
from attnlab.conversion import ToMLA
from attnlab.conversion.layers import convert
from attnlab.conversion.split import Rotary, mix
from attnlab.conversion.statistics import collect, frequencies_of
from attnlab.errors import ConfigError
from attnlab.export import deepseek, language, proof, serving
from attnlab.models import T6, LanguageModel
from tests.conversion.models import decoder_of, exact, reference, tokens
from tests.export.conftest import Convert
from tests.export.test_pretrained import continued_by_transformers, exported
from tests.export.trained import T6 as SMALL
from tests.export.trained import WORDS, config, model_of, pieces, record

PYTHON = os.environ.get("ATTNLAB_VLLM_PYTHON")  # of an environment with vLLM


def settings(**prove: Any) -> DictConfig:
    cfg = OmegaConf.merge(config("mla"), {"prove": prove})
    assert isinstance(cfg, DictConfig)
    return cfg


def small(name: str, **options: Any) -> LanguageModel:
    model = decoder_of(reference(name))
    convert(model, ToMLA(layers="same", **options), tokens(8, 32))
    return model.eval()


def trained(mechanism: type[Attention], width: int = 32, heads: int = 4, **options: Any) -> T6:
    torch.manual_seed(0)

    def attention(layer: int) -> Attention:
        return mechanism(width, heads, **options)

    return T6(WORDS.size, width, attention, num_layers=2, max_length=128, output_init="default").eval()


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize(
    ("rotary", "norm", "form"),
    [
        ("standard", "rms", "native"),
        ("score", "rms", "exact"),
        ("score", "none", "exact"),
        ("standard", "none", "exact"),
    ],
)
def test_converted_models_as_deepseek(name: str, rotary: Rotary, norm: Any, form: str) -> None:
    """The logits of transformers' class are checked by `convert`; the native form has no biases and one base."""
    model = small(name, rotary=rotary, norm=norm, rope_dim=8, latent_dim=16)
    exported = deepseek.convert(model)
    assert exported.form == form
    sizes = exported.model.config
    numbers = len(model.attentions) * (sizes.kv_lora_rank + sizes.qk_rope_head_dim)
    assert serving.cache_bytes(exported.form, model) == 4 * numbers
    if form == "native":
        assert not any(key.endswith("bias") for key in exported.model.state_dict())
        assert exported.model.config.rope_parameters["rope_type"] == "default"


@torch.no_grad()
@pytest.mark.parametrize(("mechanism", "options"), [(MLA, {"norm": "rms"}), (MLAQueryLatent, {"query_latent_dim": 8})])
def test_trained_models_as_deepseek(mechanism: type[MLA], options: dict[str, Any]) -> None:
    model = trained(mechanism, head_dim=8, rope_dim=4, latent_dim=12, **options)
    exported = deepseek.convert(model)
    assert exported.form == "native"
    assert torch.allclose(exported.model(tokens(2, 9) % WORDS.size).logits, model(tokens(2, 9) % WORDS.size), atol=1e-5)


def test_standard_frequencies_are_those_of_a_narrower_head() -> None:
    """Of scaled frequencies only the first ones are."""
    attention: Any = exact("llama").attentions[0]
    statistics = collect(attention, [torch.randn(2, 9, 32, dtype=torch.float64)])
    theta = frequencies_of(attention)
    scaled = theta * torch.tensor([1, 1, 0.5, 0.125])
    for frequencies, most in ((theta, 4), (scaled, 2)):
        kept = mix(statistics, frequencies, "standard", 2 * most).frequencies
        assert torch.allclose(kept, frequencies[:most])
        with pytest.raises(ConfigError, match=f"convert.rope_dim={2 * most + 2}.*up to 8|at most {2 * most}"):
            mix(statistics, frequencies, "standard", 2 * most + 2)


def test_sizes_that_the_engine_has_no_kernel_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = small("llama", rope_dim=4, latent_dim=20)
    cfg = settings(python=None)
    with pytest.raises(ConfigError, match="AMX the last alone.; for this width use format=hf") as error:
        language.export(model, cfg, WORDS, record("mla"), tmp_path / "vllm", format="vllm")
    assert not (tmp_path / "vllm").exists()
    language.export(model, cfg, WORDS, record("mla"), tmp_path / "deepseek", format="deepseek")
    assert "vllm serve" not in (tmp_path / "deepseek" / "README.md").read_text()
    assert str(error.value) in caplog.text
    node = json.loads((tmp_path / "deepseek" / "config.json").read_text())
    assert node["architectures"] == ["TransformersForCausalLM"] and node["model_type"] == "deepseek_v3"
    wide = trained(MLA, 256, head_dim=64, rope_dim=32, latent_dim=128, norm="rms")
    with pytest.raises(ConfigError, match="latent_dim of 288, 480, or use format=hf"):
        language.export(wide, cfg, WORDS, record("mla"), tmp_path / "vllm", format="vllm")


def test_pages_of_layers_with_windows() -> None:
    """All pages have the same bytes; a request has whole pages of all positions, and those that its window touches."""
    Share = serving.Share
    groups = {0: [Share(10)], 5: [Share(20), Share(10)], 64: [Share(2)]}
    assert serving.page_sizes(groups, 32) == (320, {0: 32, 5: 8, 64: 64})
    assert serving.page_sizes({3: [Share(10)], 5: [Share(30)]}, 32) == (960, {5: 32, 3: 32})
    assert serving.page_sizes({9: [Share(20, extra=4)], 5: [Share(30, extra=4)]}, 32) == (1080, {5: 32, 9: 32})
    sinks = groups | {5: [Share(20, extra=4), Share(10, extra=4)]}
    assert serving.page_sizes(sinks, 32)[1][5] == 4  # 8 would take 12 x 30
    merged = {0: [Share(10), Share(8, 3, 2, 5)], 12: [Share(8)]}  # 5 first positions in 2 spare slots and 3 others
    assert serving.page_sizes(merged, 12) == (12 * 10 + 6 * 8, {0: 12, 12: 12})
    with pytest.raises(ConfigError, match="-size 16: .* multiple of the stride 3 .* 9 or more.* --block-size 12"):
        serving.page_sizes(merged, 16)
    with pytest.raises(ConfigError, match="block-size 2: .* have 150 numbers, and a block 20; set --block-size 16"):
        serving.page_sizes(sinks, 2)
    sizes: list[dict[str, Any]] = [{"latent_dim": 8}, {"latent_dim": 16, "window": 5}, {"latent_dim": 16, "window": 64}]
    sizes[2]["sinks"] = 4

    def attention(layer: int) -> Attention:
        return (MLAWindow if layer else MLA)(32, 4, rope_dim=4, **sizes[layer])

    model = T6(WORDS.size, 32, attention, num_layers=3, max_length=128)
    assert serving.options("plugin", model, cpu=False)["block_size"] == 32
    assert serving.cache_bytes("plugin", model) == 12 * 4
    # 100 positions: 4 pages of 32; the newest 5 lie in 2 pages of 16, and the newest 64 in 9 of 8 and 4 sinks
    assert serving.request_bytes("plugin", model, 100) == 32 * 12 * 4 * (4 + 2 + 9)
    assert "A request of 128 tokens takes" in serving.section("plugin", "folder", model, "proof")


def test_the_command_of_the_card() -> None:
    model = trained(MTLA, stride=3, latent_dim=8, head_dim=8, rope_dim=4)
    assert "--block-size 96" in serving.section("plugin", "folder", model, "proof")
    native = serving.section("native", "folder", trained(MLA, norm="rms"), "proof")
    assert "--attention-backend CPU_MLA" in native and '["all", "-rotary_embedding"]' in native


def test_a_python_without_the_engine(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="prove.python=.*expected the Python of an environment with vLLM"):
        proof.check("plain", 64, settings(python=str(tmp_path / "python"), tokens=8).prove)


@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None, reason="ATTNLAB_VLLM_PYTHON names no Python with vLLM")
@pytest.mark.parametrize(
    ("run_by", "mechanism", "options"),
    [
        ("LlamaForCausalLM", MHA, {}),
        ("DeepseekV3ForCausalLM", MLA, {"rope_dim": 64, "latent_dim": 512, "norm": "rms"}),
        ("DeepseekV3ForCausalLM", MLAQueryLatent, {"rope_dim": 64, "latent_dim": 512, "query_latent_dim": 64}),
        ("TransformersForCausalLM", MLA, {"rope_dim": 64, "latent_dim": 511, "norm": "none"}),
    ],
)
def test_vllm_decodes_the_same(
    run_by: str, mechanism: type[Attention], options: dict[str, Any], tmp_path: Path
) -> None:
    model = trained(mechanism, width=256, heads=4, head_dim=64, **options)
    cfg = settings(python=PYTHON, prompts=8, tokens=32)
    prove = language.export(model, cfg, WORDS, record("mla"), tmp_path / "exported", format="vllm")
    assert prove is not None and run_by in (section := prove())["backend"]
    assert section["tokens_equal"] >= 0.999 * section["tokens"]
    assert section["log_probability_difference"] < 1e-3
    assert section["equal_again"] and section["equal_alone"]
    assert section["cache_bytes_per_token"] == pytest.approx(section["cache_bytes_per_token_predicted"], rel=0.01)
    assert "256 of 256" in (tmp_path / "exported" / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None, reason="ATTNLAB_VLLM_PYTHON names no Python with vLLM")
def test_the_plugin_leaves_out_ids_without_a_token(tmp_path: Path) -> None:
    """The probabilities of attnlab that are compared leave them out too."""
    cfg = config("mtla", {**SMALL, "max_length": 64})
    cfg.prove = {"python": PYTHON, "prompts": 4, "tokens": 8}
    prove = language.export(model_of(cfg, 300), cfg, pieces(300), record("mtla"), tmp_path / "exported", format="vllm")
    assert prove is not None and prove()["log_probability_difference"] < 1e-3


def windowed(converted: Convert, keep: float) -> Path:
    """A run with a conversion whose second layer sees 16 positions and the first 4, as measured sizes give it.

    The sizes fit the engine's own attention too.
    """
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    _, run = converted("bos", "mla", f"convert.keep={keep}", "convert.layers=budget", sizes=sizes)
    about = json.loads((run / "conversion.json").read_text())
    about["layers"][1] |= {"_target_": "attnlab.attention.MLAWindow", "window": 16, "sinks": 4}
    (run / "conversion.json").write_text(json.dumps(about))
    return run


def test_a_conversion_with_windows_has_a_command(converted: Convert) -> None:
    card = (exported(windowed(converted, 0.5), "vllm") / "README.md").read_text()
    assert "--block-size 32" in card and "attnlab-vllm" in card and "A request of 96 tokens takes" in card


@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None, reason="ATTNLAB_VLLM_PYTHON names no Python with vLLM")
@pytest.mark.parametrize("keep", [0.5, 0.25])
def test_a_conversion_is_timed_beside_its_original_and_answers_a_chat(keep: float, converted: Convert) -> None:
    run = windowed(converted, keep)
    words = (f"prove.python={PYTHON}", "prove.prompts=8", "prove.tokens=32", "prove.requests=[1,3]", "prove.length=64")
    place = exported(run, "vllm", *words)
    section = json.loads((run / "record.json").read_text())["serving"]
    assert section["tokens_first_after_the_same_text"] >= 0.999 * section["tokens"]
    assert section["log_probability_difference"] < 1e-3 and section["equal_again"] and section["equal_alone"]
    for name in ("cache_bytes_per_token", "request_cache_bytes"):
        assert section[name] == pytest.approx(section[f"{name}_predicted"], rel=0.01)
    load = section["load"]
    assert load["converted"]["fit"] > load["original"]["fit"]
    for engine in (load["converted"], load["original"]):
        assert [row["requests"] for row in engine["rows"]] == [1, 3] and engine["rows"][1]["at_once"] == 3
        assert all(row["decoding_tokens_per_second"] > 0 for row in engine["rows"])
    assert "requests of 64 tokens that fit into 1,024 MiB: converted, original" in (place / "README.md").read_text()
    answer = chat(place, [{"role": "user", "content": "Hello"}], 8)
    text, ids = continued_by_transformers(place, "[user] Hello\n", 8)
    assert answer["token_ids"] == ids
    assert text.startswith(answer["message"]["content"])  # vLLM leaves out bytes of a character that is not complete


def chat(folder: Path, messages: list[dict[str, str]], tokens: int) -> dict[str, Any]:
    """The answer of the card's server for a CPU, greedy, with its ids."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = re.search("python -m vllm.entrypoints.openai.api_server.*", (folder / "README.md").read_text())
    assert PYTHON is not None and command is not None
    words = [PYTHON, *shlex.split(command[0])[1:], "--enforce-eager", "--port", str(port)]
    asked = {"messages": messages, "max_tokens": tokens, "temperature": 0, "return_token_ids": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(asked | {"model": folder.name}).encode(),
        {"Content-Type": "application/json"},
    )
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(words, cwd=folder.parent, env=os.environ | settings) as server:
        try:
            while server.poll() is None:
                try:
                    with urllib.request.urlopen(request) as answer:
                        choice: dict[str, Any] = json.load(answer)["choices"][0]
                        return choice
                except urllib.error.URLError:  # it has not begun to listen
                    time.sleep(1)
        finally:
            server.terminate()
    raise AssertionError("the server ended")

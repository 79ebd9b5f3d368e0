"""Refusals in one line: folders, names, tokenizers, projections, options."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import huggingface_hub.errors
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from attnlab.compression import compress
from attnlab.compression.methods.tensorllm import TensorLLM
from attnlab.errors import ConfigError, DataError
from attnlab.pretrained import family_of, huggingface
from tests.pretrained.tiny import OPTIONS, edit, ids, logits, saved, tiny, words


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def damage(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def infinite(folder: Path) -> None:
    model: Any = tiny("llama")
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = torch.inf
    model.save_pretrained(folder)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x: edit(x, model_type="opt"), ConfigError, r"model_type 'opt' is of no known family \(bert, gpt2, "),
        (lambda x: edit(x, model_type="attnlab"), ConfigError, r"an export with code, .*; give checkpoint=<its run"),
        (lambda x: edit(x, quantization_config={"quant_method": "gptq"}), DataError, r"weights are quantised \(gptq\)"),
        (lambda x: edit(x, hidden_size="wide"), DataError, r"config.json: llama refuses it: .*hidden_size.*int"),
        (lambda x: edit(x, hidden_size=48), DataError, r"has shape .* in the weights, and .*48.* by .*config.json"),
        (lambda x: edit(x, num_hidden_layers=3), DataError, r"lack model.layers.2.\S+; they are of another arch"),
        (lambda x: (x / "config.json").write_text("{"), DataError, r"config.json: cannot be read as JSON"),
        (lambda x: (x / "config.json").write_text("[]"), DataError, r"config.json: expected an object, got list"),
        (remove("config.json"), DataError, r"config.json is missing"),
        (remove("model.safetensors"), DataError, r"no weights in .*; expected model.safetensors or pytorch_model.bin"),
        (damage, DataError, r"model.safetensors is damaged or not complete \(.*\); copy or download it again"),
        (infinite, DataError, r"model.layers.1.mlp.up_proj.weight has values that are NaN or infinite"),
    ],
)
def test_a_folder_that_cannot_be_used(
    change: Callable[[Path], Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    saved(tmp_path)
    change(tmp_path)
    with pytest.raises(error, match=message) as result:
        huggingface.load(str(tmp_path), dtype=torch.float32)
    assert "\n" not in str(result.value)


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_weights_load_with_or_without_the_prefix_of_the_base_model(prefix: str, tmp_path: Path) -> None:
    """And beside tensors and files that transformers ignores."""
    expected, file = saved(tmp_path, "gpt2"), tmp_path / "model.safetensors"
    weights = {prefix + name.removeprefix("transformer."): value for name, value in load_file(file).items()}
    weights["unused.weight"] = torch.ones(4, dtype=torch.int32)
    save_file(weights, file, metadata={"format": "pt"})
    (tmp_path / "consolidated.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    assert torch.equal(logits(huggingface.load(str(tmp_path)), ids()), logits(expected, ids()))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/no/such/folder", "no such folder, and no name of the hub"),
        ("./here", "no such folder, and no name of the hub"),
        ("not a name", "no such folder, and no name of the hub"),
        (__file__, "a file; give its folder"),
        ("meta-llama/Llama-2-7b-hf", r"the hub cannot be reached \(.*\); download it .*hf download meta-llama/Llama"),
    ],
)
def test_no_such_model(source: str, message: str) -> None:
    began = time.perf_counter()
    for ask in (huggingface.load, huggingface.tokenizer):
        with pytest.raises(DataError, match=message):
            ask(source)
    assert time.perf_counter() - began < 5


def test_offline_by_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="model=gpt2: no such path, not in the hub's cache, and HF_HUB_OFFLINE is set"):
        huggingface.load("gpt2")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("GatedRepoError", "accept its licence on huggingface.co and log in"),
        ("RepositoryNotFoundError", "neither a local path nor a model of the hub that you may read"),
    ],
)
def test_what_the_hub_refuses(kind: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusal(getattr(huggingface_hub.errors, kind)):  # type: ignore[misc]
        def __init__(self) -> None:
            Exception.__init__(self, "401")

    def refuse(*args: Any, **options: Any) -> None:
        raise Refusal

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    with pytest.raises(DataError, match=message):
        huggingface.load("someone/hidden")


def test_padding_tokens(tmp_path: Path) -> None:
    saved(tmp_path)
    assert huggingface.tokenizer(str(tmp_path)).pad_token == "<pad>"
    words(pad=None).save_pretrained(tmp_path)
    assert huggingface.tokenizer(str(tmp_path)).pad_token == "</s>"
    words(pad=None, end=None).save_pretrained(tmp_path)
    with pytest.raises(DataError, match="neither a padding token nor an end token; add pad_token"):
        huggingface.tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="no tokenizer can be read from"):
        huggingface.tokenizer(str(tmp_path))


def test_code_beside_a_model_is_not_run(tmp_path: Path) -> None:
    """A folder whose config and tokenizer name classes of files in it, as trust_remote_code would load them."""
    expected = saved(tmp_path)
    for name in ("config", "model", "words"):
        (tmp_path / f"{name}.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n")
    edit(tmp_path, auto_map={"AutoConfig": "config.Config", "AutoModelForCausalLM": "model.Model"})
    assert torch.equal(logits(huggingface.load(str(tmp_path)), ids()), logits(expected, ids()))
    file = tmp_path / "tokenizer_config.json"
    about = json.loads(file.read_text()) | {
        "tokenizer_class": "Words",
        "auto_map": {"AutoTokenizer": ["words.Words", None]},
    }
    file.write_text(json.dumps(about))
    with pytest.raises(DataError, match="no tokenizer can be read from"):
        huggingface.tokenizer(str(tmp_path))
    assert not (tmp_path / "ran").exists()


class Linear4bit(nn.Linear):
    """Stands for bitsandbytes' class: of another library, on top of nn.Linear."""


def test_quantised_projections() -> None:
    def refusal(model: nn.Module) -> str:
        return family_of(model).layers(model)[0].refusals["attention"]

    model: Any = tiny("gpt2")
    model.transformer.h[0].attn.c_proj = Linear4bit(24, 24)
    assert refusal(model).startswith("transformer.h.0.attn.c_proj is a ")
    with pytest.raises(ConfigError, match="Linear4bit: its weights are quantised or have adapters"):
        compress(model, TensorLLM(ranks=[10, 5]))


def test_options_that_are_unknown() -> None:
    with pytest.raises(ConfigError, match="tiny: the option 'auto_map' is unknown; expected only attention_bias, "):
        huggingface.create("tiny", {"model_type": "llama", "auto_map": {"AutoModel": "code.Model"}})
    with pytest.raises(ConfigError, match="tiny: gpt2 refuses its sizes"):
        huggingface.create("tiny", {**OPTIONS["gpt2"], "model_type": "gpt2", "n_head": 5})

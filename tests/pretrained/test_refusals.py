"""Refusals in one line: folders, names, tokenizers, projections, options."""

import io
import os
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

import attnlab
import attnlab.trained
from attnlab.compression import compress
from attnlab.compression.methods.tensorllm import TensorLLM
from attnlab.data.speech import extract
from attnlab.errors import ConfigError, DataError
from attnlab.pretrained import huggingface
from tests.command import run_command
from tests.pretrained.tiny import OPTIONS, edit, hostile, ids, logits, saved, tiny, words


def infinite(folder: Path) -> None:
    model: Any = tiny("llama")
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = torch.inf
    model.save_pretrained(folder)


def integers(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    changed = {name: value.int() if "q_proj" in name else value for name, value in weights.items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})


def pickled_integers(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    torch.save({name: value.int() for name, value in weights.items()}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x: edit(x, model_type="opt"), ConfigError, r"model_type 'opt' is of no known family \(bert, gemma3"),
        (lambda x: edit(x, model_type="attnlab"), ConfigError, r"an export with code, .*; give checkpoint=<its run"),
        (lambda x: edit(x, quantization_config={"quant_method": "gptq"}), DataError, r"weights are quantised \(gptq\)"),
        (lambda x: edit(x, hidden_size="wide"), DataError, r"config.json: llama refuses it: .*hidden_size.*int"),
        (lambda x: edit(x, hidden_size=48), DataError, r"has shape .* in the weights, and .*48.* by .*config.json"),
        (lambda x: edit(x, num_hidden_layers=3), DataError, r"lack model.layers.2.\S+; they are of another arch"),
        (lambda x: (x / "config.json").write_text("{"), DataError, r"config.json: cannot be read as JSON"),
        (lambda x: (x / "config.json").write_text("[]"), DataError, r"config.json: expected an object, got list"),
        (lambda x: (x / "config.json").unlink(), DataError, r"config.json is missing"),
        (lambda x: os.truncate(x / "model.safetensors", 9000), DataError, r"model.safetensors is damaged or not comp"),
        (infinite, DataError, r"model.layers.1.mlp.up_proj.weight has values that are NaN or infinite"),
        (integers, DataError, r"model.safetensors: model.layers.0.self_attn.q_proj.weight is not floating point"),
        (pickled_integers, DataError, r"pytorch_model.bin: \S+ is not floating point"),
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
    """And beside files of other programs."""
    expected, file = saved(tmp_path, "gpt2"), tmp_path / "model.safetensors"
    weights = {prefix + name.removeprefix("transformer."): value for name, value in load_file(file).items()}
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


def yes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let standard input say yes to every question, as `yes |` does."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 100))


def test_code_beside_a_model_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    yes(monkeypatch)
    marker, expected = hostile(tmp_path), tiny("llama")
    assert torch.equal(logits(huggingface.load(str(tmp_path)), ids()), logits(expected, ids()))
    assert torch.equal(attnlab.trained.exported(tmp_path).model(ids()).logits, logits(expected, ids()))
    with pytest.raises(DataError, match="no tokenizer can be read from"):
        huggingface.tokenizer(str(tmp_path))
    assert not marker.exists()


@pytest.mark.parametrize("kind", ["own", "vit", "../model", ["llama"], None, 3, ""])
def test_code_of_an_unknown_type_of_model_is_not_run(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    yes(monkeypatch)
    marker, source = hostile(tmp_path, model_type=kind), str(tmp_path)
    with pytest.raises(ConfigError, match="is of no known family"):
        huggingface.load(source)
    with pytest.raises(ConfigError, match=r"is no language model of transformers, and code .* is never run"):
        attnlab.load(source)
    if kind == "own":
        with pytest.raises(DataError, match=r"cannot be read \(The repository .* contains custom code"):
            extract.pretrained(source, "mean", "cpu")
    assert not marker.exists()


COMMANDS = [  # every mode that reads the folder of a pretrained model
    *(
        f"task=wikitext2 mode={mode}"
        for mode in ("train", "convert", "test", "generate", "evaluate", "describe", "bench")
    ),
    *(f"task=reasoning mode={mode}" for mode in ("compress", "evaluate", "describe", "bench", "export")),
    "task=wikitext2 mode=predict input=the",
    "task=wikitext2 mode=train convert=mla",
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own", "llama"])
@pytest.mark.parametrize("words", COMMANDS)
def test_no_mode_asks_whether_to_run_code(words: str, kind: str, tmp_path: Path) -> None:
    marker = hostile(tmp_path / "model", model_type=kind)
    command = [*words.split(), f"model={tmp_path / 'model'}", "hardware=cpu", f"hydra.run.dir={tmp_path / 'run'}"]
    done = run_command(*command, standard_input="y\n" * 1000, ATTNLAB_CACHE=str(tmp_path / "cache"))
    assert not marker.exists() and "[y/N]" not in done.stdout + done.stderr
    assert done.returncode == 0 or done.stderr.splitlines()[-1].startswith("error: "), done.stderr
    assert "Traceback" not in done.stderr


class Linear4bit(nn.Linear):
    """Stands for bitsandbytes' class: of another library, on top of nn.Linear."""


def test_quantised_projections() -> None:
    model: Any = tiny("gpt2")
    model.transformer.h[0].attn.c_proj = Linear4bit(24, 24)
    with pytest.raises(ConfigError, match="h.0.attn.c_proj is a .*Linear4bit: its weights are quantised or have adap"):
        compress(model, TensorLLM(ranks=[10, 5]))


def test_options_that_are_unknown() -> None:
    with pytest.raises(ConfigError, match="tiny: the option 'auto_map' is unknown; expected only attention_bias, "):
        huggingface.create("tiny", {"model_type": "llama", "auto_map": {"AutoModel": "code.Model"}})
    with pytest.raises(ConfigError, match="tiny: n_head=5: expected a divisor of n_embd=24"):
        huggingface.create("tiny", {**OPTIONS["gpt2"], "model_type": "gpt2", "n_head": 5})

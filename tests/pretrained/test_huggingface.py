"""Models by a local folder or a hub name: read, refused in one line, exported."""

import copy
import json
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import huggingface_hub.errors
import pytest
import torch
from safetensors import SafetensorError
from torch import nn

from attnlab.compression import compress, densify
from attnlab.compression.methods.mlp_svd import MLPSVD
from attnlab.compression.methods.tensorllm import TensorLLM
from attnlab.errors import ConfigError, DataError, WriteError
from attnlab.pretrained import family_of, huggingface
from tests.compression.models import vit
from tests.pretrained.tiny import OPTIONS, ids, logits, tiny

WORDS = ["[UNK]", "<pad>", "</s>", "the", "claim", "is", "true", "false"]


def words(pad: str | None = "<pad>", end: str | None = "</s>") -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]", pad_token=pad, eos_token=end)


def saved(folder: Path, kind: str = "llama", **options: Any) -> nn.Module:
    model: Any = tiny(kind)
    model.save_pretrained(folder, **options)
    words().save_pretrained(folder)
    found: nn.Module = model
    return found


def edit(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, and a hub that cannot be reached."""

    def unreachable(*args: Any, **options: Any) -> None:
        raise OSError("[Errno -2] Name or service not known")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    return tmp_path / "cache"


# --- reading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_local_folder(kind: str, tmp_path: Path) -> None:
    expected = saved(tmp_path, kind)
    model = huggingface.load(str(tmp_path))
    assert torch.equal(logits(model, ids()), logits(expected, ids())) and not model.training
    assert huggingface.options_of(model) == huggingface.config_of(str(tmp_path)) == huggingface.options_of(expected)
    with torch.device("meta"):
        outline = huggingface.create(str(tmp_path))
    assert {name: p.shape for name, p in outline.named_parameters()} == {
        name: p.shape for name, p in model.named_parameters()
    }
    other = huggingface.create(str(tmp_path))
    family_of(other).load(other, str(tmp_path))
    assert torch.equal(logits(other, ids()), logits(expected, ids()))


def test_its_type(tmp_path: Path) -> None:
    tiny_model: Any = tiny("llama").to(torch.bfloat16)
    tiny_model.save_pretrained(tmp_path)
    assert {p.dtype for p in huggingface.load(str(tmp_path)).parameters()} == {torch.bfloat16}
    model = huggingface.load(str(tmp_path), dtype=torch.float32, device="cpu")
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_weights_in_parts(tmp_path: Path) -> None:
    expected = saved(tmp_path, max_shard_size="20KB")
    parts = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(parts) > 1
    assert torch.equal(logits(huggingface.load(str(tmp_path)), ids()), logits(expected, ids()))
    parts[1].unlink()
    with pytest.raises(DataError, match=rf"{parts[1].name} is missing; model.safetensors.index.json names it"):
        huggingface.load(str(tmp_path))


def test_pickled_weights_run_nothing(tmp_path: Path) -> None:
    expected = saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(expected.state_dict(), tmp_path / "pytorch_model.bin")
    assert torch.equal(logits(huggingface.load(str(tmp_path)), ids()), logits(expected, ids()))

    class Code:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"model.norm.weight": Code()}, tmp_path / "pytorch_model.bin", pickle_module=pickle)
    with pytest.raises(DataError, match=r"the weights in .* cannot be read"):
        huggingface.load(str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_the_cache_of_the_hub_needs_no_network(cache: Path) -> None:
    place = cache / "models--someone--tiny"
    expected = saved(place / "snapshots" / ("0" * 40))
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0" * 40)
    assert torch.equal(logits(huggingface.load("someone/tiny"), ids()), logits(expected, ids()))
    assert huggingface.tokenizer("someone/tiny").pad_token == "<pad>"
    (place / "snapshots" / ("0" * 40) / "model.safetensors").unlink()
    assert huggingface.config_of("someone/tiny")["hidden_size"] == 24
    with pytest.raises(DataError, match="the hub cannot be reached"):
        huggingface.load("someone/tiny")


# --- sizes without weights ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters", "layers", "attention"),
    [
        ("roberta-base", 124_697_433, 12, 4 * 768**2),
        ("EleutherAI/gpt-j-6b", 6_050_882_784, 28, 4 * 4096**2),
        ("meta-llama/Llama-2-7b-hf", 6_738_415_616, 32, 4 * 4096**2),
    ],
)
def test_the_published_models_have_their_sizes(name: str, parameters: int, layers: int, attention: int) -> None:
    """The totals are those of the files on the hub."""
    with torch.device("meta"):
        model = huggingface.create(name)
    assert sum(p.numel() for p in model.parameters()) == parameters
    found = family_of(model).layers(model)
    assert len(found) == layers
    for layer in found:
        shapes = [layer.projections[name].shape for name in "qkvo"]
        assert sum(out * width for out, width in shapes) == attention
        assert not layer.refusals.keys() & {"attention", "mlp"}


# --- what is refused ------------------------------------------------------------------------------------------------


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def damage(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def foreign(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")
    other: Any = tiny("gpt2")
    other.save_pretrained(folder / "other")
    (folder / "other" / "model.safetensors").rename(folder / "model.safetensors")


def infinite(folder: Path) -> None:
    model: Any = tiny("llama")
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = torch.inf
    model.save_pretrained(folder)


def adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda x: edit(x, model_type="opt"),
            ConfigError,
            r"model_type 'opt' is of no known family \(bert, gpt2, .*src",
        ),
        (lambda x: edit(x, model_type=None), ConfigError, r"model_type None is of no known family"),
        (lambda x: edit(x, quantization_config={"quant_method": "gptq"}), DataError, r"weights are quantised \(gptq\)"),
        (lambda x: edit(x, hidden_size="wide"), DataError, r"config.json: llama refuses it"),
        (lambda x: edit(x, hidden_size=48), DataError, r"the weights in .* cannot be read"),
        (
            lambda x: edit(x, num_hidden_layers=3),
            DataError,
            r"lack model.layers.2.\S+; they are of another architecture",
        ),
        (lambda x: (x / "config.json").write_text("{"), DataError, r"config.json: cannot be read as JSON"),
        (lambda x: (x / "config.json").write_text("[]"), DataError, r"config.json: expected an object, got list"),
        (remove("config.json"), DataError, r"config.json is missing \(no model\)"),
        (adapter, DataError, r"config.json is missing \(an adapter: merge it into its model first\)"),
        (remove("model.safetensors"), DataError, r"no weights in .*; expected model.safetensors or pytorch_model.bin"),
        (damage, DataError, r"the weights in .* cannot be read"),
        (foreign, DataError, r"lack .*; they are of another architecture"),
        (infinite, DataError, r"model.layers.1.mlp.up_proj.weight has values that are not finite"),
    ],
)
def test_a_folder_that_cannot_be_used(
    change: Callable[[Path], Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    saved(tmp_path)
    change(tmp_path)
    with pytest.raises(error, match=message) as found:
        huggingface.load(str(tmp_path))
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/no/such/folder", "no such folder; give a Hugging Face model's folder"),
        ("./here", "no such folder; give a Hugging Face model's folder"),
        ("a/b/c", "no such folder; give a Hugging Face model's folder"),
        (__file__, "a file; give its folder"),
        ("not a name", "neither a folder nor a name of the hub"),
        (
            "meta-llama/Llama-2-7b-hf",
            r"the hub cannot be reached \(.*\); download it .*hf download meta-llama/Llama-2-7b-hf",
        ),
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
    with pytest.raises(
        DataError, match="model=gpt2: no such folder, not in the hub's cache, and HF_HUB_OFFLINE is set"
    ):
        huggingface.load("gpt2")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("GatedRepoError", "accept its licence on huggingface.co and log in"),
        ("RepositoryNotFoundError", "neither a local folder nor a model of the hub that you may read"),
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


class Linear4bit(nn.Linear):
    """Stands for bitsandbytes' class: of another library, on top of nn.Linear."""


def test_quantised_shared_and_pruned_projections() -> None:
    def refusal(model: nn.Module, subject: str = "attention") -> str:
        return family_of(model).layers(model)[0].refusals[subject]

    model: Any = tiny("llama")
    block = model.model.layers[0]
    block.self_attn.v_proj.weight = block.self_attn.k_proj.weight
    assert "k_proj.weight is shared with model.layers.0.self_attn.v_proj.weight" in refusal(model)
    model = tiny("gpt2")
    model.transformer.h[0].attn.c_proj = Linear4bit(24, 24)
    assert refusal(model).startswith("transformer.h.0.attn.c_proj is a ")
    assert "Linear4bit: its weights are quantised or have adapters" in refusal(model)
    model = tiny("bert")
    layer = model.bert.encoder.layer[0]
    layer.intermediate.dense = nn.Linear(24, 39)
    assert "intermediate.dense.weight is 39 x 24, its config says 40 x 24" in refusal(model, "mlp")
    layer.attention.self.query.weight = nn.Parameter(torch.zeros(24, 24, dtype=torch.int8), requires_grad=False)
    assert "query.weight has type torch.int8: quantised" in refusal(model)
    with pytest.raises(ConfigError, match="query.weight has type torch.int8"):
        compress(model, TensorLLM(ranks=[10, 5]))


def test_options_that_are_unknown() -> None:
    with pytest.raises(ConfigError, match="tiny: the option 'auto_map' is unknown; expected only attention_bias, "):
        huggingface.create("tiny", {"model_type": "llama", "auto_map": {"AutoModel": "code.Model"}})
    with pytest.raises(ConfigError, match="tiny: gpt2 refuses its sizes"):
        huggingface.create("tiny", {**OPTIONS["gpt2"], "model_type": "gpt2", "n_head": 5})


# --- export ---------------------------------------------------------------------------------------------------------


def test_export_and_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = saved(tmp_path / "model")
    huggingface.export(model, tmp_path / "plain")
    before = {file.name: file.read_bytes() for file in (tmp_path / "plain").iterdir()}
    for error in (OSError(28, "No space left on device"), SafetensorError("No space left on device")):

        def full(folder: Path, error: Exception = error) -> None:
            (folder / "model.safetensors").write_bytes(b"a part")
            raise error

        monkeypatch.setattr(model, "save_pretrained", full)
        with pytest.raises(WriteError, match=r"plain: cannot be written \(.*No space left on device\)"):
            huggingface.export(model, tmp_path / "plain")
        assert {file.name: file.read_bytes() for file in (tmp_path / "plain").iterdir()} == before
        assert sorted(file.name for file in tmp_path.iterdir()) == ["model", "plain"]
    with pytest.raises(ConfigError, match="VisionTransformer is no language model of transformers"):
        huggingface.export(vit(), tmp_path / "plain")


@pytest.mark.parametrize("kind", OPTIONS)
@torch.no_grad()
def test_an_exported_model_is_plain(kind: str, tmp_path: Path) -> None:
    """Classes of torch and transformers alone; the logits of the compressed model; the tokenizer beside it."""
    import transformers

    source = tmp_path / "source"
    saved(source, kind)
    model = huggingface.load(str(source))
    dense = copy.deepcopy(model)
    compress(model, TensorLLM(ranks=[10, 5]))
    compress(model, MLPSVD(5))
    with pytest.raises(ConfigError, match="is compressed: transformers cannot load it; densify"):
        huggingface.export(model, tmp_path / "plain")
    huggingface.export(densify(model, dense), tmp_path / "plain", str(source))
    auto = transformers.AutoModelForMaskedLM if "bert" in kind else transformers.AutoModelForCausalLM
    again = auto.from_pretrained(tmp_path / "plain")
    assert all(type(one).__module__.partition(".")[0] in ("torch", "transformers") for one in again.modules())
    torch.testing.assert_close(logits(again, ids()), logits(model, ids()), rtol=0, atol=1e-4)
    mine, theirs = (transformers.AutoTokenizer.from_pretrained(each) for each in (tmp_path / "plain", source))
    assert mine.get_vocab() == theirs.get_vocab() and mine("the claim") == theirs("the claim")

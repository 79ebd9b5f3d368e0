"""The model that is loaded is the one in the folder: every tensor is used, or the folder is refused by its name."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import attnlab
from attnlab.compression import compress, save
from attnlab.compression import load as compressed
from attnlab.compression.methods.tensorllm import TensorLLM
from attnlab.config.build import instantiate
from attnlab.config.check import check
from attnlab.conversion.original import load_original
from attnlab.data.text.vocabulary import (
    END_OF_TEXT,
    BytePairVocabulary,
    PretrainedTokens,
    byte_tokenizer,
    read_vocabulary,
)
from attnlab.errors import ConfigError, DataError
from attnlab.pretrained import decoder, huggingface
from attnlab.run.files import digest_of
from attnlab.tasks.reasoning.model import AskedModel
from tests.pretrained.tiny import OPTIONS, edit, ids, logits, saved, tiny
from tests.pretrained.tokens import pretrained

DECODERS = [kind for kind in OPTIONS if kind in decoder.kinds()]
TABLES = {"gpt2": "transformer.wte.weight", "gptj": "transformer.wte.weight", "gpt_neox": "gpt_neox.embed_in.weight"}
TABLES |= {kind: f"{kind}.embeddings.word_embeddings.weight" for kind in ("bert", "roberta")}
HEADS = {"gpt_neox": "embed_out.weight", "bert": "cls.predictions.decoder.weight", "roberta": "lm_head.decoder.weight"}


def reference(folder: Path) -> Tensor:
    """The logits of transformers alone."""
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    auto = transformers.AutoModelForMaskedLM if "bert" in kind else transformers.AutoModelForCausalLM
    with torch.no_grad():
        return logits(auto.from_pretrained(folder, dtype=torch.float32).eval(), ids())


def change(file: Path, **tensors: Tensor | None) -> None:
    """Add or remove tensors of a file of weights; `__` stands for a dot."""
    weights = load_file(file) | {name.replace("__", "."): value for name, value in tensors.items()}
    save_file({name: value for name, value in weights.items() if value is not None}, file, metadata={"format": "pt"})


def with_head(folder: Path, kind: str, **config: Any) -> None:
    """Save a model whose head is not its embedding, though its config ties them."""
    saved(folder, kind)
    file = folder / "model.safetensors"
    table = load_file(file)[TABLES.get(kind, "model.embed_tokens.weight")]
    head = HEADS.get(kind, "lm_head.weight").replace(".", "__")
    change(file, **{head: torch.randn(table.shape, generator=torch.Generator().manual_seed(5))})
    edit(folder, tie_word_embeddings=True, **config)


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_head_of_its_own_is_used_whatever_the_config_ties(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with_head(tmp_path, kind)
    expected = reference(tmp_path)
    model = huggingface.load(str(tmp_path))
    assert torch.equal(logits(model, ids()), expected)
    assert "so we will NOT tie them" in caplog.text
    options = huggingface.config_of(str(tmp_path))
    assert options == huggingface.options_of(model) and options["tie_word_embeddings"] is False
    if kind in decoder.kinds():
        converted = decoder.of(model, "tiny")
        torch.testing.assert_close(converted(ids()), expected, rtol=0, atol=1e-5)
        back = decoder.unread(converted, options, "tiny")
        torch.testing.assert_close(logits(back, ids()), expected, rtol=0, atol=1e-5)
    config = json.loads((tmp_path / "config.json").read_text())
    if kind == "gpt2":  # which ties by default
        del config["tie_word_embeddings"]
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert torch.equal(logits(huggingface.load(str(tmp_path)), ids()), expected)


@pytest.mark.parametrize("pickled", [False, True])
def test_a_head_that_equals_the_embedding_stays_tied(pickled: bool, tmp_path: Path) -> None:
    saved(tmp_path, "gpt2")
    file = tmp_path / "model.safetensors"
    change(file, lm_head__weight=load_file(file)["transformer.wte.weight"].clone())
    if pickled:
        torch.save(load_file(file), tmp_path / "pytorch_model.bin")
        file.unlink()
    model: Any = huggingface.load(str(tmp_path))
    assert model.lm_head.weight is model.transformer.wte.weight
    assert huggingface.config_of(str(tmp_path))["tie_word_embeddings"] is True


def biases(folder: Path) -> None:
    change(folder / "model.safetensors", model__layers__0__self_attn__q_proj__bias=torch.ones(48))


def second_prefix(folder: Path) -> None:
    change(folder / "model.safetensors", layers__0__mlp__up_proj__weight=torch.ones(40, 24))


def another_shard(folder: Path) -> None:
    save_file({"model.layers.0.extra.weight": torch.ones(2)}, folder / "model-00002-of-00002.safetensors")


def an_older_copy(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    torch.save(weights | {"model.norm.weight": torch.ones(24)}, folder / "pytorch_model.bin")


def shards_that_differ(folder: Path) -> None:
    shutil.rmtree(folder)
    saved(folder, max_shard_size="20KB")
    first, second = sorted(folder.glob("model-*.safetensors"))[:2]
    name, value = next(iter(load_file(first).items()))
    change(second, **{name.replace(".", "__"): value + 1})


def longer_head(folder: Path) -> None:
    edit(folder, tie_word_embeddings=True)
    change(folder / "model.safetensors", lm_head__weight=torch.ones(64, 24))


def outside(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.rename(folder.parent / "other.safetensors")
    index = {"weight_map": dict.fromkeys(load_file(folder.parent / "other.safetensors"), "../other.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda x: edit(x, num_hidden_layers=1), r"no place for model.layers.1.\S+ of its weights \(9 tensors\)"),
        (biases, r"no place for model.layers.0.self_attn.q_proj.bias of its weights \(1 tensors\)"),
        (lambda x: change(x / "model.safetensors", score__weight=torch.ones(2, 24)), "no place for score.weight"),
        (
            lambda x: change(x / "model.safetensors", model__norm__weight=torch.full((24,), torch.nan)),
            "model.norm.weight has values that are NaN or infinite",
        ),
        (second_prefix, r"model.safetensors: \S*layers.0.mlp.up_proj.weight differs from the one that is read"),
        (another_shard, r"model-00002-of-00002.safetensors: model.layers.0.extra.weight is not in model.safetensors"),
        (an_older_copy, r"pytorch_model.bin: model.norm.weight differs from the one that is read"),
        (shards_that_differ, r"model-0000\d-of-\d+.safetensors: \S+ differs from the one that is read"),
        (outside, r"other.safetensors is missing; model.safetensors.index.json names it"),
        (longer_head, r"lm_head.weight has shape \(64, 24\), model.embed_tokens.weight \(61, 24\)"),
        (lambda x: edit(x, vocab_size=50), r"has shape \(61, 24\) in the weights, and \(50, 24\) by .* \(vocab_size\)"),
        (
            lambda x: save_file({"x": torch.ones(1)}, x / "adapter_model.safetensors"),
            "an adapter in .* has adapter_con",
        ),
    ],
)
def test_tensors_that_would_not_be_used(damage: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    saved(folder)
    damage(folder)
    with pytest.raises(DataError, match=message) as result:
        huggingface.load(str(folder))
    assert "\n" not in str(result.value)


def test_missing_biases(tmp_path: Path) -> None:
    saved(tmp_path, "qwen2")
    change(tmp_path / "model.safetensors", model__layers__1__self_attn__v_proj__bias=None)
    with pytest.raises(DataError, match=r"lack model.layers.1.self_attn.v_proj.bias"):
        huggingface.load(str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "extras"),
    [
        ("gpt2", {"transformer__h__0__attn__bias": torch.ones(1, 1, 32, 32).tril()}),
        ("gpt2", {"transformer__h__0__attn__masked_bias": torch.tensor(-1e4)}),
        ("gptj", {"transformer__h__1__attn__bias": torch.ones(1, 1, 32, 32, dtype=torch.uint8).tril()}),
        ("gpt_neox", {"gpt_neox__layers__0__attention__masked_bias": torch.tensor(-1e9)}),
        ("llama", {"model__layers__0__self_attn__rotary_emb__inv_freq": torch.ones(4)}),
        ("bert", {"bert__embeddings__position_ids": torch.arange(40)[None]}),
    ],
)
def test_constants_that_older_versions_stored(kind: str, extras: dict[str, Tensor], tmp_path: Path) -> None:
    expected = logits(saved(tmp_path, kind), ids())
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")  # a copy without them
    change(tmp_path / "model.safetensors", **extras)
    assert torch.equal(logits(huggingface.load(str(tmp_path)), ids()), expected)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    change(tmp_path / "model.safetensors", **dict.fromkeys(extras))
    assert torch.equal(logits(huggingface.load(str(tmp_path)), ids()), expected)


def test_copies_and_files_of_other_programs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A copy in half precision is a copy; what no transformers reads is named."""
    expected = logits(saved(tmp_path), ids())
    weights = load_file(tmp_path / "model.safetensors")
    half = {name: value.half() for name, value in weights.items()}
    save_file(half, tmp_path / "model.fp16.safetensors")
    (tmp_path / "consolidated.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    (tmp_path / "pytorch_model.bin").write_text("version https://git-lfs.github.com/spec/v1")
    assert torch.equal(logits(huggingface.load(str(tmp_path)), ids()), expected)
    assert "consolidated.safetensors: not used" in caplog.text and "not used: " in caplog.text
    assert "pytorch_model.bin: not a readable checkpoint" in caplog.text


def test_warnings_of_transformers_are_logged_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": False, "temperature": 0.5}))
    huggingface.load(str(tmp_path))
    messages = [record.getMessage() for record in caplog.records if "transformers: " in record.getMessage()]
    assert any("temperature" in message for message in messages)
    assert all("\n" not in message for message in messages)
    assert logging.getLogger("transformers").handlers


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        *(("llama", key, value) for key in ("num_hidden_layers", "head_dim", "vocab_size") for value in (0, -1)),
        *(("llama", "rms_norm_eps", value) for value in (float("nan"), float("inf"), -1.0, 0.0)),
        ("llama", "num_key_value_heads", 4),
        ("llama", "num_key_value_heads", 0),
        ("llama", "max_position_embeddings", 0),
        ("llama", "intermediate_size", -40),
        ("llama", "attention_dropout", 2.0),
        ("llama", "hidden_act", "nothing"),
        ("llama", "rope_theta", 0),
        ("llama", "rope_parameters", {"rope_type": "default", "rope_theta": float("nan")}),
        ("llama", "rope_parameters", {"rope_type": "linear", "rope_theta": 1e4, "factor": -2.0}),
        ("llama", "rope_parameters", {"rope_type": "nothing", "rope_theta": 1e4}),
        ("llama", "num_hidden_layers", True),
        ("llama", "tie_word_embeddings", "false"),
        ("mistral", "sliding_window", 0),
        ("gpt2", "n_layer", -2),
        ("gpt2", "n_head", 5),
        ("gpt2", "n_inner", 0),
        ("gpt2", "layer_norm_epsilon", float("nan")),
        ("gpt2", "resid_pdrop", 1.5),
        *((kind, "is_causal", False) for kind in OPTIONS if "bert" not in kind),
        *(("llama", "is_causal", value) for value in (None, 0, "false")),
        *((kind, "is_decoder", True) for kind in ("bert", "roberta")),
    ],
)
def test_values_that_no_model_has(kind: str, key: str, value: Any, tmp_path: Path) -> None:
    saved(tmp_path, kind)
    edit(tmp_path, **{key: value})
    for use in (huggingface.config_of, huggingface.load):  # the first without weights
        with pytest.raises(DataError, match=rf"config.json: .*{key}") as result:
            use(str(tmp_path))
        assert "\n" not in str(result.value)


def test_an_older_config_of_a_rotation(tmp_path: Path) -> None:
    saved(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_theta": float("nan")}))
    with pytest.raises(DataError, match="config.json: .*rope_theta=nan: expected more than 0"):
        huggingface.config_of(str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("mistral", "attention_bias", True),
        ("mistral", "mlp_bias", True),
        ("qwen2", "mlp_bias", True),
        ("qwen3", "mlp_bias", True),
        ("llama", "sliding_window", 2),
        ("llama", "pad_token_id", 61),
        ("gpt2", "pad_token_id", 61),
    ],
)
def test_keys_that_the_class_does_not_read(
    kind: str, key: str, value: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = logits(saved(tmp_path, kind), ids())
    edit(tmp_path, **{key: value})
    model = huggingface.load(str(tmp_path))
    assert f"{key}={value} is not used by this model" in caplog.text
    assert torch.equal(logits(model, ids()), expected)
    torch.testing.assert_close(decoder.of(model, "tiny")(ids()), expected, rtol=0, atol=1e-5)


def test_a_decoder_takes_all_of_a_model() -> None:
    model: Any = tiny("llama")
    model.model.layers[1].self_attn.o_proj.bias = nn.Parameter(torch.ones(24))
    with pytest.raises(DataError, match=r"model.layers.1.self_attn.o_proj.bias: 0 of its 24 values have a place"):
        decoder.of(model, "tiny")


# --- adapters -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def adapted(folder: Path, kind: str = "llama", **options: Any) -> Tensor:
    """Save a model and, beside it, an adapter; the logits of both by peft."""
    model: Any = peft.get_peft_model(saved(folder, kind), peft.LoraConfig(r=2, lora_alpha=8, **options))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    model.save_pretrained(folder)
    return logits(model.eval(), ids())


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"target_modules": ["q_proj", "v_proj"]}),
        ("llama", {"target_modules": "all-linear", "use_dora": True}),
        ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
        ("qwen2", {"target_modules": ["q_proj"], "bias": "all"}),
        ("mistral", {"target_modules": ["up_proj"], "modules_to_save": ["lm_head"]}),
    ],
)
def test_an_adapter_is_merged(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    expected = adapted(tmp_path, kind, **options)
    model = huggingface.load(str(tmp_path), dtype=torch.float32)
    torch.testing.assert_close(logits(model, ids()), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(decoder.of(model, "tiny")(ids()), expected, rtol=0, atol=1e-5)
    huggingface.export(model, tmp_path / "plain")
    again = huggingface.load(str(tmp_path / "plain"))
    assert torch.equal(logits(again, ids()), logits(model, ids()))


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()


def test_a_pickled_adapter_is_read_as_weights_alone(tmp_path: Path) -> None:
    expected = adapted(tmp_path, target_modules=["q_proj"])
    pickled(tmp_path)
    torch.testing.assert_close(logits(huggingface.load(str(tmp_path)), ids()), expected, rtol=0, atol=1e-5)
    (tmp_path / "adapter_model.bin").write_bytes(b"cposix\nsystem\n(S'touch ran'\ntR.")
    with pytest.raises(DataError, match="adapter_model.bin: not a readable checkpoint"):
        huggingface.load(str(tmp_path))


def set_config(folder: Path, **values: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


ADAPTER = "adapter_model.safetensors"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda x: set_config(x, peft_type="IA3"), "only LoRA is merged, got IA3"),
        (lambda x: set_config(x, peft_type=None), "only LoRA is merged, got None"),
        (lambda x: set_config(x, megatron_config={"a": 1}, megatron_core="os"), "only LoRA is merged"),
        (lambda x: set_config(x, r=3), "no adapter of the model"),
        (lambda x: set_config(x, r=-1), "no adapter of the model"),
        (lambda x: set_config(x, lora_alpha=float("nan")), "no adapter of the model"),
        (lambda x: set_config(x, target_modules=["nothing"]), "no adapter of the model"),
        (
            lambda x: set_config(x, target_modules=["v_proj"]),
            r"no adapter of the model .*missing in the file or in the",
        ),
        (lambda x: change(x / ADAPTER, other__lora_A__weight=torch.ones(2, 2)), "other.*missing in the file or in the"),
        (lambda x: change(x / ADAPTER, **dict.fromkeys(load_file(x / ADAPTER))), "missing in the file or in the model"),
        (lambda x: (x / "adapter_config.json").write_text("["), "adapter_config.json: cannot be read as a JSON object"),
        (
            lambda x: (x / "adapter_config.json").write_text("[]"),
            "adapter_config.json: cannot be read as a JSON object",
        ),
        (lambda x: (x / ADAPTER).write_text("short"), "adapter_model.safetensors: not a readable checkpoint"),
        (lambda x: (x / ADAPTER).unlink(), "an adapter in .* has adapter_config.json and one of"),
        (lambda x: (x / "config.json").unlink(), "adapter_config.json is of an adapter: copy the files of the model"),
    ],
)
def test_adapters_that_cannot_be_merged(damage: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    adapted(tmp_path, target_modules=["q_proj"])
    damage(tmp_path)
    with pytest.raises(DataError, match=message) as result:
        huggingface.load(str(tmp_path))
    assert "\n" not in str(result.value)


def test_an_adapter_of_a_tied_table(tmp_path: Path) -> None:
    adapted(tmp_path, "gpt2", target_modules=["c_attn", "wte"])
    with pytest.raises(DataError, match=r"wte.lora_embedding_A changes a table that is embedding and head in one"):
        huggingface.load(str(tmp_path))


def test_an_adapter_needs_peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapted(tmp_path, target_modules=["q_proj"])
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ConfigError, match=r"pip install 'attnlab\[lora\]'"):
        huggingface.load(str(tmp_path))


# --- every way to a model -------------------------------------------------------------------------------------------


def own_head(folder: Path) -> Tensor:
    with_head(folder, "llama")
    return reference(folder)


def with_adapter(folder: Path) -> Tensor:
    return adapted(folder, target_modules=["q_proj", "down_proj"])


@pytest.mark.parametrize("make", [own_head, with_adapter])
def test_a_folder_is_one_model_wherever_it_is_loaded(make: Callable[[Path], Tensor], tmp_path: Path) -> None:
    expected = make(tmp_path / "model")
    source = str(tmp_path / "model")
    loaded: Any = attnlab.load(source)
    torch.testing.assert_close(logits(loaded.model, ids()), expected, rtol=0, atol=1e-5)
    model = huggingface.load(source)
    compress(model, TensorLLM(ranks=[8, 6]))
    save(model, tmp_path / "compressed", "tiny", huggingface.options_of(model))
    assert torch.equal(logits(compressed(tmp_path / "compressed"), ids()), logits(model, ids()))
    cfg = check(["task=wikitext2", f"model='{source}'", "hardware=cpu", "mode=test"]).jobs[0]
    assert cfg.task.model.tied is False
    built = instantiate(
        cfg.task.model,
        vocab_size=61,
        attention=lambda layer: instantiate(cfg.attention, path="attention"),
        path="task.model",
    )
    torch.testing.assert_close(load_original(cfg, built, None).eval()(ids()), expected, rtol=0, atol=1e-5)


def test_attnlab_load_refuses_what_it_does_not_use(tmp_path: Path) -> None:
    saved(tmp_path)
    biases(tmp_path)
    with pytest.raises(DataError, match=r"no place for model.layers.0.self_attn.q_proj.bias"):
        attnlab.load(str(tmp_path))
    saved(tmp_path)
    edit(tmp_path, num_hidden_layers="two")
    with pytest.raises(DataError, match=r"config.json: num_hidden_layers"):
        attnlab.load(str(tmp_path))


def test_a_compressed_folder(tmp_path: Path) -> None:
    """Tied names have one weight in it, and it has no adapter."""
    model = saved(tmp_path / "model", "gpt2")
    save(model, tmp_path, "tiny", huggingface.options_of(model))
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    file = tmp_path / manifest["weights"]
    weights = load_file(file)
    save_file(weights | {"lm_head.weight": weights["transformer.wte.weight"] + 1}, file)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"sha256": digest_of(file)}))
    with pytest.raises(DataError, match=r"lm_head.weight differs from transformer.wte.weight, with which"):
        compressed(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(DataError, match=r"adapter_config.json: no adapter is merged into factors"):
        compressed(tmp_path)


def added(folder: Path, *tokens: str, pad: str = "[PAD]") -> None:
    """Give the tokenizer of a folder tokens beyond the model's table, as fine-tunes do."""
    words: Any = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(), bos_token=END_OF_TEXT, eos_token=END_OF_TEXT
    )
    words.add_tokens(list(tokens))
    words.pad_token = pad
    words.save_pretrained(folder)


def test_added_tokens_beyond_the_table_are_refused_where_a_text_has_them(tmp_path: Path) -> None:
    added(tmp_path, "[PAD]", "<user>")
    saved_config = huggingface.create("tiny", {"model_type": "llama", **OPTIONS["llama"], "vocab_size": 257})
    saved_config.save_pretrained(tmp_path)  # type: ignore[operator]
    edit(tmp_path, pad_token_id=257)
    vocabulary = PretrainedTokens(str(tmp_path)).vocabulary(257)
    assert vocabulary.size == vocabulary.num_ids == 257
    plain = BytePairVocabulary(byte_tokenizer().to_str(), 257, "after")
    assert vocabulary.ids("the claim") == plain.ids("the claim")
    assert vocabulary.marked(["a", "b"]) == plain.marked(["a", "b"])
    for use in (vocabulary.ids, lambda text: vocabulary.marked(["a", text])):
        with pytest.raises(DataError, match=r"a text has <user>, id 258, and the model's table 257 ids"):
            use("hello <user> world")
    asked = AskedModel(str(tmp_path)).load(1, tmp_path, torch.device("cpu"))
    batch = asked.batch([asked.ids("the claim"), asked.ids("a")])
    assert int(batch["input_ids"].max()) <= 256 and torch.isfinite(asked.model(**batch).logits).all()
    with pytest.raises(DataError, match=r"a text has <user>, id 258, and the model's table 257 ids"):
        asked.ids("hello <user>")


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    """Ordinary pieces, or the end token, beyond the table."""
    added(tmp_path, "[PAD]")
    saved_config = huggingface.create("tiny", {"model_type": "llama", **OPTIONS["llama"]})
    saved_config.save_pretrained(tmp_path)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=r"has 257 pieces, more than the 61 ids .* a pretrained model's vocab_size"):
        PretrainedTokens(str(tmp_path)).vocabulary(61)
    with pytest.raises(ConfigError, match=r"has 257 pieces, more than the 256 ids"):
        PretrainedTokens(str(tmp_path)).vocabulary(256)
    with pytest.raises(DataError, match="they do not belong together"):
        AskedModel(str(tmp_path)).load(1, tmp_path, torch.device("cpu"))


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("kind", ["bos", "gpt2", "pieces", "both"])
def test_special_tokens_in_a_text_are_read_as_in_transformers(kind: str, split: bool, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = pretrained(tmp_path / "model", kind)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"split_special_tokens": split}))
    vocabulary, expected = PretrainedTokens(str(folder)).vocabulary(400), AutoTokenizer.from_pretrained(folder)
    vocabulary.save(tmp_path / "vocabulary.json")
    stored = read_vocabulary(tmp_path / "vocabulary.json")
    assert stored.fingerprint == vocabulary.fingerprint
    texts = ["a </s> b", "<s>", "<|eot|><|endoftext|> a", "a"]
    for own in (vocabulary, stored):
        assert [own.given(text) for text in texts] == [expected(text).input_ids for text in texts]
        assert [own.ids(text) for text in texts] == [expected.encode(text, add_special_tokens=False) for text in texts]

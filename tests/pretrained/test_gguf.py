"""A GGUF file is the model that was written into it, or is refused in one line."""

import json
import os
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attnlab
from attnlab.errors import ConfigError, DataError
from attnlab.pretrained import decoder, hub, huggingface
from attnlab.pretrained import gguf as reading
from tests.command import ROOT, run_command
from tests.conversion.models import LINEAR, YARN
from tests.pretrained.gguf_files import written
from tests.pretrained.tiny import logits
from tests.pretrained.tokens import TEXTS, of_transformers

gguf = pytest.importorskip("gguf")
PROMPTS = [*TEXTS[:3], "a </s> b", "  x\n\ny12345", "", "naïve 😀", "<|eot|>", "\t\r\n  1 2"]
IDS = torch.randint(0, 200, (2, 20), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNLAB_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("kind", "quantised", "sizes"),
    [
        ("bos", "Q4_1", {"tie_word_embeddings": True, "head_dim": 8}),
        ("gpt2", "Q8_0", {"n_inner": 32}),
        ("several-ends", "F32", {}),  # with Llama 3's scaling
        ("pieces", "F16", {}),
        ("no-bos", "F32", {"model_type": "qwen3", "head_dim": 32, "use_sliding_window": False}),
        ("bos", "Q4_0", {"model_type": "phi3", "sliding_window": 5, "pad_token_id": 1}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("bos", "F32", {}),
                ("bos", "BF16", {"attention_bias": True, "mlp_bias": True}),
                ("bos", "Q4_0", {}),
                ("no-bos", "Q5_1", {"rope_parameters": LINEAR}),
                ("both", "Q5_0", {"rope_parameters": YARN}),
                ("same", "Q8_0", {}),
            )
        ),
    ],
)
def test_logits_and_tokens_are_those_of_the_model_that_was_written(
    kind: str, quantised: str, sizes: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path, kind, quantised, **sizes)
    caplog.set_level("INFO", "attnlab")
    model, words = huggingface.load(str(path)), huggingface.tokenizer(str(path))
    expected, tokenizer = of_transformers(tmp_path / "model")
    with torch.no_grad():
        wanted = expected(IDS).logits
        torch.testing.assert_close(logits(model, IDS), wanted, rtol=0, atol=1e-4 if kind == "several-ends" else 0)
        torch.testing.assert_close(decoder.of(model, "tiny")(IDS), wanted, rtol=0, atol=2e-4)
    assert [words(text).input_ids for text in PROMPTS] == [tokenizer(text).input_ids for text in PROMPTS]
    assert words.chat_template == tokenizer.chat_template
    (ends, left_out), (known, _) = (huggingface.generation(str(place)) for place in (path, tmp_path / "model"))
    assert {*ends} == {*known} and left_out == {}
    matrices = sum(tensor.dim() == 2 for tensor in model.state_dict().values())
    matrices -= bool(getattr(model.config, "tie_word_embeddings", False))
    assert "a GGUF file, dequantised to float32" in caplog.text
    counts = reading.about(hub.folder(str(path)))["dequantised"]
    assert counts[quantised] == matrices or quantised == "F32"
    assert not hasattr(model.config, "quantization_config")


def test_a_type_of_blocks_that_are_only_read(tmp_path: Path) -> None:
    """K-quants, whose blocks are taken at random: gguf does not write them."""
    kind, generator = gguf.GGMLQuantizationType.Q4_K, np.random.default_rng(0)

    def blocks(writer: Any) -> None:
        values = generator.integers(0, 255, (64, 144), dtype=np.uint8)
        values[:, :4] = np.array([0.01, 0.02], np.float16).view(np.uint8)  # the scales of a block
        info = writer.tensors[0]
        info.pop("blk.0.ffn_down.weight")
        writer.add_tensor("blk.0.ffn_down.weight", values, raw_dtype=kind)
        blocks.values = gguf.dequantize(values, kind)  # type: ignore[attr-defined]

    path = written(tmp_path, "bos", extra=blocks, intermediate_size=256)
    weight = huggingface.load(str(path)).get_parameter("model.layers.0.mlp.down_proj.weight")
    assert torch.equal(weight, torch.from_numpy(blocks.values))  # type: ignore[attr-defined]


def test_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path, "bos", "Q8_0")
    plain = huggingface.load(str(path)).state_dict()
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        for name, value in huggingface.load(str(path), dtype=dtype).state_dict().items():
            assert torch.equal(value, plain[name].to(dtype))


def test_files_beside_it_are_not_read(tmp_path: Path) -> None:
    path, text = written(tmp_path, "bos"), '{"auto_map": {"AutoTokenizer": ["code.Words", null]}, "eos_token_id": 7}'
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json", "generation_config.json"):
        (tmp_path / name).write_text(text)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert torch.equal(logits(huggingface.load(str(path)), IDS), of_transformers(tmp_path / "model")[0](IDS).logits)
    assert huggingface.generation(str(path))[0] == [1] and huggingface.tokenizer(str(path))("a").input_ids[0] == 0


def test_a_file_that_changes(tmp_path: Path) -> None:
    path = written(tmp_path / "one", "bos")
    assert huggingface.config_of(str(path))["num_hidden_layers"] == 2
    path.unlink()
    other = written(tmp_path / "other", "bos", num_hidden_layers=1)
    os.replace(other, path)
    assert huggingface.config_of(str(path))["num_hidden_layers"] == 1
    assert attnlab.load(path).predict("The sun", tokens=2).keys() == {"prediction"}
    path.unlink()
    with pytest.raises(DataError, match="no such GGUF file"):
        huggingface.config_of(str(path))
    with pytest.raises(DataError, match=r"config.json is missing; give one of its GGUF files: model=.*other.gguf"):
        other.write_bytes(b"")
        other.rename(tmp_path / "other" / "other.gguf")
        huggingface.config_of(str(tmp_path / "other"))


def key(name: str, value: Any, kind: str = "uint32") -> Callable[[Any], None]:
    return lambda writer: getattr(writer, f"add_{kind}")(name, value)


def renamed(writer: Any) -> None:
    writer.tensors[0]["blk.0.attn_q.other"] = writer.tensors[0].pop("blk.0.attn_q.weight")


def infinite(writer: Any) -> None:
    writer.tensors[0]["output_norm.weight"].tensor[0] = np.inf


def changed(name: str, value: Any) -> Callable[[Any], None]:
    def change(writer: Any) -> None:
        data = writer.kv_data[0]
        data[name].value = value

    return change


def removed(name: str) -> Callable[[Any], None]:
    return lambda writer: writer.kv_data[0].pop(name)


NORM = np.ones(64, np.float32)


@pytest.mark.parametrize(
    ("extra", "error", "message"),
    [
        (
            changed("general.architecture", "mamba3"),
            ConfigError,
            "the architecture 'mamba3' is not supported; expected",
        ),
        (
            changed("general.architecture", "falcon"),
            ConfigError,
            "the architecture 'falcon' is not supported; expected",
        ),
        (changed("general.architecture", "gemma3"), ConfigError, "expected gpt2, llama, phi3, qwen2, qwen3"),
        (removed("general.architecture"), ConfigError, "the architecture None is not supported"),
        (key("split.count", 3, "uint16"), DataError, "one of 3 parts of a model; join them"),
        (changed("general.architecture", ""), ConfigError, "the architecture '' is not supported"),
        (lambda w: w.add_type("adapter"), DataError, "the file has a adapter, not a model"),
        (key("llama.rope.scaling.type", "longrope", "string"), ConfigError, "rope.scaling.type=longrope is not supp"),
        (key("llama.attention.sliding_window", 16), ConfigError, "llama.attention.sliding_window=16 is not supported"),
        (key("llama.attention.scale", 0.5, "float32"), ConfigError, "llama.attention.scale=0.5 is not supported"),
        (key("llama.rope.scaling.attn_factor", 0.5, "float32"), ConfigError, "llama.rope.scaling.attn_factor=0.5"),
        (changed("llama.rope.dimension_count", 8), ConfigError, "rope.dimension_count=8, and heads have a width of 16"),
        (changed("llama.attention.value_length", 8), ConfigError, "attention.value_length=8, and heads have a width"),
        (changed("llama.block_count", 3), DataError, "lack model.layers.2"),
        (changed("llama.block_count", 1), DataError, "no place for blk.1.*of its tensors"),
        (changed("llama.block_count", 0), DataError, "num_hidden_layers=0: expected at least 1"),
        (changed("llama.embedding_length", 32), DataError, "has shape .* in the weights"),
        (changed("llama.attention.head_count", 5), DataError, "not a multiple of the number of attention heads"),
        (removed("llama.context_length"), DataError, "context_length"),
        (removed("llama.embedding_length"), DataError, "embedding_length"),
        (removed("tokenizer.ggml.tokens"), DataError, "cannot be read as a GGUF file"),
        (removed("tokenizer.ggml.model"), DataError, "cannot be read as a GGUF file"),
        (lambda w: w.add_tensor("blk.0.attn_q_norm.weight", NORM), DataError, "no place for blk.0.attn_q_norm.weight"),
        (lambda w: w.add_tensor("rope_freqs.weight", 2 * NORM[:8]), ConfigError, "rope_freqs.weight has other factors"),
        (renamed, DataError, "lack model.layers.0.self_attn.q_proj.weight"),
        (infinite, DataError, "model.norm.weight has values that are NaN or infinite"),
        (lambda w: w.add_tensor("x", np.ones(4, np.int32)), ConfigError, "x is quantised as I32, which gguf cannot"),
    ],
)
def test_a_file_that_cannot_be_used(
    extra: Callable[[Any], None], error: type[Exception], message: str, tmp_path: Path
) -> None:
    path = written(tmp_path, "bos", extra=extra)
    with pytest.raises(error, match=message) as result:
        huggingface.load(str(path))
    assert "\n" not in str(result.value) and str(path) in str(result.value)


def overwritten(content: bytes, place: int, values: bytes) -> bytes:
    return content[:place] + values + content[place + len(values) :]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return written(tmp_path_factory.mktemp("whole"), "bos").read_bytes()


@pytest.mark.parametrize(
    "damage",
    [
        *(lambda content, end=end: content[: len(content) * end // 16] for end in range(16)),
        lambda content: content[:-1],
        lambda content: overwritten(content, 0, b"GGML"),
        lambda content: overwritten(content, 4, struct.pack("<I", 1)),
        lambda content: overwritten(content, 4, struct.pack(">I", 3)),
        lambda content: overwritten(content, 8, struct.pack("<Q", 1 << 60)),  # tensors
        lambda content: overwritten(content, 16, struct.pack("<Q", 1 << 60)),  # keys
        lambda content: overwritten(content, 24, struct.pack("<Q", 1 << 60)),  # letters of the first key
        lambda content: content.replace(b".ggml.tokens\t\0\0\0\x08\0\0\0", b".ggml.tokens\t\0\0\0\x09\0\0\0"),
        lambda content: b"\0" * len(content),
    ],
)
def test_a_damaged_file(damage: Callable[[bytes], bytes], whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(damage(whole))
    with pytest.raises(DataError, match="model.gguf") as result:
        huggingface.config_of(str(path))
    assert "\n" not in str(result.value) and not list((tmp_path / "cache").rglob("config.json"))


def test_counts_beyond_the_end_of_the_file(tmp_path: Path) -> None:
    """Of arrays, at which gguf's reader would go on for ever."""
    path = written(tmp_path, "bos", extra=lambda writer: writer.add_array("some.array", [1.0, 2.0]))
    content = path.read_bytes()
    at = content.index(b"some.array") + len("some.array") + 8
    assert struct.unpack_from("<Q", content, at) == (2,)
    path.write_bytes(overwritten(content, at, struct.pack("<Q", 1 << 60)))
    with pytest.raises(DataError, match="cannot be read as a GGUF file"):
        huggingface.config_of(str(path))


def test_a_missing_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, "bos")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"a GGUF file is read with gguf: pip install 'attnlab\[gguf\]'"):
        huggingface.config_of(str(path))


@pytest.mark.parametrize(
    ("pre", "note"), [("smollm", ""), ("gpt-2", ""), ("llama-bpe", ""), ("deepseek-v9", "pre=deepseek-v9 is unknown")]
)
def test_how_words_are_split(pre: str, note: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path, "bos", extra=changed("tokenizer.ggml.pre", pre))
    words = huggingface.tokenizer(str(path))
    pieces = [piece for piece, _ in words.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a 12345")]
    assert pieces == {"smollm": ["a", "Ġ", *"12345"], "llama-bpe": ["a", "Ġ", "123", "45"]}.get(pre, ["a", "Ġ12345"])
    assert note in caplog.text and bool(note) == ("ids may differ" in caplog.text)
    assert bool(reading.about(hub.folder(str(path)))["notes"]) == bool(note)


@pytest.mark.slow
def test_the_modes_that_take_a_folder_take_a_file(tmp_path: Path) -> None:
    """Test, convert, generate, compress and export; the record and the card say what was dequantised."""
    path, run = written(tmp_path, "bos", "Q8_0"), tmp_path / "run"

    def done(*words: str) -> dict[str, Any]:
        paths = ":".join([str(ROOT / "src"), str(Path(gguf.__file__).parents[1])])
        result = run_command(*words, "hardware=cpu", ATTNLAB_CACHE=str(tmp_path / "cache"), PYTHONPATH=paths)
        assert result.returncode == 0, result.stderr[-2000:]
        return json.loads((run / "record.json").read_text()) if (run / "record.json").is_file() else {}

    text = ["task=wikitext2", f"model={path}", "task.data.window=32"]
    sizes = ["convert.layers=equal", "convert.calibration.window=32", "convert.calibration.tokens=1024"]
    expected = {"file": "GGUF", "dequantised": {"Q8_0": 16, "F32": 5}, "notes": []}
    for words in (
        [*text, "mode=test"],
        [*text, "mode=generate", "prompt=The sun", "task.sampling.tokens=3"],
        ["task=reasoning", f"model={path}", "mode=compress", "compress=tensorllm", "task.data.limit=20"],
        [*text, "mode=convert", "convert=mla", *sizes, "task.score.needle=null"],
    ):
        shutil.rmtree(run, ignore_errors=True)
        assert done(*words, f"hydra.run.dir={run}")["weights"] == expected
    done("mode=export", f"checkpoint={run}")
    assert "dequantised from a GGUF file" in (run / "exported" / "README.md").read_text()
    assert (run / "exported" / "chat_template.jinja").is_file() and (run / "exported" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.skipif("ATTNLAB_MODELS" not in os.environ, reason="real weights are not there")
def test_a_real_file() -> None:
    """SmolLM2-135M-Instruct as Q4_1, and the folder with its values in float32."""
    place = Path(os.environ["ATTNLAB_MODELS"])
    if not (file := place / "smollm2_135m.gguf").is_file():
        pytest.skip("the GGUF file is not there")
    model, plain = (huggingface.load(str(path), dtype=torch.float32) for path in (file, place / "smollm2_135m"))
    ids = torch.randint(0, 49152, (2, 256), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(logits(model, ids), logits(plain, ids))
    words, known = (huggingface.tokenizer(str(path)) for path in (file, place / "smollm2_135m"))
    texts = json.loads((place / "smollm2_135m" / "tokenizer.json").read_text())["model"]["merges"][:2000:7]
    texts = [" ".join(merge).replace("Ġ", " ") + f"\n, {number}<|im_end|>" for number, merge in enumerate(texts)]
    assert len(texts) > 200
    assert [words(text).input_ids for text in texts] == [known(text).input_ids for text in texts]
    spaced = "a  1"  # digit by digit, as published; transformers alone, which wrote the folder, splits as GPT-2
    assert words.tokenize(spaced) == ["a", "ĠĠ", "1"] and known.tokenize(spaced) == ["a", "Ġ", "Ġ", "1"]
    assert words.chat_template == known.chat_template
    assert reading.about(hub.folder(str(file)))["dequantised"] == {"Q4_1": 210, "F32": 61, "Q8_0": 1}

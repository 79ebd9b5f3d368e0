"""Models by a local folder or a hub name: read, counted, exported."""

import copy
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import huggingface_hub.errors
import pytest
import torch

from attnlab.compression import compress, densify
from attnlab.compression.methods.mlp_svd import MLPSVD
from attnlab.compression.methods.tensorllm import TensorLLM
from attnlab.errors import ConfigError, DataError
from attnlab.pretrained import family_of, huggingface
from tests.pretrained.tiny import OPTIONS, edit, ids, logits, saved, tiny
from tests.pretrained.tokens import pretrained


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_local_folder(kind: str, tmp_path: Path) -> None:
    expected = saved(tmp_path, kind)
    model = huggingface.load(str(tmp_path))
    assert torch.equal(logits(model, ids()), logits(expected, ids())) and not model.training
    assert huggingface.options_of(model) == huggingface.config_of(str(tmp_path)) == huggingface.options_of(expected)
    with torch.device("meta"):
        outline = huggingface.create(str(tmp_path))
    shapes = [{name: p.shape for name, p in made.named_parameters()} for made in (outline, model)]
    assert shapes[0] == shapes[1]


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


@pytest.mark.parametrize(
    ("files", "weights"),
    [
        (["model-00001-of-00002.safetensors", "original/consolidated.safetensors"], "model*.safetensors"),
        (["pytorch_model.bin", "onnx/model.safetensors"], "pytorch_model*.bin"),
    ],
)
def test_only_what_is_needed_is_downloaded(
    files: list[str], weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = saved(tmp_path / "model")
    asked: list[dict[str, Any]] = []

    def download(name: str, local_files_only: bool = False, **options: Any) -> str:
        if local_files_only:
            raise FileNotFoundError(name)
        asked.append({"name": name, **options})
        return str(tmp_path / "model")

    about = SimpleNamespace(siblings=[SimpleNamespace(rfilename=file) for file in files])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **options: about)
    assert torch.equal(logits(huggingface.load("someone/tiny"), ids()), logits(expected, ids()))
    config, model = (download["allow_patterns"] for download in asked)  # the config is checked before weights come
    assert weights in model and not {"*.safetensors", weights} & set(config) and "*.json" in config
    assert all(download["name"] == "someone/tiny" and download["ignore_patterns"] == "*/*" for download in asked)
    edit(tmp_path / "model", model_type="opt")
    with pytest.raises(ConfigError, match="of no known family"):
        huggingface.load("someone/tiny")
    assert len(asked) == 3

    def broken(name: str, **options: Any) -> str:
        raise FileNotFoundError(name) if "local_files_only" in options else OSError("connection reset")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", broken)
    with pytest.raises(DataError, match=r"the download failed \(connection reset\); run it again, or download it"):
        huggingface.load("someone/tiny")


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
    described = family_of(model).layers(model)
    assert len(described) == layers
    for layer in described:
        shapes = [layer.projections[name].shape for name in "qkvo"]
        assert sum(out * width for out, width in shapes) == attention
        assert not layer.refusals.keys() & {"attention", "mlp"}


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
    with pytest.raises(ConfigError, match="is compressed: .* mode=export"):
        huggingface.export(model, tmp_path / "plain")
    huggingface.export(densify(model, dense), tmp_path / "plain", str(source))
    auto = transformers.AutoModelForMaskedLM if "bert" in kind else transformers.AutoModelForCausalLM
    again = auto.from_pretrained(tmp_path / "plain")
    assert all(type(part).__module__.partition(".")[0] in ("torch", "transformers") for part in again.modules())
    torch.testing.assert_close(logits(again, ids()), logits(model, ids()), rtol=0, atol=1e-4)
    copied, original = (transformers.AutoTokenizer.from_pretrained(place) for place in (tmp_path / "plain", source))
    assert copied.get_vocab() == original.get_vocab() and copied("the claim") == original("the claim")


def test_a_compressed_model_has_the_files_of_its_source(tmp_path: Path) -> None:
    """Byte for byte in its folder, and in what is exported from there."""
    source, folder, plain = (tmp_path / name for name in ("source", "compressed", "plain"))
    files = huggingface.tokenizer_files(str(pretrained(source, "several-ends")))
    assert {"tokenizer.json", "chat_template.jinja", "generation_config.json"} <= files.keys()
    folder.mkdir()
    huggingface.copy_tokenizer(huggingface.tokenizer(str(source)), folder)
    huggingface.export(huggingface.load(str(source)), plain, str(folder))
    assert {name: (plain / name).read_bytes() for name in files} == files

"""mode=export: from the folder of a compressed model to a checkpoint that transformers loads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from attnlab.compression import compress, folder
from attnlab.compression.methods.tensorllm import TensorLLM
from attnlab.errors import ConfigError, DataError
from attnlab.modes import export
from attnlab.pretrained import huggingface
from attnlab.run.directory import OF_A_RECORD
from tests.export.alone import run_card
from tests.pretrained.tiny import ids, logits, tiny, words


def configured(model: str | None, output: Path | None = None) -> DictConfig:
    values = {"model": model, "checkpoint": None, "format": None, "output": output and str(output)}
    return OmegaConf.create(values)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "roberta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_run_becomes_a_checkpoint(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny(kind).to(dtype)
    compress(model, TensorLLM(ranks=[10, 5]))
    folder.save(model, tmp_path / "run" / "compressed", "tiny", huggingface.options_of(model))
    words().save_pretrained(tmp_path / "run" / "compressed")
    record: dict[str, str] = {}
    for i, name in enumerate(("run", "run/compressed")):  # a run, or its folder
        place = tmp_path / f"out{i}"
        export.run(configured(str(tmp_path / name), place), record, None)
        assert record["exported"] == str(place)
        text = (place / "README.md").read_text()
        assert f"{type(model).__name__}.from_pretrained" in text and "factors are multiplied out" in text
        names = run_card(place)
        again = names["model"]
        assert {p.dtype for p in again.parameters()} == {dtype}
        near = 1e-5 if dtype == torch.float32 else 0.3
        expected = logits(folder.load(tmp_path / "run" / "compressed"), ids())
        torch.testing.assert_close(logits(again, ids()), expected, rtol=0, atol=near)
        assert names["tokenizer"]("the claim").input_ids == [3, 4]


def test_a_run_of_the_command_is_named_by_checkpoint_too(tmp_path: Path) -> None:
    model = tiny("llama")
    compress(model, TensorLLM(ranks=[10, 5]))
    folder.save(model, tmp_path / "run" / "compressed", "tiny", huggingface.options_of(model))
    record: dict[str, Any] = dict.fromkeys(OF_A_RECORD) | {"task": "reasoning", "compress": "tensorllm"}
    record["quality"] = {"accuracy": 51.25, "questions": 80}
    (tmp_path / "run" / "record.json").write_text(json.dumps(record))
    settings = {"checkpoint": str(tmp_path / "run"), "model": "meta/llama", "task": {"modes": ["compress"]}}
    export.run(OmegaConf.create({**settings, "format": None, "output": None}), {}, None)
    text = (tmp_path / "run" / "exported" / "README.md").read_text()
    assert "# reasoning, tensorllm" in text and "| accuracy | 51.25 |" in text and "AutoTokenizer.from_" not in text
    with pytest.raises(ConfigError, match="format=safetensors: .*compressed is a compressed language model"):
        export.run(OmegaConf.create({**settings, "format": "safetensors"}), {}, None)
    served = {**settings, "format": "vllm", "output": None, "prove": {"python": None}}
    export.run(OmegaConf.create(served), {}, None)
    card = tmp_path / "run" / "exported" / "README.md"
    assert "vllm serve exported" in card.read_text()
    card.unlink()
    record["serving"] = {"tokens_equal": 8}  # of the folder before
    (tmp_path / "run" / "record.json").write_text(json.dumps(record))
    engine = tmp_path / "engine"
    engine.write_text('#!/bin/sh\n[ "$1" = -c ]\n')  # imports everything, decodes nothing
    engine.chmod(0o755)
    proved = {**served, "format": "deepseek", "prove": {"python": str(engine), "prompts": 4, "tokens": 4}}
    with pytest.raises(DataError, match="vLLM did not decode"):
        export.run(OmegaConf.create(proved), {}, None)
    assert "Proof in an engine: not run" in card.read_text()
    assert "serving" not in json.loads((tmp_path / "run" / "record.json").read_text())


def test_a_compressed_encoder_is_not_served(tmp_path: Path) -> None:
    model = tiny("roberta")
    folder.save(model, tmp_path / "compressed", "tiny", huggingface.options_of(model))
    cfg = OmegaConf.merge(configured(str(tmp_path / "compressed"), tmp_path / "out"), {"format": "vllm"})
    with pytest.raises(
        ConfigError, match="roberta has attention to later positions, which attnlab's decoder does not have"
    ):
        export.run(cfg, {}, None)  # type: ignore[arg-type]


def test_what_is_no_compressed_model(tmp_path: Path) -> None:
    for model, message in ((None, "model= is not given"), (str(tmp_path), f"model={tmp_path}")):
        with pytest.raises(ConfigError, match=f"mode=export: {message}; give a run of mode=compress"):
            export.run(configured(model), {}, None)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(DataError, match="manifest.json: format: "):
        export.run(configured(str(tmp_path), tmp_path / "out"), {}, None)
    with pytest.raises(ConfigError, match="is not in the directory of a run; give output="):
        export.run(configured(str(tmp_path)), {}, None)

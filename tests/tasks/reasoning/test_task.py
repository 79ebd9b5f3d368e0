"""The whole flow with a sample model that is trained for one epoch: ask, compress, ask, save, describe, search."""

from pathlib import Path
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

import pytest
import torch
from omegaconf import DictConfig

from attnlab.compression import compress, load, save
from attnlab.compression.methods.tensorllm import TensorLLM
from attnlab.config.check import compose
from attnlab.data.questions import question_set
from attnlab.errors import ConfigError, DataError
from attnlab.modes import compress as compress_mode
from attnlab.modes import describe
from attnlab.pretrained import huggingface
from attnlab.run.record import new, problems
from attnlab.tasks.base import task_of
from attnlab.tasks.reasoning.model import SIZES, AskedModel
from attnlab.tasks.reasoning.score import ask, quality
from attnlab.tasks.reasoning.task import ReasoningTask
from tests.pretrained import tiny
from tests.tasks.conftest import Start, recorded
from tests.tasks.reasoning.conftest import Folder

TINY = ["task=reasoning", "hardware=cpu", "task.data.limit=20"]
RANKS = ["compress=tensorllm", "compress.ranks=[16,4]", "compress.sweeps=2"]


@pytest.fixture
def start(tiny_cache: Path, folder: Folder) -> Start:
    def make(*overrides: str) -> tuple[DictConfig, dict[str, Any]]:
        cfg = compose(*TINY, f"cache_dir='{tiny_cache}'", f"model={folder('llama')}", *overrides)
        record = new(cfg, "test")
        record["environment"] = {"device": "cpu", "threads": 1}
        return cfg, record

    return make


def test_ask_compress_ask_and_save(start: Start, tmp_path: Path) -> None:
    record = recorded(compress_mode, start(*RANKS, "task.search=[{layers: [0]}, {layers: [0,1]}]"), tmp_path)
    about = record["compression"]
    assert record["corpus"].startswith("embedded sample") and about["quality"]["dense"]["questions"] == 16
    assert about["validation"]["dense"]["questions"] == 4
    assert [point["settings"] for point in about["search"]] == [{"layers": [0]}, {"layers": [0, 1]}]
    best = max(about["search"], key=lambda point: (point["validation"]["accuracy"], -point["validation"]["loss"]))
    assert about["chosen"] == best["settings"]
    assert about["validation"]["compressed"] == best["validation"]  # the same units once more
    assert about["quality"]["compressed"]["perplexity"] > 1 and about["rate"]["rate"] > 1
    assert record["quality"] == about["quality"]["compressed"]
    assert [wrong for wrong in problems(record | {"status": "finished"}) if "environment" not in wrong] == []
    lines = (tmp_path / "predictions.tsv").read_text().splitlines()
    assert len(lines) == 17 and lines[0].startswith("source\treference\thypothesis")
    again = load(tmp_path / "compressed")
    assert huggingface.tokenizer(str(tmp_path / "compressed")).mask_token == "<mask>"
    assert sum(p.numel() for p in again.parameters()) == record["parameters"]["total"]
    # the compressed model is a model to ask, and its numbers are the same
    second = recorded(compress_mode, start(f"model={tmp_path}", "compress=none"), tmp_path / "again")
    assert second["quality"] == record["quality"]


@pytest.mark.parametrize("questions", ["fever", "bios", "wikidata"])
def test_roberta_is_asked_every_set(questions: str, start: Start, folder: Folder, tmp_path: Path) -> None:
    started = start("compress=none", f"model={folder('roberta')}", f"task.questions={questions}")
    record = recorded(compress_mode, started, tmp_path)
    assert record["quality"]["questions"] == 16 and 0 < record["quality"]["loss"] < 10
    assert record["compression"]["quality"]["compressed"] == "not run"
    assert "perplexity" not in record["quality"]


ROBERTA, GPTJ, LLAMA2 = "roberta-base", "EleutherAI/gpt-j-6b", "meta-llama/Llama-2-7b-hf"
TABLE_2 = [  # ranks, printed rate, parameters of the factors, dense by factorised multiply-adds, percent of the model
    (ROBERTA, "[720,60,3]", "1.12", 2_112_012, 1.0, 0.2),
    (ROBERTA, "[312,26,4]", "3.74", 630_672, 2.49, 1.4),
    (ROBERTA, "[180,15,4]", "8.78", 268_816, 5.2, 1.7),
    (ROBERTA, "[444,37,3]", "2.52", 934_780, 1.49, 1.1),
    (GPTJ, "[64,4,2]", "247.30", 271_368, 110.7, 1.1),
    (GPTJ, "[672,42,4]", "14.69", 4_569_616, 8.39, 1.0),
    (GPTJ, "[208,13,1]", "74.68", 898_564, 32.1, 1.1),
    (GPTJ, "[304,19,2]", "46.77", 1_434_888, 21.2, 1.1),
    (LLAMA2, "[1920,60,3]", "3.54", 18_931_212, 2.13, 0.7),
    (LLAMA2, "[1920,60,1]", "5.81", 11_558_404, 2.13, 0.8),
]


@pytest.mark.parametrize(
    ("model", "ranks", "rate", "parameters", "faster", "saving"),
    [pytest.param(*row, marks=[] if row[2] in ("3.74", "247.30", "3.54") else pytest.mark.slow) for row in TABLE_2],
)
def test_published_models_are_described_without_weights(
    model: str, ranks: str, rate: str, parameters: int, faster: float, saving: float, start: Start
) -> None:
    """Multiply-adds are at most those of the plain product of factors, 2 d R1 + 4 h (R1 R2 + R2 dv), and of dense."""
    settings = ("mode=describe", "compress=tensorllm", "compress.layers=[-1]", f"compress.ranks={ranks}")
    record = recorded(describe, start(f"model={model}", *settings), None)
    counted = record["compression"]["rate"]
    width = 768 if model == ROBERTA else 4096
    assert f"{counted['rate']:.2f}" == rate and counted["parameters"] == parameters
    assert counted["multiply_adds_dense"] == counted["parameters_dense"] == 4 * width**2
    assert counted["multiply_adds_dense"] / counted["multiply_adds_factorised"] >= faster - 0.05
    assert counted["model_saving_percent"] == pytest.approx(saving, abs=0.06)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["compress=tensorllm", "compress.layers=[9]"], "compress.layers: 9: expected 0 to 1"),
        (["compress=tensorllm", "compress.ranks=[999,4]"], "compress.ranks"),
        (["compress=tensorllm", "task.search=[{layers: [7]}]"], "compress.layers: 7: expected 0 to 1"),
        (["compress=tensorllm", "compress.calibration=no.txt"], "compress.calibration=no.txt: no such file"),
        (["data_root=nowhere"], "no such directory"),
        (["hardware=ddp"], "runs in one process on one device"),
        (["task.questions=hotpot"], "nearest: hotpotqa"),
        (["task.search=[{layers: [0]}]"], "nothing to search with compress=none"),
        (["compress=tensorllm", "task.search=[{rnaks: [1,1]}]"], "task.search.0.rnaks"),
        (["task.search=[]"], "task.search"),
        (["task.batch_size=0"], "task.batch_size=0: expected int >= 1"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_read(
    overrides: list[str], expected: str, start: Start, tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, DataError)) as caught:
        compress_mode.run(*start(*overrides), tmp_path)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "roberta"])
def test_sample_models_know_the_world(kind: str, tmp_path: Path) -> None:
    cfg = compose("task=reasoning", "hardware=cpu", f"cache_dir='{tmp_path}'", f"task.model.sample={kind}")
    task = task_of(cfg, ReasoningTask)
    for name in ("hotpotqa", "fever", "bios", "wikidata"):
        record = new(cfg, "test")
        record["environment"] = {"device": "cpu", "threads": 1}
        data, asked = task.prepare(record, None)
        items = question_set(name).read(data.location)
        assert quality(ask(asked, question_set(name), items, 32))["accuracy"] >= 95, name


def test_a_tokenizer_of_another_model_is_refused(folder: Folder, start: Start, tmp_path: Path) -> None:
    small: Any = huggingface.create("small", {**SIZES["llama"], "vocab_size": 99})
    small.save_pretrained(tmp_path / "small")
    huggingface.tokenizer(str(folder("llama"))).save_pretrained(tmp_path / "small")
    with pytest.raises(DataError, match="they do not belong together"):
        task_of(start(f"model={tmp_path / 'small'}")[0], ReasoningTask).prepare({}, None)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_a_folder_in_half_precision_computes_as_the_hardware_says(
    stored: torch.dtype, folder: Folder, start: Start, tmp_path: Path
) -> None:
    model: Any = huggingface.load(str(folder("llama")), dtype=stored)
    model.save_pretrained(tmp_path / "half", max_shard_size="20KB")
    huggingface.tokenizer(str(folder("llama"))).save_pretrained(tmp_path / "half")
    assert len(list((tmp_path / "half").glob("model-*.safetensors"))) > 1
    seen, words, ids = {}, f"model={tmp_path / 'half'}", torch.arange(8)[None]
    settings = {"32": [], "bf16": ["hardware.precision=bf16-mixed"], "own": ["task.model.dtype=bfloat16"]}
    for name, more in settings.items():
        task = task_of(start(words, *more)[0], ReasoningTask)
        asked = task.restore()
        with torch.no_grad(), task._autocast():
            seen[name] = asked.model(ids).logits
    assert [value.dtype for value in seen.values()] == [torch.float32, torch.bfloat16, torch.bfloat16]
    assert torch.equal(seen["32"], huggingface.load(str(tmp_path / "half"), dtype=torch.float32)(ids).logits)


@pytest.mark.parametrize("kind", ["llama", "gptj"])
def test_the_type_of_a_compressed_model_is_that_of_from_pretrained(kind: str, tmp_path: Path) -> None:
    """Parameters are cast; rotary frequencies, which no weight file has, stay in float32."""
    model: Any = tiny.tiny(kind)
    model.save_pretrained(tmp_path / "dense")
    reference: Any = type(model).from_pretrained(tmp_path / "dense", dtype=torch.bfloat16)
    compress(model, TensorLLM(ranks=[10, 4]))
    save(model, tmp_path / "compressed", "tiny", huggingface.options_of(model))
    tiny.words().save_pretrained(tmp_path / "compressed")
    spec = AskedModel(str(tmp_path / "compressed"), "bfloat16")
    asked = spec.load(1, tmp_path, torch.device("cpu"))
    assert {parameter.dtype for parameter in asked.model.parameters()} == {torch.bfloat16}
    expected = dict(reference.named_buffers())
    for name, value in asked.model.named_buffers():
        assert value.dtype == expected[name].dtype and torch.equal(value, expected.pop(name)), name
    assert not expected
    assert asked.model(tiny.ids()).logits.dtype == torch.bfloat16

"""Recall from a command line to its record, at a tiny size."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from attnlab.config.check import check, compose
from attnlab.data.text.windows import IGNORE
from attnlab.errors import ConfigError
from attnlab.modes import describe, train
from attnlab.modes import test as test_mode
from attnlab.run.record import write
from attnlab.tasks.recall.task import RecallTask
from tests.tasks.conftest import predictions, recorded, starter

TINY = [
    "task=recall", "hardware=cpu", "task.model.d_model=16", "task.attention_heads=2", "task.train.max_steps=4",
    "task.train.validate_every=2", "task.train.log_every=1", "task.train.batch.sequences=4", "task.score.samples=2",
    "task.data.validation=4",
]  # fmt: skip
CELLS = {
    "mqar": ["task.data.train=[[16,4,40],[32,4,40]]", "task.data.test=[[16,4,6],[32,8,5]]"],
    "selective_copying": ["task.data.train=[[16,4,40]]", "task.data.test=[[16,4,6],[32,8,5]]"],
    "needle": ["task.data.train=[[16,-1,40],[32,-1,40]]", "task.data.test=[[16,0.5,6],[32,1.0,5]]"],
}
NAMES = {"mqar": ["16x4", "32x8"], "selective_copying": ["16x4", "32x8"], "needle": ["16x50%", "32x1"]}


def words(problem: str, *more: str) -> list[str]:
    return [*TINY, f"task.data.problem={problem}", *CELLS[problem], *more]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return started(tmp_path_factory.mktemp("run"), *words("mqar", "attention=mtla", "stride=2"))


def started(directory: Path, *overrides: str) -> Path:
    """A run in this process, with what the command leaves in its directory."""
    write(recorded(train, starter()(*overrides), directory) | {"status": "finished"}, directory)
    return directory


def command(*arguments: str, cwd: Path) -> None:
    subprocess.run([sys.executable, "-m", "attnlab", *arguments], cwd=cwd, check=True)


def read(directory: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((directory / "record.json").read_text())
    return record


def test_a_command_gives_a_record_with_accuracy_and_cache_of_each_cell(trained: Path) -> None:
    record = read(trained)
    quality, cache = record["quality"], record["kv_cache"]
    assert (record["status"], record["training"]["steps"]) == ("finished", 4)
    assert list(quality["cells"]) == ["16x4", "32x8"] and (quality["sequences"], quality["answers"]) == (11, 6 * 4 + 40)
    mean = (6 * quality["cells"]["16x4"] + 5 * quality["cells"]["32x8"]) / 11
    assert quality["accuracy"] == pytest.approx(mean, abs=1e-4)
    assert "length x pairs" in quality["signature"]
    assert "MQAR, generated, version 1: train 80, validation 8, test 11 sequences" in record["corpus"]
    assert record["identity"]["corpus"] == "none"
    assert cache["bytes_measured"] == cache["bytes_predicted"] == 2 * cache["lengths"]["32"]["measured"]
    assert all(size["measured"] == size["predicted"] for size in cache["lengths"].values())
    assert cache["bytes_per_position"] == cache["lengths"]["32"]["measured"] / 32
    assert cache["lengths"]["16"]["measured"] == 16 * cache["bytes_per_token"]
    with open(trained / "curves" / "metrics.csv", encoding="utf-8", newline="") as file:
        logged = [row["val_accuracy"] for row in csv.DictReader(file) if row["val_accuracy"]]
    assert len(logged) == 2 and all(0 <= float(value) <= 1 for value in logged)


def test_predictions_are_sequences_that_people_can_read(trained: Path) -> None:
    rows = predictions(trained)
    assert [row["id"] for row in rows] == ["16x4-0", "16x4-1", "32x8-0", "32x8-1"]
    for row in rows:
        pairs, questions = row["source"].split(" ; ")
        known = dict(pair.split("=") for pair in pairs.split())
        asked = [question.rstrip("?") for question in questions.split()]
        assert row["reference"].split() == [known[key] for key in asked]
        assert len(row["hypothesis"].split()) == len(asked)


def test_the_test_mode_gives_the_run_s_own_score(trained: Path, tmp_path: Path) -> None:
    tested = starter(*words("mqar", "attention=mtla", "stride=2"))("mode=test", f"checkpoint={trained}")
    record = recorded(test_mode, tested, tmp_path)
    assert record["quality"] == read(trained)["quality"] and predictions(tmp_path) == predictions(trained)


def test_accuracy_is_that_of_the_logits(trained: Path) -> None:
    """Recomputed sequence by sequence, from the logits of all positions; and by single steps through the caches."""
    task = RecallTask(compose(*words("mqar", "attention=mtla", "stride=2"), f"checkpoint={trained}", "mode=test"))
    module, data = task.restore(), task.grid()
    data.setup("test")
    sequences, shares = data.sequences("test"), []
    for number in range(len(sequences)):
        tokens, targets = sequences[number]
        guesses = module.model(tokens[None])[0].argmax(-1)
        caches = module.model.start(1, len(tokens))
        steps = torch.cat([module.model.step(token[None, None], caches)[0] for token in tokens]).argmax(-1)
        real = targets != IGNORE
        assert torch.equal(guesses[real], steps[real])
        shares.append(float((guesses == targets)[real].double().mean()))
    assert read(trained)["quality"]["accuracy"] == pytest.approx(sum(shares) / len(shares), abs=1e-4)


def test_only_answers_have_gradients() -> None:
    task = RecallTask(compose(*words("mqar", "attention=mha")))
    module = task.module({"kv_cache": {}}, task.grid()).eval()
    tokens = torch.randint(0, 64, (3, 16), generator=torch.Generator().manual_seed(1))
    targets = torch.full_like(tokens, IGNORE)
    targets[:, 5], targets[1, 9] = 7, 3
    loss, plain, right, count = module.losses((tokens, targets))
    logits = module.model(tokens).log_softmax(-1)
    expected = -(logits[:, 5, 7].sum() + logits[1, 9, 3])
    torch.testing.assert_close(loss, expected)
    assert count == 4 and plain == loss.detach()
    assert right == (logits.argmax(-1) == targets).sum()


@pytest.mark.parametrize("problem", [pytest.param("selective_copying", marks=pytest.mark.slow), "needle"])
def test_the_other_problems(problem: str, tmp_path: Path) -> None:
    short = starter(*words(problem))("attention=mla", "task.train.max_steps=1", "task.train.validate_every=1")
    record = recorded(train, short, tmp_path)
    assert list(record["quality"]["cells"]) == NAMES[problem]
    assert all(row["reference"] and row["hypothesis"] for row in predictions(tmp_path))


@pytest.mark.parametrize("problem", CELLS)
@pytest.mark.parametrize("scale", ["sample", "paper"])
def test_every_problem_is_accepted_at_every_scale(problem: str, scale: str, tmp_path: Path) -> None:
    cfg = compose("task=recall", f"task.data.problem={problem}", f"scale={scale}", "attention=mla")
    RecallTask(cfg).check(tmp_path)


def test_the_published_grids_are_zoologys() -> None:
    """HazyResearch/zoology: the last cell of iclr24_zoology_figure2, and the mixture of arxiv24_based_figure2."""
    cfg = compose("task=recall", "scale=paper", "attention=mha").task
    assert (cfg.data.train, cfg.data.test) == ([[512, 64, 100000]], [[512, 64, 3000]])
    assert (cfg.data.vocab_size, cfg.data.power, cfg.data.noise) == (8192, 0.01, False)
    assert (cfg.model.num_layers, cfg.model.ffn_dim, cfg.model.positions, cfg.attention_heads) == (2, 0, 512, 1)
    assert (cfg.optimizer.weight_decay, cfg.train.max_epochs, cfg.train.batch.sequences) == (0.1, 64, 128)
    assert (cfg.model.embedding_dropout, cfg.attention_dropout, cfg.schedule.floor) == (0.1, 0.1, 0)
    cfg = compose("experiment=recall/mixture", "attention=mha").task
    pairs = [[64, 4], [128, 8], [256, 16], [256, 32], [256, 64]]
    assert cfg.data.train == [[*cell, 100000 if cell == [64, 4] else 20000] for cell in pairs]
    tests = [[64, 4], [64, 8], [64, 16], [128, 32], [256, 64], [512, 128], [1024, 256]]
    assert cfg.data.test == [[*cell, 1000] for cell in tests] and cfg.model.max_length == 1024
    assert (cfg.train.max_epochs, cfg.train.batch.sequences, cfg.data.noise) == (32, 256, True)


def test_description_predicts_what_a_run_measures(trained: Path, tmp_path: Path) -> None:
    record = recorded(describe, starter(*words("mqar", "attention=mtla", "stride=2"))("mode=describe"), tmp_path)
    measured = read(trained)["kv_cache"]
    assert record["kv_cache"]["bytes_per_token"] == measured["bytes_per_token"]
    for length, values in record["kv_cache"]["lengths"].items():
        assert values["predicted"] == measured["lengths"][length]["measured"]


@pytest.mark.slow
def test_an_interrupted_run_continues_to_the_bit(trained: Path, tmp_path: Path) -> None:
    """Two updates and then two are the four of a run that was not interrupted."""
    settings = words("mqar", "attention=mtla", "stride=2", "task.schedule.floor=1")
    command(*settings, "hydra.run.dir=whole", cwd=tmp_path)
    command(*settings, "task.train.max_steps=2", "hydra.run.dir=part", cwd=tmp_path)
    command("resume=part", "task.train.max_steps=4", "hydra.run.dir=rest", cwd=tmp_path)
    weights = [load_file(tmp_path / name / "checkpoints" / "averaged.safetensors") for name in ("whole", "rest")]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


@pytest.mark.parametrize(
    ("words_given", "message"),
    [
        ("task.data.problem=copying", "task.data.problem=copying: expected mqar or selective_copying or needle"),
        ("data_root=.", "data_root=.: task=recall reads no corpus"),
        ("task.train.batch.sequences=3 hardware.devices=2", "task.train.batch.sequences=3 cannot be shared equally"),
        ("compress=irratt", "compress=irratt: task=recall has no pretrained model"),
        ("convert=mla", "convert=mla: task=recall has no pretrained decoder"),
        ("task.data.train=[[16,8,9]]", "task.data.train: [16, 8, 9]: 8 pairs and their questions need an even length"),
        ("task.data.test=[[4096,4,9]]", "sequences of 4096 tokens are longer than the"),
    ],
)
def test_what_is_refused_before_anything_is_drawn(words_given: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        RecallTask(check(["task=recall", *words_given.split()]).jobs[0]).check(tmp_path)
    assert message in str(caught.value) and "\n" not in str(caught.value)

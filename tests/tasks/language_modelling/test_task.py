"""Language models from config to record, to text and to evaluation, at a tiny size."""

import json
import math
from pathlib import Path
from shutil import copytree
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import attnlab
from attnlab.config.check import check, compose
from attnlab.data.samples import markov
from attnlab.errors import ConfigError, DataError
from attnlab.modes import describe, generate, predict, test, train
from attnlab.run.loading import load
from attnlab.run.record import new, write
from attnlab.tasks.base import Trains, task_of
from attnlab.tasks.language_modelling.module import LanguageModelling
from tests.data.test_tokens import write_shard
from tests.tasks.conftest import Start, predictions, recorded, starter

TINY = [
    "hardware=cpu",
    "task.model.d_model=16",
    "task.model.num_layers=1",
    "task.model.max_length=24",
    "task.attention_heads=2",
    "task.data.window=16",
    "task.train.batch.tokens=64",
    "task.data.eval_batch_size=64",
    "task.train.max_steps=8",
    "task.train.validate_every=4",
    "task.schedule.warmup_steps=2",
    "task.score.sliding_stride=8",
    "task.score.prompt_tokens=8",
    "task.score.continuations=3",
    "task.sampling.tokens=8",
]
PIECES = ("task=fineweb_edu", "attention=mtla", "task.data.vocab_size=300")
LITTLE = ("task.score.sliding_stride=null", "task.score.continuations=1", "task.data.eval_windows=4")


@pytest.fixture(scope="module", autouse=True)
def _short_texts() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(markov, "LINES", {"train": 500, "validation": 20, "test": 50})
        yield


@pytest.fixture(scope="module")
def start(cache: Path) -> Start:
    return starter("task=wikitext2", "attention=mha", *TINY, f"cache_dir='{cache}'")


@pytest.fixture(scope="module")
def trained(start: Start, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("trained")
    return directory, recorded(train, start(), directory)


@pytest.fixture(scope="module")
def pieces(start: Start, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("pieces")
    return directory, recorded(train, start(*PIECES), directory)


def weights(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "checkpoints" / "averaged.safetensors")


# --- training and scoring ---------------------------------------------------------------------------------------


def test_a_run_fills_its_record_and_its_directory(trained: tuple[Path, dict[str, Any]]) -> None:
    directory, record = trained
    json.dumps(record)
    quality = record["quality"]
    assert (quality["unit"], record["corpus"]) == ("word", "embedded sample of WikiText-2's layout")
    assert "per word, disjoint windows of 16" in quality["signature"]
    assert quality["floor"] == pytest.approx(math.exp(markov.Source().entropy), rel=1e-3)
    assert quality["floor"] < quality["perplexity"] < 400
    assert quality["floor"] < quality["sliding_perplexity"] != quality["perplexity"]
    assert record["training"]["steps"] == 8
    assert record["training"]["best_val_loss"] < 6
    assert record["kv_cache"]["bytes_measured"] == record["kv_cache"]["bytes_predicted"] == 3 * 16 * 32 * 4
    assert (record["inference"]["batch"], record["inference"]["beam"]) == (3, 1)
    rows = predictions(directory)
    assert len(rows) == 3 and rows[0]["id"] == "test-0" and all(row["hypothesis"] for row in rows)
    first = " ".join(next(iter(markov.Source().lines("test"))).split()[:4])
    assert rows[0]["source"].startswith(first)


def test_more_processes_than_held_out_windows_are_refused(start: Start) -> None:
    """Of a sharded model rank zero scores the test set alone."""
    cases: list[tuple[Literal["test"] | None, str, str]] = [
        (None, "auto", "validation"), ("test", "auto", "test"), (None, "fsdp", "validation"),
    ]  # fmt: skip
    for stage, strategy, split in cases:
        cfg, record = start("task.data.eval_windows=1", "hardware.devices=2", f"hardware.strategy={strategy}")
        with pytest.raises(ConfigError, match=f"hardware.devices: 2 processes cannot share the {split} split"):
            task_of(cfg, Trains).prepare(record, stage)
    task_of(cfg, Trains).prepare(record, "test")


def test_byte_pairs_give_a_perplexity_per_token_and_per_word(pieces: tuple[Path, dict[str, Any]]) -> None:
    quality = pieces[1]["quality"]
    assert quality["unit"] == "token" and "per token" in quality["signature"]
    assert quality["perplexity_per_word"] > quality["perplexity"] > quality["floor"]
    assert quality["floor"] < math.exp(markov.Source().entropy)  # a word is several tokens
    assert pieces[1]["parameters"]["total"] > 300 * 16


def test_the_perplexity_is_that_of_the_model_on_the_text(start: Start, trained: tuple[Path, dict[str, Any]]) -> None:
    """Recomputed from logits, a window at a time."""
    directory, record = trained
    cfg, again = start("mode=test", f"checkpoint='{directory}'")
    task = task_of(cfg, Trains)
    data, module = task.prepare(again, "test")
    module.model.load_state_dict(weights(directory))
    file = data.tokens("test")
    ids = torch.from_numpy(file.read(0, len(file)))
    total = 0.0
    for first in range(0, len(ids) - 1, 16):
        window = ids[first : first + 17]
        logits = module.model(window[None, :-1])[0].double()
        total -= float(logits.log_softmax(-1).gather(1, window[1:, None]).sum())
    assert record["quality"]["tokens"] == len(ids) - 1
    assert record["quality"]["perplexity"] == pytest.approx(math.exp(total / (len(ids) - 1)), rel=1e-5)


def test_testing_a_checkpoint_gives_the_run_s_own_score(
    start: Start, trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    directory, record = trained
    again = recorded(test, start("mode=test", f"checkpoint='{directory}'"), tmp_path)
    assert again["quality"] == record["quality"]
    assert (tmp_path / "predictions.tsv").read_text() == (directory / "predictions.tsv").read_text()


@pytest.mark.parametrize("task", ["lm1b", pytest.param("wikitext103", marks=pytest.mark.slow)])
def test_a_layout_trains(start: Start, tmp_path: Path, task: str) -> None:
    settings = ("task.train.max_steps=1", "task.train.validate_every=1", *LITTLE)
    record = recorded(train, start(f"task={task}", *settings), tmp_path)
    assert record["corpus"].startswith("embedded sample") and math.isfinite(record["quality"]["perplexity"])
    described = recorded(describe, start(f"task={task}", "mode=describe"), tmp_path)
    assert described["parameters"] == record["parameters"]


def test_token_shards_train(start: Start, tmp_path: Path, pieces: tuple[Path, dict[str, Any]]) -> None:
    vocabulary = json.loads((pieces[0] / "vocabulary.json").read_text())
    (tmp_path / "tokenizer.json").write_text(vocabulary["tokenizer"])
    ids = [int(i) for i in torch.randint(290, (400,), generator=torch.Generator().manual_seed(0))]
    root = tmp_path / "shards"
    root.mkdir()
    write_shard(root / "fineweb_val_000000.bin", ids[:120])
    write_shard(root / "fineweb_train_000001.bin", ids[120:])
    overrides = [
        "task=fineweb_edu", f"data_root='{root}'", "task.data.vocab_size=300", "task.train.max_steps=2",
        "task.train.validate_every=2", f"task.data.vocabulary.file='{tmp_path / 'tokenizer.json'}'",
    ]  # fmt: skip
    record = recorded(train, start(*overrides), tmp_path / "run")
    assert "train 280, validation 60, test 60 tokens" in record["corpus"]
    assert "second for the test" in record["quality"]["held_out"] and "floor" not in record["quality"]


AVERAGED = ("task.train.label_smoothing=0.1", "callbacks=mean_weights", "callbacks.mean_weights.start=5")


@pytest.mark.parametrize(
    ("limit", "more"), [*(pytest.param(n, (), marks=pytest.mark.slow) for n in (32, 64)), (32, AVERAGED)], ids=str
)
def test_resuming_equals_not_stopping(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, more: tuple[str, ...]
) -> None:
    settings = [f"task.data.batch_size={limit}", "task.train.max_steps=12", "task.train.batch.tokens=1024"]
    settings += [*LITTLE, *more, "task.train.validate_every=3"]
    step = LanguageModelling.training_step

    def interrupted(self: LanguageModelling, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == 7:
            raise KeyboardInterrupt
        return step(self, batch, batch_idx)

    train.run(*start(*settings), tmp_path / "whole")
    with monkeypatch.context() as patch, pytest.raises((KeyboardInterrupt, SystemExit)):
        patch.setattr(LanguageModelling, "training_step", interrupted)
        train.run(*start(*settings), tmp_path / "parts")
    whole, part = (
        torch.load(tmp_path / name / "checkpoints" / "last.ckpt", weights_only=True) for name in ("whole", "parts")
    )
    assert whole["epoch"] > 0 and 0 < part["global_step"] < 8
    train.run(*start(*settings, f"resume='{tmp_path / 'parts'}'"), tmp_path / "parts")
    for key, value in weights(tmp_path / "whole").items():
        assert torch.equal(weights(tmp_path / "parts")[key], value), key


def test_saved_and_scored_is_the_mean_of_the_weights_of_later_updates(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: dict[int, dict[str, Tensor]] = {}
    step = LanguageModelling.training_step

    def watched(self: LanguageModelling, batch: Any, batch_idx: int) -> Tensor:
        trained.setdefault(self.global_step, {k: v.clone() for k, v in self.state_dict().items()})
        return step(self, batch, batch_idx)

    monkeypatch.setattr(LanguageModelling, "training_step", watched)
    record = recorded(train, start(*AVERAGED, *LITTLE), tmp_path)
    last = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    trained[8] = last["current_model_state"]
    means = {4: trained[4], 8: {}}  # at the two validations: before the mean begins, and after updates 5 to 8
    for key, value in last["state_dict"].items():
        means[8][key] = torch.stack([trained[n][key] for n in range(5, 9)]).mean(0)
        torch.testing.assert_close(value, means[8][key])
    assert any(not torch.equal(means[8][key], trained[8][key]) for key in means[8])
    saved = weights(tmp_path)
    same = [all(torch.allclose(v, means[n][f"model.{k}"], atol=1e-6) for k, v in saved.items()) for n in (4, 8)]
    assert any(same)
    assert record["training"]["averaged_checkpoints"] == 1


def test_a_mean_that_never_begins_is_said_and_two_means_are_refused(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mean = ("callbacks=mean_weights", "callbacks.mean_weights.start=5")
    recorded(train, start(*mean, "task.train.max_steps=4", *LITTLE), tmp_path)
    assert any("not averaged: training ended after 4 updates" in message for message in caplog.messages)
    with pytest.raises(ConfigError, match="callbacks=ema averages the weights too"):
        compose("callbacks=[ema,mean_weights]")
    with pytest.raises(ConfigError, match="start=0: expected int >= 1"):
        compose("callbacks=mean_weights", "callbacks.mean_weights.start=0")


# --- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("task.data.window=25 task.train.batch.tokens=100", "task.data.window=25"),
        ("task.data.eval_window=25", "task.data.eval_window=25"),
        ("task.score.sliding_stride=17", "sliding_stride=17"),
        ("task.sampling.tokens=17", "task.sampling.tokens=17"),
        ("task.sampling.top_p=0", "task.sampling.top_p=0"),
        ("task.data.batch_size=0", "task.data.batch_size=0"),
        ("task.train.batch.tokens=80000", "task.train.batch.tokens=80000: "),
    ],
)
def test_wrong_settings(start: Start, tmp_path: Path, override: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        train.run(*start(*override.split()), tmp_path)
    assert key in str(caught.value) and "\n" not in str(caught.value)


# --- generation -------------------------------------------------------------------------------------------------


def test_a_prompt_is_continued(
    start: Start, trained: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    word = markov.Source().words[0]
    texts = []
    for temperature in ("0", "0", "1"):
        settings = (f"prompt='{word} {word}'", f"task.sampling.temperature={temperature}", "seed=3")
        record = recorded(generate, start("mode=generate", f"checkpoint='{trained[0]}'", *settings), None)
        assert capsys.readouterr().out.startswith(f"{word} {word} ")
        texts.append(record["generation"]["text"])
        assert record["generation"]["tokens"] == 8 and record["inference"]["tokens_per_second"] > 0
    assert texts[0] == texts[1] != texts[2]


def test_byte_pairs_are_continued(start: Start, pieces: tuple[Path, dict[str, Any]]) -> None:
    settings = (*PIECES, "mode=generate", f"checkpoint='{pieces[0]}'")
    assert recorded(generate, start(*settings), None)["generation"]["tokens"] == 8
    with pytest.raises(ConfigError, match=r"prompt of 4\d tokens and task.sampling.tokens=8 make"):
        generate.run(*start(*settings, f"prompt='{'x ' * 20}'"), None)


def test_a_run_with_a_higher_limit_is_a_new_one(start: Start, tmp_path: Path) -> None:
    """It averages the best checkpoints of both, also where the first run was moved, which stays as it was."""
    first = recorded(train, start("task.train.keep_best=3", *LITTLE), tmp_path / "first")
    write(first | {"status": "finished", "identity": {"run": "1234"}}, tmp_path / "first")
    (tmp_path / "first").rename(tmp_path / "moved")
    before = sorted(path.name for path in (tmp_path / "moved" / "checkpoints").iterdir())
    longer = ("task.train.keep_best=3", "task.train.max_steps=16", *LITTLE)
    record = recorded(train, start(*longer, f"resume='{tmp_path / 'moved'}'"), tmp_path / "second")
    assert record["parent"] == {"path": str(tmp_path / "moved"), "run": "1234"}
    assert (record["training"]["steps"], record["training"]["averaged_checkpoints"]) == (16, 3)
    saved = [path.name for path in (tmp_path / "second" / "checkpoints").glob("step*")]
    assert len(saved) == 3 and any(name < "step000009" for name in saved), saved  # of four validations
    assert sorted(path.name for path in (tmp_path / "moved" / "checkpoints").iterdir()) == before


def test_predicting_on_the_command_line(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line for each line, JSONL for JSONL with its keys, and nothing but the results on stdout."""
    copytree(trained[0], tmp_path / "run")
    words = markov.Source().words

    def used(typed: str, *settings: str) -> str:
        quoted = typed.replace("'", "\\'")
        plan = check(["mode=predict", f"checkpoint='{tmp_path / 'run'}'", f"input='{quoted}'", *settings], load)
        assert not plan.keeps
        record = new(plan.jobs[0], "test")
        predict.run(plan.jobs[0], record, None)
        assert record["predicted"]["inputs"] >= 1
        return capsys.readouterr().out

    alone = [used(word, "task.sampling.tokens=3") for word in words[:2]]
    (tmp_path / "texts.txt").write_text("".join(f"{word}\n" for word in words[:2]))
    assert used(str(tmp_path / "texts.txt"), "task.sampling.tokens=3") == "".join(alone)
    rows = [{"id": i, "prompt": word, "${x}": None} for i, word in enumerate(words[:70])]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "deep" / "out.txt"
    assert used(str(tmp_path / "rows.jsonl"), "task.sampling.tokens=3", f"output='{out}'") == ""
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [{key: row[key] for key in rows[0]} for row in written] == rows
    assert [" ".join(row["prediction"].split()) + "\n" for row in written[:2]] == alone
    assert json.loads(used(words[0], f"output='{tmp_path / 'one.jsonl'}'") or (tmp_path / "one.jsonl").read_text())
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": words[0], "prediction": "x"}))
    out.write_text("old")
    with pytest.raises(DataError, match="the input has a key 'prediction' already"):
        used(str(tmp_path / "rows.jsonl"), f"output='{out}'")
    assert out.read_text() == "old" and [path.name for path in out.parent.iterdir()] == ["out.txt"]
    with pytest.raises(DataError, match=r"the word '\$\{x\}'"):
        used("${x} 'quoted', {a}")
    with pytest.raises(ConfigError, match="mode=predict needs input="):
        check(["mode=predict", f"checkpoint='{tmp_path / 'run'}'"], load)


def test_a_run_is_used_elsewhere(start: Start, trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """A copy of the run continues texts without the corpus and without a cache, as mode=generate does."""
    copytree(trained[0], tmp_path / "run")
    model: Any = attnlab.load(tmp_path / "run", f"cache_dir='{tmp_path / 'empty'}'", "task.sampling.temperature=0")
    word = markov.Source().words[0]
    settings = (f"checkpoint='{trained[0]}'", f"prompt='{word}'", "task.sampling.temperature=0")
    record = recorded(generate, start("mode=generate", *settings), None)
    assert model.predict(word) == {"prediction": record["generation"]["text"]}
    assert model.predict([word, f"{word} {word}"], tokens=3)[0] == model.predict(word, tokens=3)
    ids = torch.tensor(model.module.vocabulary.ids(word))
    assert model.predict(ids) == model.predict(word)
    (tmp_path / "texts.jsonl").write_text(json.dumps({"n": 1, "text": word}) + "\n\n")
    assert model.predict(tmp_path / "texts.jsonl") == [{"n": 1, "text": word} | model.predict(word)]
    with pytest.raises(DataError, match="the word 'nonsense' is not in the vocabulary"):
        model.predict("nonsense")
    with pytest.raises(TypeError, match="no setting 'beam'; there are: seed, temperature, tokens"):
        model.predict(word, beam=3)
    with pytest.raises(TypeError, match="got 3, no text; expected a str, Path"):
        model.predict(3)
    with pytest.raises(DataError, match=r"task.sampling.tokens=8 make 25 positions, more than the model's"):
        model.predict(" ".join([word] * 16))
    last = attnlab.load(tmp_path / "run" / "checkpoints" / "last.ckpt")
    assert len(last.predict(word, tokens=3)["prediction"].split()) <= 3
    for name in ("averaged.safetensors", "last.ckpt"):
        path = tmp_path / "run" / "checkpoints" / name
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        with pytest.raises(DataError, match=f"{name}: damaged: .* SHA256SUMS"):
            attnlab.load(path)
    assert not (tmp_path / "empty").exists()


def test_a_vocabulary_of_another_run(
    start: Start, trained: tuple[Path, dict[str, Any]], pieces: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").mkdir()
    copy = tmp_path / "checkpoints" / "averaged.safetensors"
    copy.write_bytes((trained[0] / "checkpoints" / "averaged.safetensors").read_bytes())
    cfg, record = start("mode=generate", f"checkpoint='{tmp_path}'")
    with pytest.raises(DataError, match=r"vocabulary.json: no such file; expected the vocabulary"):
        generate.run(cfg, record, tmp_path)
    (tmp_path / "vocabulary.json").write_bytes((pieces[0] / "vocabulary.json").read_bytes())
    with pytest.raises(DataError, match="another vocabulary.*is damaged, or of another run: copy the whole directory"):
        generate.run(cfg, record, tmp_path)


# --- evaluation -------------------------------------------------------------------------------------------------


def test_a_trained_run_does_a_task_of_one_s_own(
    start: Start, pieces: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attnlab.modes import evaluate

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hub"))
    words = markov.Source().words
    rows = [{"question": f"{words[i]} {words[i + 1]}", "choices": words[i : i + 3], "answer": i % 3} for i in range(6)]
    (tmp_path / "rows.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.yaml").write_text(
        f"task: own\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: '{tmp_path / 'rows.json'}'}}}}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{question}}'\ndoc_to_choice: choices\n"
        "doc_to_target: answer\nmetric_list: [{metric: acc}, {metric: acc_norm}]\nmetadata: {version: 3}\n"
    )
    settings = [
        *PIECES,
        "mode=evaluate",
        f"checkpoint='{pieces[0]}'",
        f"task.evaluation.folder='{tmp_path}'",
        "+task.evaluation.batch_size=4",
    ]
    own = start(*settings, "task.evaluation.tasks=[own]", "task.evaluation.num_fewshot=[0,2]")
    record = recorded(evaluate, own, tmp_path)
    assert record["quality"]["num_fewshot"] == [0, 2]
    for scores in record["quality"]["shots"].values():
        assert (scores["own"]["examples"], scores["own"]["version"]) == (6, 3)
        assert scores["own"]["acc"] in [i / 6 for i in range(7)]
        assert {"acc_stderr", "acc_norm", "acc_norm_stderr"} <= scores["own"].keys()
    json.dumps(record)
    for setting, message in (
        ("num_fewshot=[0,0]", "each number once"), ("num_fewshot=[]", "expected int >= 0 or a list"),
        ("num_fewshot=[-1]", "expected int"), ("tasks=[owm]", "has no task owm"),
        ("tasks=[]", r"tasks=\[\]: expected a list, each str, not empty"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            evaluate.run(*start(*settings, f"task.evaluation.{setting}"), tmp_path)

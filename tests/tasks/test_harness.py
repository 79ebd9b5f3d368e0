"""lm-evaluation-harness: its numbers are those of a trained run or of a compressed model of transformers."""

import copy
import gzip
import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

import pytest
import torch
import yaml
from lm_eval.models.dummy import DummyLM

from attnlab.attention import MHA
from attnlab.compression import compress, densify, save
from attnlab.compression.methods.tensorllm import TensorLLM
from attnlab.config.build import CONF
from attnlab.config.check import compose
from attnlab.data.text.vocabulary import WordVocabulary
from attnlab.errors import ConfigError, DataError
from attnlab.models import T6
from attnlab.modes import evaluate
from attnlab.pretrained import huggingface
from attnlab.run.record import new
from attnlab.tasks.harness import LIGHTEVAL, TrainedRun, TransformersEvaluation
from attnlab.tasks.language_modelling.module import LanguageModelling
from attnlab.training.schedule import WarmupCosine
from tests.pretrained.tiny import tiny, words

WORDS = ["<eos>", "a", "b", "c", "d", "e", "<unk>"]
TEXTS = [("a b", " c"), ("", "a b"), ("e d c b a", " a b c"), ("c", " d")]


@pytest.fixture(scope="module")
def module() -> LanguageModelling:
    torch.manual_seed(0)
    model = T6(len(WORDS), 16, lambda _: MHA(16, 2), 2, max_length=8, output_init="default")
    return LanguageModelling(
        model,
        WordVocabulary(WORDS, "<eos>", "<unk>", "after"),
        optimizer=torch.optim.SGD,
        schedule=partial(WarmupCosine, warmup_steps=1),
        identity={},
        seed=1,
    ).eval()


def requests(*arguments: Any) -> list[Any]:
    return [SimpleNamespace(args=args) for args in arguments]


@torch.no_grad()
def logp(module: LanguageModelling, ids: list[int]) -> torch.Tensor:
    """Of each id after the first."""
    rows = module.model(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
    return rows.gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1)


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_log_likelihoods_of_continuations(module: LanguageModelling, batch: int) -> None:
    run = TrainedRun(module, batch)
    for (context, continuation), (value, greedy) in zip(
        TEXTS, run.loglikelihood(requests(*TEXTS), disable_tqdm=True), strict=True
    ):
        ids = module.vocabulary.ids(f"{context} {continuation}")
        count = len(module.vocabulary.ids(continuation))
        ids = [0, *ids] if not context else ids
        assert value == pytest.approx(float(logp(module, ids)[-count:].sum()), abs=1e-5)
        best = module.model(torch.tensor([ids[:-1]]))[0].argmax(-1)[-count:]
        assert greedy == (best.tolist() == ids[-count:])


def test_texts_longer_than_the_model(module: LanguageModelling) -> None:
    """Contexts lose their beginning; whole texts are predicted window by window, each token once."""
    run, long = TrainedRun(module, 2), [1, 2, 3, 4, 5] * 4
    text = " ".join(WORDS[i] for i in long)
    ((value, _),) = run.loglikelihood(requests((text[:-4], text[-4:])), disable_tqdm=True)
    assert value == pytest.approx(float(logp(module, long[-9:])[-2:].sum()), abs=1e-5)
    (total,) = run.loglikelihood_rolling(requests((text,)))
    parts = [logp(module, [0, *long[:8]]), logp(module, long[7:16]), logp(module, long[11:20])[-4:]]
    assert total == pytest.approx(sum(float(part.sum()) for part in parts), abs=1e-4)
    with pytest.raises(DataError, match="a continuation of 9 words is longer than the model's context"):
        run.loglikelihood(requests(("a", " a" * 9)), disable_tqdm=True)


def test_generation_stops_where_it_is_told(module: LanguageModelling) -> None:
    run = TrainedRun(module, 1)
    (text,) = run.generate_until(requests(("a b", {"until": [], "max_gen_toks": 5})))
    ids = [1, 2]
    for _ in range(5):
        ids.append(int(module.model(torch.tensor([ids]))[0, -1].argmax()))
        if ids[-1] == 0:
            break
    assert text == module.vocabulary.text([i for i in ids[2:] if i])
    word = text.split()[-1]
    (cut,) = run.generate_until(requests(("a b", {"until": [word], "max_gen_toks": 5})))
    assert cut == text[: text.index(word)]


# --- models of transformers ----------------------------------------------------------------------------------------

TASK = """
task: claims
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "the claim is"
doc_to_target: label
doc_to_choice: ["true", "false"]
metric_list: [{metric: acc}]
metadata: {version: 1}
"""


@torch.no_grad()
def test_log_likelihoods_are_those_of_the_compressed_model() -> None:
    model = tiny("llama")
    dense = copy.deepcopy(model)
    compress(model, TensorLLM(ranks=[10, 5]))
    evaluation = TransformersEvaluation(["claims"], batch_size=2)
    texts = [("the claim", " is true"), ("claim is", " false"), ("the", " claim")]
    values = []
    for scored in (model, densify(model, copy.deepcopy(dense)), dense):
        lm = evaluation.lm(SimpleNamespace(model=scored, tokenizer=words()), None)
        values.append([value for value, _ in lm.loglikelihood(requests(*texts), True)])
    assert values[0] == pytest.approx(values[1], abs=1e-4)
    assert abs(values[0][0] - values[2][0]) > 1e-3
    ids = [words()(context + text).input_ids for context, text in texts]
    for i, (row, count) in enumerate(zip(ids, (2, 1, 1), strict=True)):
        logp: Any = model(torch.tensor([row])).logits[0, :-1].double().log_softmax(-1)
        best = logp.gather(1, torch.tensor(row[1:])[:, None])[-count:].sum()
        assert values[0][i] == pytest.approx(float(best), abs=1e-4)


def test_a_masked_language_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="lm-evaluation-harness scores decoders; RobertaForMaskedLM is not one"):
        TransformersEvaluation(["claims"]).lm(SimpleNamespace(model=tiny("roberta"), tokenizer=words()), None)


def test_a_task_is_known_by_its_name_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness would read a file of that path, whose `!function` runs code."""
    monkeypatch.chdir(tmp_path)
    for name in ("claims.yaml", "cl*"):
        (tmp_path / name).write_text(TASK)
    for name in ("cl*", "claims.yaml", str(tmp_path / "claims.yaml")):
        with pytest.raises(ConfigError, match=f"task.evaluation.tasks: {re.escape(str(tmp_path))} has no task "):
            TransformersEvaluation([name], folder=str(tmp_path))(None, 0)


def test_a_task_whose_data_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "claims.yaml").write_text(TASK.replace("FILE", "/nope/missing.jsonl"))
    evaluation = TransformersEvaluation(["claims"], folder=str(tmp_path))
    monkeypatch.setattr(TransformersEvaluation, "lm", lambda *_: DummyLM())
    with pytest.raises(DataError, match=r"tasks=claims: a file of their data is missing \(.*/nope/missing\.jsonl"):
        evaluation(None, 0)


def test_mode_evaluate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compressed model of a run, on a task of one's own."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = tmp_path / "rows.json"
    rows.write_text("\n".join(f'{{"label": {i % 2}}}' for i in range(6)))
    (tmp_path / "claims.yaml").write_text(TASK.replace("FILE", rows.name))
    model = tiny("llama")
    compress(model, TensorLLM(ranks=[10, 5]))
    save(model, tmp_path / "compressed", "tiny", huggingface.options_of(model))
    words().save_pretrained(tmp_path / "compressed")
    settings = ["task=reasoning", "mode=evaluate", "hardware=cpu", f"checkpoint='{tmp_path / 'compressed'}'"]
    cfg = compose(*settings, f"task.evaluation.folder='{tmp_path}'", "task.evaluation.tasks=[claims]")
    record = new(cfg, "test")
    evaluate.run(cfg, record, tmp_path)
    scores = record["quality"]["tasks"]["claims"]
    assert scores["acc"] == 0.5 and scores["examples"] == 6
    assert record["parameters"]["total"] == sum(p.numel() for p in model.parameters())


def test_examples_are_evenly_spread_and_accuracies_averaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MMLU is in the order of its subjects: its first questions are of one."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(TransformersEvaluation, "lm", lambda *_: Affirmative())
    for name, labels in (("one", "0001"), ("two", "00001111"), ("three", "000000001111")):
        (tmp_path / f"{name}.json").write_text("\n".join(f'{{"label": {label}}}' for label in labels))
        (tmp_path / f"{name}.yaml").write_text(TASK.replace("FILE", f"{name}.json").replace("claims", name))
    names, groups = ["one", "two", "three"], [["one"], ["two", "three"]]
    scores = TransformersEvaluation(names, limit=4, folder=str(tmp_path), spread=True, mean=groups)(None, 0)[0]
    assert [scores[name]["acc"] for name in names] == [0.75, 0.5, 0.75]  # of indices 1, 4, 7, 10 of three
    mean, errors = scores["mean"], [scores[name]["acc_stderr"] for name in names]
    assert mean["accuracy"] == pytest.approx((0.75 + (0.5 + 0.75) / 2) / 2) and mean["examples"] == 12
    assert mean["accuracy_stderr"] == pytest.approx(
        sum((e * w) ** 2 for e, w in zip(errors, (2, 1, 1), strict=True)) ** 0.5 / 4
    )
    first = TransformersEvaluation(names, limit=4, folder=str(tmp_path))(None, 0)[0]
    assert [first[name]["acc"] for name in names] == [0.75, 1.0, 1.0] and "mean" not in first


@pytest.mark.parametrize("mean", [[["one"], ["other"]], [["one", "one"]], [["one"], ["one"]]])
def test_a_mean_of_other_tasks(mean: list[list[str]]) -> None:
    with pytest.raises(ValueError, match=r"mean: expected names of tasks, one, two, each once; not (one|other)"):
        TransformersEvaluation(["one", "two"], mean=mean)


class Affirmative(DummyLM):
    """Answers `true` to everything, and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, str]] = []

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        self.asked = [request.args for request in requests]
        return [(-float("true" not in answer), False) for _, answer in self.asked]


def test_forms_of_lighteval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The experiment's tasks, read from files in a folder without task files of its own."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    experiment = yaml.safe_load((CONF / "experiment" / "convert" / "evaluation.yaml").read_text())
    settings = experiment["task"]["evaluation"]
    row: dict[str, Any] = {
        "query": "What now?",
        "choices": ["true", "no"],
        "gold": 0,
        "subject": "high_art",
        "source": {},
    }
    row["source"] = {
        "question": "Why?",
        "choices": ["a", "b"],
        "sentence": "As _ ran.",
        "option1": "I",
        "option2": "he",
    }
    for name in settings["tasks"]:
        file = LIGHTEVAL / f"{name}.yaml"
        data = tmp_path / yaml.safe_load(file.read_text())["dataset_kwargs"]["data_files"]["test"]
        data.parent.mkdir(exist_ok=True)
        data.write_bytes((gzip.compress if data.suffix == ".gz" else bytes)(json.dumps(row).encode()))
    lm = Affirmative()
    monkeypatch.setattr(TransformersEvaluation, "lm", lambda *_: lm)
    evaluation = TransformersEvaluation(settings["tasks"], folder=str(tmp_path), mean=settings["mean"])
    scores = evaluation(None, 0)[0]
    assert set(settings["tasks"]) < set(scores) and scores["mean"]["examples"] == 7
    assert {name: scores[name]["version"] for name in settings["tasks"]} == dict.fromkeys(
        settings["tasks"], "lighteval"
    )
    assert lm.asked[:2] == [
        ("The following are questions about high art.\nQuestion: Why?\nAnswer:", f" {answer}") for answer in "ab"
    ]
    assert ("As ", "I ran.") in lm.asked and ("As ", "he ran.") in lm.asked
    assert ("What now? ", " true") in lm.asked and lm.asked.count(("What now?", " true")) == 4

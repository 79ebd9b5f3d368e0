"""Every mechanism in every sequence-to-text task: a learned batch and a decoded test set, at a tiny size."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from omegaconf import DictConfig

import attnlab
from attnlab.callbacks.scoring import contributions
from attnlab.config.build import freeze
from attnlab.config.check import check
from attnlab.data import AMI, SLURP, MustC
from attnlab.data.corpus import Segment
from attnlab.data.inputs import Item
from attnlab.data.sequence_to_text import SequenceToTextData
from attnlab.errors import ConfigError, DataError
from attnlab.modes import test, train
from attnlab.run.loading import load
from attnlab.run.record import new
from attnlab.tasks.base import task_of
from attnlab.tasks.sequence_to_text.module import SequenceToText
from attnlab.tasks.sequence_to_text.predict import TextPredictor
from attnlab.tasks.sequence_to_text.task import SequenceToTextTask
from attnlab.training import trainer
from tests.attention.mechanisms import NAMES, composed
from tests.data.conftest import write_corpus
from tests.data.layouts import audio, prompt, write
from tests.tasks.conftest import TINY, predictions, recorded

SENTENCES = ["one two", "three", "two one three", "one", "three two"]
HEADLINES = {
    "mustc": {"bleu"},
    "ami": {"wer", "insertions", "deletions", "substitutions"},
    "slurp": {"accuracy", "accuracy_constrained", "wer"},
    "xsum": {"rouge1", "rouge2", "rougeL"},
    "wmt16": {"bleu"},
}
OWN = {
    "mustc": [],
    "ami": [],
    "slurp": ["task.model.encoder.kernel=3", "task.data.vocab_size=40"],
    "xsum": ["task.data.features.max_tokens=3"],
    "wmt16": ["task.model.attention_in=both", "task.model.decoder.num_heads=2"],
}


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("grid")
    ami, slurp, xsum, wmt = (base / name for name in ("ami", "slurp", "xsum", "wmt16"))
    for split in ("train", "dev", "eval"):
        rows = [(f"{split}{i}", text) for i, text in enumerate(SENTENCES)]
        write(ami / split / "text", *(f"{id} {text.upper()}" for id, text in rows))
        write(ami / split / "wav.scp", *(f"{id} {split}/{id}.wav" for id, _ in rows))
        for id, text in rows:
            audio(ami / split / f"{id}.wav", 0.4 * len(text.split()))
    for split in ("train", "train_synthetic", "devel", "test"):
        lines = []
        for i, text in enumerate(SENTENCES if split != "train_synthetic" else []):
            file = audio(slurp / "audio" / "slurp_real" / f"audio-{split}{i}.flac", 0.4 * len(text.split()))
            lines.append(prompt(i, text, file.name, scenario="count", action=("up", "down")[i % 2]))
        write(slurp / "dataset" / "slurp" / f"{split}.jsonl", *lines)
    pairs = {xsum: ("validation", ("source", "target")), wmt: ("dev", ("en", "de"))}
    for folder, (dev, sides) in pairs.items():
        for split in ("train", dev, "test"):
            for side in sides:
                lines = [f"{s} and {s}" if side == "source" else s for s in SENTENCES]
                write(folder / f"{split}.{side}", *lines)
    return {"mustc": write_corpus(base / "mustc"), "ami": ami, "slurp": slurp, "xsum": xsum, "wmt16": wmt}


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("grid-cache")


def configured(task: str, name: str, root: Path, cache_dir: Path, *overrides: str) -> DictConfig:
    speech = task in ("mustc", "ami", "slurp")
    tiny = [x for x in TINY if speech or not any(key in x for key in ("conv_", "encoder.num_heads"))]
    tiny = [x for x in tiny if task != "wmt16" or "projector" not in x]
    tiny = [x for x in tiny if x != "hardware=cpu"]
    cfg = composed(
        "mha", f"task={task}", f"recipe={task}_sample", "hardware=cpu", *tiny, *OWN[task],
        f"data_root={root}", f"cache_dir={cache_dir}", "task.decode.beam=2",
        *overrides,
    )  # fmt: skip
    merged = ["attention.recent=1", "attention.first=0"] if name == "mtla_window" else []  # these texts are short
    cfg.attention = composed(name, *merged).attention  # its references are to the task beside it
    return freeze(cfg, {"task": task, "attention": name, "scale": "sample", "compress": "none"})


@pytest.mark.parametrize(
    ("task", "name"),
    [  # by default each mechanism in one task, and each task with several mechanisms
        pytest.param(task, name, marks=[] if i % len(HEADLINES) == j else pytest.mark.slow, id=f"{name}-{task}")
        for i, name in enumerate(NAMES)
        for j, task in enumerate(HEADLINES)
    ],
)
def test_learns_and_decodes(
    task: str, name: str, roots: dict[str, Path], cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    cfg = configured(task, name, roots[task], cache_dir)
    record = new(cfg, "test")
    chosen = task_of(cfg, SequenceToTextTask)
    chosen.check(tmp_path)
    data, module = chosen.prepare(record, None)
    assert isinstance(module, SequenceToText) and isinstance(data, SequenceToTextData)
    assert str(roots[task]) in record["corpus"]
    module.train()
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    monkeypatch.setattr(module, "log", lambda *args, **kwargs: None)  # there is no trainer
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    losses = []
    batch = next(iter(data.train_dataloader()))
    for _ in range(9):
        loss, _, right, count = module.losses(batch)
        assert 0 <= right <= count
        optimizer.zero_grad()
        (loss / count).backward()
        optimizer.step()
        losses.append(float(loss.detach() / count))
    assert losses[-1] < 0.6 * losses[0], losses  # between 0.28 and 0.52 when it learns the batch
    for weight, parameter in module.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), f"{weight} learns nothing"
    callbacks = chosen.scoring(tmp_path, data, module)
    assert trainer.test(cfg, data, module, callbacks)
    results = contributions(callbacks)
    assert HEADLINES[task] <= set(results["quality"]) and results["quality"]["sentences"] == 5
    assert next(iter(results["quality"])) in HEADLINES[task]
    assert results["kv_cache"]["bytes_measured"] == results["kv_cache"]["bytes_predicted"] > 0
    assert len((tmp_path / "predictions.tsv").read_text().splitlines()) == 6
    chosen.describe(record)
    assert record["parameters"]["total"] > record["parameters"]["attention"] > 0


def test_truncated_documents_are_counted_not_dropped(roots: dict[str, Path], cache_dir: Path) -> None:
    cfg = configured("xsum", "mha", roots["xsum"], cache_dir)
    record = new(cfg, "test")
    data, _ = task_of(cfg, SequenceToTextTask).prepare(record, None)
    assert record["data"]["train"]["noted"] == {"cut to 3 source pieces": {"count": 5, "example": ""}}
    assert sum(len(batch.utterances) for batch in data.train_dataloader()) == 5
    assert max(int(batch.feature_lengths.max()) for batch in data.train_dataloader()) == 3


@pytest.mark.parametrize("task", HEADLINES)
def test_a_whole_run_and_its_checkpoint(task: str, roots: dict[str, Path], cache_dir: Path, tmp_path: Path) -> None:
    """What a task's model ties, its checkpoints can hold: the averaged weights score as the run did."""
    cfg = configured(task, "mla", roots[task], cache_dir, "task.train.max_epochs=1")
    record = recorded(train, (cfg, new(cfg, "test")), tmp_path / "run")
    assert record["training"]["averaged_checkpoints"] == 1
    checkpoint = f"checkpoint='{tmp_path / 'run'}'"
    cfg = configured(task, "mla", roots[task], cache_dir, "task.train.max_epochs=1", checkpoint)
    again = recorded(test, (cfg, new(cfg, "test")), tmp_path / "again")
    assert again["quality"] == record["quality"]
    assert_used_elsewhere(task, tmp_path, roots[task])


@pytest.mark.parametrize("task", ["ami", "slurp"])  # without and with classes
def test_decoding_with_the_ctc_head(task: str, roots: dict[str, Path], cache_dir: Path, tmp_path: Path) -> None:
    joint = ["task.train.max_epochs=1", "task.data.ctc_vocab_size=shared", "task.decode.ctc_weight=0.3"]
    cfg = configured(task, "mtla", roots[task], cache_dir, *joint)
    record = recorded(train, (cfg, new(cfg, "test")), tmp_path / "run")
    checkpoint = f"checkpoint='{tmp_path / 'run'}'"
    cfg = configured(task, "mtla", roots[task], cache_dir, *joint, checkpoint)
    assert recorded(test, (cfg, new(cfg, "test")), tmp_path / "again")["quality"] == record["quality"]
    model = attnlab.load(tmp_path / "run")
    waveform = own_input(task, predictions(tmp_path / "run")[0], roots[task], tmp_path)
    assert all("prediction" in model.predict(waveform, ctc_weight=weight) for weight in (0.0, 0.3, 1.0))


@pytest.mark.parametrize("change", ["task.data.ctc_vocab_size=20", "task.train.ctc_weight=0"])
def test_a_ctc_head_with_other_labels_or_without_training_is_refused(
    change: str, roots: dict[str, Path], cache_dir: Path, tmp_path: Path
) -> None:
    """Before training, and of a run before its test and before a prediction."""
    message = r"task.decode.ctc_weight=0.3 .*task.data.ctc_vocab_size=shared"
    settings = ["task.data.ctc_vocab_size=shared", "task.train.max_epochs=1", change]
    with pytest.raises(ConfigError, match=message):
        check(["task=ami", *settings, "task.decode.ctc_weight=0.3"])
    cfg = configured("ami", "mla", roots["ami"], cache_dir, *settings)
    recorded(train, (cfg, new(cfg, "test")), tmp_path / "run")
    with pytest.raises(ConfigError, match=message):
        check(["mode=test", f"checkpoint='{tmp_path / 'run'}'", "task.decode.ctc_weight=0.3"], load)
    with pytest.raises(ConfigError, match=message):
        attnlab.load(tmp_path / "run").predictor(ctc_weight=0.3)


def assert_used_elsewhere(task: str, tmp_path: Path, root: Path) -> None:
    """The run, moved, without corpus and cache: inputs of its test set are decoded as the run decoded them."""
    (tmp_path / "run").rename(tmp_path / "moved")
    model: Any = attnlab.load(tmp_path / "moved", f"cache_dir='{tmp_path / 'empty'}'", "data_root=null")
    assert model.cfg.task.data.root is None and model.cfg.hardware.accelerator == "auto"
    count = sum(parameter.numel() for parameter in model.module.model.parameters())
    assert repr(model) == f"Trained(task={task}, attention={model.cfg.choices.attention}, parameters={count:,})"
    predictor = model.predictor()
    assert isinstance(predictor, TextPredictor)
    assert not predictor.search.unknown and predictor.search.beam == 2
    predictor.search = replace(predictor.search, unknown=True)  # as published scores allow it
    rows = predictions(tmp_path / "moved")
    inputs = [own_input(task, row, root, tmp_path) for row in rows]
    results = [result for _, result in predictor.results([Item(value) for value in inputs])]
    assert [result for _, result in predictor.results([Item(" "), Item(inputs[0])])][0] == {"prediction": ""}
    if task != "slurp":
        assert [" ".join(result["prediction"].split()) for result in results] == [row["hypothesis"] for row in rows]
    assert all(("intent" in result) == (task == "slurp") for result in results)
    assert all(result.get("intent", "count_up") in ("count_up", "count_down") for result in results)
    alone = model.predict(inputs[0], beam=1)
    assert alone == model.predict([inputs[1], inputs[0]], beam=1)[1]
    if task in ("mustc", "slurp"):
        samples, rate = soundfile.read(inputs[0], dtype="int16")
        channels = torch.from_numpy(samples / 2**15).expand(2, -1)
        for value in ((samples, rate), (channels, rate), {"array": samples, "sampling_rate": rate, "path": None}):
            assert model.predict(value, beam=1) == alone
        row = {"audio": (samples, rate), "n": 1}
        assert model.predict([row, (samples, rate, "label")], beam=1) == [row | alone, alone]
        with pytest.raises(DataError, match=r"^not a recording .*; expected a path, or \(samples, rate\)"):
            model.predict(channels)
    if task == "wmt16":  # the test set is scored with the run's own vocabulary, also that of another corpus
        where = [f"data_root='{root}'", f"cache_dir='{tmp_path / 'fresh'}'"]
        cfg = check(["mode=test", f"checkpoint='{tmp_path / 'moved'}'", *where], load).jobs[0]
        record = recorded(test, (cfg, new(cfg, "test")), tmp_path / "scored")
        assert record["quality"]["sentences"] == 5 and not (tmp_path / "fresh" / "tokenizers").exists()
        assert predictions(tmp_path / "scored") == rows
    assert "\u2047" not in alone["prediction"]  # how SentencePiece writes <unk>
    assert not (tmp_path / "empty").exists()


def own_input(task: str, row: dict[str, str], root: Path, tmp_path: Path) -> str:
    """The input of a row of predictions.tsv, as a person would give it."""
    if task in ("xsum", "wmt16"):
        return row["source"]
    reader = {"ami": AMI, "mustc": MustC, "slurp": SLURP}[task]()
    segment = next(x for x in reader.read(root, reader.splits[2], "audio", False) if x.id == row["id"])
    assert isinstance(segment, Segment)
    samples, rate = soundfile.read(segment.audio, segment.num_samples, segment.start, dtype="float32")
    soundfile.write(tmp_path / f"{row['id']}.wav", samples, rate, "FLOAT")
    return str(tmp_path / f"{row['id']}.wav")

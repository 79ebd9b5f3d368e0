"""The training mode from config to record, at a tiny size."""

import csv
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab.attention import MTLA
from attnlab.data.sequence_to_text import SequenceToTextData
from attnlab.decoding import BeamSearch
from attnlab.errors import ConfigError, DataError
from attnlab.modes import test, train
from attnlab.pretrained.weights import average, read_checkpoint, write_weights
from attnlab.run.job import FOREIGN
from attnlab.run.record import write
from attnlab.tasks.base import Trains, task_of
from attnlab.tasks.sequence_to_text.module import SequenceToText
from tests.command import weights
from tests.tasks.conftest import Start, make

Trained = tuple[Path, dict[str, Any]]
ONCE = ("task.train.max_epochs=1", "task.decode.beam=1")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, root: Path, cache: Path) -> Trained:
    """A run as a command leaves it, and its record."""
    directory = tmp_path_factory.mktemp("trained")
    cfg, record = make(root, cache)()
    record["environment"] |= {"device": "cpu", "threads": 1}
    train.run(cfg, record, directory)
    record["status"] = "finished"
    write(record, directory)
    return directory, record


def test_a_run_fills_its_record_and_its_directory(trained: Trained) -> None:
    directory, record = trained
    assert record["training"]["epochs"] == 3
    assert record["training"]["averaged_checkpoints"] == 3
    assert record["kv_cache"]["bytes_measured"] == record["kv_cache"]["bytes_predicted"] > 0
    assert 0 <= record["quality"]["bleu"] <= 100
    assert record["quality"]["sentences"] == 5
    assert "tst-COMMON 5 segments" in record["corpus"]
    with open(directory / "predictions.tsv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    assert {row["reference"] for row in rows} == {"sieben drei", "eins", "zwei eins", "drei", "sieben zwei eins"}
    best = list((directory / "checkpoints").glob("step*.ckpt"))
    for name, value in average(best).items():
        torch.testing.assert_close(weights(directory)[name], value)
    assert not list(directory.rglob("*.part"))


def test_scores_say_how_texts_were_split(trained: Trained) -> None:
    quality = trained[1]["quality"]
    assert list(quality)[0] == "bleu" and "tok:13a" in quality["signature"] and quality["tokenize"] == "13a"
    assert 0 <= quality["chrf"] <= 100 and quality["chrf_signature"].startswith("nrefs:1")


@pytest.mark.parametrize("mode", [train, test])
def test_a_missing_tokenizer_is_refused_before_data_is_read(
    mode: Any, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sacrebleu.tokenizers import tokenizer_ja_mecab

    monkeypatch.setattr(tokenizer_ja_mecab, "MeCab", None)
    monkeypatch.setattr(SequenceToTextData, "_read", lambda self: pytest.fail("read"))
    weights = [f"checkpoint='{trained[0]}'"] if mode is test else []
    for settings in (["task.score.tokenize=ja-mecab"], ["task.data.reader.target_language=ja"]):
        cfg, record = make(trained[0], tmp_path)(*settings, *weights)
        with pytest.raises(ConfigError, match="sacrebleu.ja."):
            mode.run(cfg, record, tmp_path)
    cfg, record = make(trained[0], tmp_path)("task.score.tokenize=unicode", *weights)
    with pytest.raises(ConfigError, match="task.score.tokenize=unicode: not of the metric bleu"):
        mode.run(cfg, record, tmp_path)


def test_a_mechanism_that_cannot_decode_is_refused_before_it_is_trained(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg, record = start()
    monkeypatch.setattr(MTLA, "extend", lambda self, x, cache: x)
    with pytest.raises(ConfigError, match="attention: MTLA: extend"):
        train.run(cfg, record, tmp_path)
    assert not list(tmp_path.glob("c*"))  # neither curves nor checkpoints


Steps = list[tuple[int, int, Any, float]]


def watched(
    start: Start, directory: Path, *settings: str, fails_at: tuple[int, int] | None = None
) -> tuple[Steps, dict[bool, set[int]], dict[str, Any]]:
    """Run the training: its steps, the beams of validation (False) and test (True), and the record.

    Args:
        fails_at: an epoch and a batch, at which it is interrupted.
    """
    steps: Steps = []
    beams: dict[bool, set[int]] = {True: set(), False: set()}
    training_step, decode = SequenceToText.training_step, SequenceToText.decode

    def watched_step(self: SequenceToText, batch: Any, batch_idx: int) -> Tensor:
        if fails_at == (self.current_epoch, batch_idx):
            raise KeyboardInterrupt
        loss = training_step(self, batch, batch_idx)
        steps.append((self.current_epoch, batch_idx, [x.id for x in batch.utterances], float(loss)))
        return loss

    def watched_decode(self: SequenceToText, batch: Any, search: BeamSearch, *rest: Any, **named: Any) -> Any:
        beams[self.trainer.testing].add(search.beam)
        return decode(self, batch, search, *rest, **named)

    cfg, record = start(*settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SequenceToText, "training_step", watched_step)
        patch.setattr(SequenceToText, "decode", watched_decode)
        with pytest.raises((KeyboardInterrupt, SystemExit)) if fails_at else nullcontext():
            train.run(cfg, record, directory)
    return steps, beams, record


def resumable(buckets: int) -> list[str]:
    frames = ["task.train.batch.bucket=250", f"task.train.batch.frames={250 * buckets}"]
    return [*frames, "task.model.decoder.dropout=0.3", "task.train.max_epochs=2"]


DECODED = [
    "task.train.validate_every=3", "task.train.validate_decode=3", "task.train.validate_score=wer",
    "task.train.monitor=val_wer", "task.train.keep_best=2", "task.train.validate_search.beam=1",
    "task.train.validate_search.max_len_b=9",
]  # fmt: skip


@pytest.fixture(scope="module")
def decoded(
    tmp_path_factory: pytest.TempPathFactory, root: Path, cache: Path
) -> tuple[Path, tuple[Steps, dict[bool, set[int]], dict[str, Any]]]:
    """A run that decodes in its validations, after every third update."""
    directory = tmp_path_factory.mktemp("decoded")
    return directory, watched(make(root, cache), directory, *resumable(1), *DECODED)


def test_validation_has_a_score_and_a_search_of_its_own(decoded: Any) -> None:
    directory, (_, beams, record) = decoded
    assert beams == {True: {2}, False: {1}}
    with open(directory / "curves" / "metrics.csv", encoding="utf-8", newline="") as file:
        scores = [float(row["val_wer"]) for row in csv.DictReader(file) if row["val_wer"]]
    assert record["training"]["best_val_wer"] == pytest.approx(min(scores), abs=1e-4)  # less is better
    assert record["quality"]["bleu"] >= 0 and "wer" not in record["quality"]
    about = record["training"]["decoded_validation"]
    assert (about["score"], about["search"]["beam"], about["search"]["max_len_b"]) == ("wer", 1, 9)


@pytest.mark.parametrize("buckets", [None, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_resuming_equals_not_stopping(start: Start, tmp_path: Path, decoded: Any, buckets: int | None) -> None:
    """From the end of an epoch, or, of the run that is validated after every third update, from its middle."""
    settings = resumable(buckets) if buckets else [*resumable(1), *DECODED]
    unbroken = tmp_path / "unbroken" if buckets else decoded[0]
    steps = watched(start, unbroken, *settings)[0] if buckets else decoded[1][0]
    parts = tmp_path / "parts"
    before = watched(start, parts, *settings, fails_at=(1, 1 if buckets else 2))[0]
    last = torch.load(parts / "checkpoints" / "last.ckpt", weights_only=True)
    done = last["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["completed"]
    assert done == len([epoch for epoch, *_ in steps if epoch < 1]) + (0 if buckets else 2)
    with warnings.catch_warnings(record=True) as warned:
        for message in FOREIGN:
            warnings.filterwarnings("ignore", message=message)
        after = watched(start, parts, *settings, f"resume='{parts}'")[0]
    assert not [warning for warning in warned if "resum" in str(warning.message)]
    assert before[:done] + after == steps  # what came after the last checkpoint is done again
    for key, value in weights(unbroken).items():
        assert torch.equal(weights(parts)[key], value), key
    names = [{p.name for p in (run / "checkpoints").glob("step*.ckpt")} for run in (unbroken, parts)]
    assert names[0] == names[1] and all(("val_wer" in name) == (not buckets) for name in names[0])


@pytest.mark.parametrize("limit", ["max_epochs=3", "max_steps=1"])
def test_a_limit_that_is_reached_is_refused(start: Start, trained: Trained, tmp_path: Path, limit: str) -> None:
    cfg, record = start(f"task.train.{limit}", f"resume='{trained[0]}'")
    with pytest.raises(ConfigError, match=rf"task.train.{limit}: .* has trained \d+ {limit[4:9]}.* already"):
        train.run(cfg, record, tmp_path / "less")
    assert not (tmp_path / "less").exists()


def test_gradients_are_per_token_of_the_whole_update(start: Start, tmp_path: Path) -> None:
    """One update of all batches accumulated equals one update of a single batch that holds them all."""
    after = {}
    for name, settings in {
        "accumulated": ["task.train.batch.frames=1250", "task.train.batch.bucket=250"],
        "together": ["task.train.batch.frames=100000"],
    }.items():
        cfg, record = start(
            *settings, *ONCE, "task.model.decoder.dropout=0", "task.model.encoder.dropout=0",
            "task.data.augment=null", "task.optimizer._target_=torch.optim.SGD", "~task.optimizer.betas",
        )  # fmt: skip
        train.run(cfg, record, tmp_path / name)
        after[name] = weights(tmp_path / name)
    for key, value in after["together"].items():
        torch.testing.assert_close(after["accumulated"][key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["attention=mha"], "another mechanism"),
        (["attention=mtla", "stride=3"], "another mechanism.*stride=2.*stride=3"),
        (["task.target=transcript"], "another vocabulary"),
        (["task.model.decoder.num_layers=2"], "another model"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(
    start: Start, tmp_path: Path, overrides: list[str], message: str, trained: Trained
) -> None:
    cfg, record = start("mode=test", f"checkpoint='{trained[0]}'", *overrides)
    with pytest.raises(DataError, match=message):
        test.run(cfg, record, tmp_path)


def test_a_checkpoint_that_is_cut_short_or_would_run_code_is_named(
    start: Start, trained: Trained, tmp_path: Path
) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    for name in ("averaged.safetensors", "last.ckpt"):
        content = (trained[0] / "checkpoints" / name).read_bytes()
        (tmp_path / name).write_bytes(content[: len(content) // 2])
    torch.save({"state_dict": Evil(), "identity": {}}, tmp_path / "evil.ckpt")
    for name in ("averaged.safetensors", "last.ckpt", "evil.ckpt"):
        cfg, record = start("mode=test", f"checkpoint='{tmp_path / name}'")
        with pytest.raises(DataError, match=rf"{name}: not a readable attnlab checkpoint"):
            test.run(cfg, record, tmp_path)
    assert not (tmp_path / "ran").exists()


CROSS = ["task.model.decoder._target_=attnlab.models.CrossDecoder", "+task.model.decoder.num_heads=2"]


@pytest.mark.parametrize("decoder", [pytest.param([], marks=pytest.mark.slow), CROSS], ids=["prefix", "cross"])
def test_translation_starts_from_a_recognition_encoder(start: Start, tmp_path: Path, decoder: list[str]) -> None:
    cfg, record = start("task.target=transcript", *ONCE, *decoder)
    train.run(cfg, record, tmp_path / "asr")
    assert record["quality"]["wer"] >= 0
    assert record["kv_cache"]["bytes_measured"] == record["kv_cache"]["bytes_predicted"] > 0
    encoder = f"task.encoder_checkpoint='{tmp_path / 'asr'}'"
    cfg, record = start(encoder)
    task = task_of(cfg, Trains)
    task.check(tmp_path / "st")
    data, module = task.prepare(record, None)
    task.before_fit(record, tmp_path / "st", data, module)
    values, asr = module.model.encoder.state_dict(), weights(tmp_path / "asr")
    assert values and all(torch.equal(value, asr[f"encoder.{key}"]) for key, value in values.items())
    for settings, message in (
        ([encoder, "task.model.encoder.ffn_dim=24"], r".*has shape \(16, 16\), this SpeechEncoder's is \(24, 16\); "),
        ([f"task.encoder_checkpoint='{tmp_path / 'none'}'"], ".*none: there is no such checkpoint file"),
    ):
        cfg, record = start(*settings)
        with pytest.raises(DataError, match=f"task.encoder_checkpoint: {message}"):
            train.run(cfg, record, tmp_path / "wider")
        assert not (tmp_path / "wider").exists()  # before any data is read


def test_weights_that_give_no_numbers_are_no_result(start: Start, tmp_path: Path, trained: Trained) -> None:
    values, identity = read_checkpoint(trained[0] / "checkpoints" / "averaged.safetensors")
    values["decoder.unembedding.weight"].fill_(torch.finfo(torch.float32).max)
    write_weights(tmp_path / "large.safetensors", values, identity)
    cfg, record = start("mode=test", f"checkpoint='{tmp_path / 'large.safetensors'}'")
    with pytest.raises(DataError, match="decoding produced no finished hypothesis"):
        test.run(cfg, record, tmp_path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task.train.monitor=val_bleu"], "monitor=val_bleu: expected val_loss or val_accuracy; "),
        (["task.train.monitor=val_wer", "task.train.validate_decode=2"], "expected val_loss or val_accuracy or val_b"),
        (["task.train.validate_score=intent"], "task.train.validate_score=intent: only with task.score=intent"),
        (["attention=multilinear", *CROSS], "task.attention_prefix=true: with task.model.decoder"),
        (["task.train.validate_decode=2", "hardware=fsdp"], "task.train.validate_decode=2: with hardware=fsdp"),
    ],
)
def test_what_no_training_can_have(start: Start, tmp_path: Path, overrides: list[str], message: str) -> None:
    cfg, record = start(*overrides)
    with pytest.raises(ConfigError, match=message):
        train.run(cfg, record, tmp_path)


def test_a_run_is_compared_with_its_baseline(start: Start, tmp_path: Path, trained: Trained) -> None:
    """Which is here the run itself, tested again."""
    cfg, record = start("mode=test", f"checkpoint='{trained[0]}'", f"baseline='{trained[0]}'")
    record["environment"] |= {"device": "cpu", "threads": 1}
    test.run(cfg, record, tmp_path)
    assert record["quality"] == trained[1]["quality"]
    speedup = record["inference"]["speedup"]
    seconds = [run["inference"]["seconds"] for run in (trained[1], record)]
    assert speedup["seconds"] == pytest.approx(seconds[0] / seconds[1], rel=1e-3)
    assert speedup["baseline"]["path"] == str(trained[0]) and speedup["cache_bytes"] == 1.0

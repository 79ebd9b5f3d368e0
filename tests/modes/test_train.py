"""The training mode from config to record, at a tiny size."""

import csv
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from attnlab.callbacks.summary import show
from attnlab.decoding import BeamSearch
from attnlab.errors import ConfigError, DataError, TrainingError
from attnlab.modes import test, train
from attnlab.run.job import FOREIGN
from attnlab.run.record import write
from attnlab.tasks.sequence_to_text.module import SequenceToText
from attnlab.training.checkpoints import average, read_checkpoint, write_weights
from tests.tasks.conftest import Start, make


def weights(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "checkpoints" / "averaged.safetensors")


@pytest.mark.parametrize("attention", ["mha", "mla", "mtla"])
def test_a_run_fills_its_record_and_its_directory(start: Start, tmp_path: Path, attention: str) -> None:
    cfg, record = start(f"attention={attention}")
    train.run(cfg, record, tmp_path)
    record["status"] = "finished"
    json.dumps(record)
    assert record["training"]["epochs"] == 3
    assert record["training"]["averaged_checkpoints"] == 3
    assert record["kv_cache"]["bytes_measured"] == record["kv_cache"]["bytes_predicted"] > 0
    assert 0 <= record["quality"]["bleu"] <= 100
    assert record["quality"]["sentences"] == 5
    assert "tst-COMMON 5 segments" in record["corpus"]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    with open(tmp_path / "predictions.tsv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    assert {row["reference"] for row in rows} == {"sieben drei", "eins", "zwei eins", "drei", "sieben zwei eins"}
    best = list((tmp_path / "checkpoints").glob("step*.ckpt"))
    for name, value in average(best).items():
        torch.testing.assert_close(weights(tmp_path)[name], value)


@pytest.mark.parametrize(
    ("buckets", "validate_every"), [(1, 1), *(pytest.param(n, None, marks=pytest.mark.slow) for n in (1, 2))]
)
def test_resuming_equals_not_stopping(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buckets: int, validate_every: int | None
) -> None:
    """From the end of an epoch, or (validate_every) from its middle."""
    settings = [
        f"task.train.batch.frames={250 * buckets}",
        "task.train.batch.bucket=250",
        "task.model.decoder.dropout=0.3",
    ]
    if validate_every:
        settings += [f"task.train.validate_every={validate_every}", "task.train.validate_decode=3"]
        settings += ["task.train.validate_score=wer", "task.train.monitor=val_wer", "task.train.keep_best=2"]
        settings += ["task.train.validate_search.beam=1", "task.train.validate_search.max_len_b=9"]
    seen: dict[str, list[Any]] = {"whole": [], "parts": []}
    name, fails_at = "whole", None
    step = SequenceToText.training_step

    def watched(self: SequenceToText, batch: Any, batch_idx: int) -> Tensor:
        if fails_at == (self.current_epoch, batch_idx):
            raise KeyboardInterrupt
        loss = step(self, batch, batch_idx)
        seen[name].append((self.current_epoch, batch_idx, batch.ids, float(loss)))
        return loss

    monkeypatch.setattr(SequenceToText, "training_step", watched)
    cfg, record = start(*settings)
    train.run(cfg, record, tmp_path / "whole")
    name, fails_at = "parts", (1, 1)
    cfg, record = start(*settings)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        train.run(cfg, record, tmp_path / "parts")
    fails_at = None
    last = torch.load(tmp_path / "parts" / "checkpoints" / "last.ckpt", weights_only=True)
    done = last["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["completed"]
    assert done == len([row for row in seen["whole"] if row[0] < 1]) + (1 if validate_every else 0)
    seen["parts"] = seen["parts"][:done]  # what came after the last checkpoint is done again
    cfg, record = start(*settings, f"resume='{tmp_path / 'parts'}'")
    with warnings.catch_warnings(record=True) as warned:
        for message in FOREIGN:
            warnings.filterwarnings("ignore", message=message)
        train.run(cfg, record, tmp_path / "parts")
    assert not [one for one in warned if "resum" in str(one.message)]
    assert seen["parts"] == seen["whole"]
    for key, value in weights(tmp_path / "whole").items():
        assert torch.equal(weights(tmp_path / "parts")[key], value), key
    names = [{p.name for p in (tmp_path / part / "checkpoints").glob("step*.ckpt")} for part in ("whole", "parts")]
    assert names[0] == names[1] and all(("val_wer" in name) == bool(validate_every) for name in names[0])


def test_gradients_are_per_token_of_the_whole_update(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One update of all batches accumulated equals one update of a single batch that holds them all."""
    found = {}
    for name, settings in {
        "accumulated": ["task.train.batch.frames=1250", "task.train.batch.bucket=250"],
        "together": ["task.train.batch.frames=100000"],
    }.items():
        cfg, record = start(
            *settings, "task.train.max_epochs=1", "task.model.decoder.dropout=0", "task.model.encoder.dropout=0",
            "task.data.augment=null", "task.optimizer._target_=torch.optim.SGD", "~task.optimizer.betas",
        )  # fmt: skip
        train.run(cfg, record, tmp_path / name)
        found[name] = weights(tmp_path / name)
    for key, value in found["together"].items():
        torch.testing.assert_close(found["accumulated"][key], value, rtol=1e-4, atol=1e-5)


def test_a_loss_that_is_not_a_number_stops_the_run(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = SequenceToText.losses

    def broken(self: SequenceToText, batch: Any) -> tuple[Tensor, ...]:
        loss, *rest = losses(self, batch)
        return loss * (float("nan") if self.training and self.current_epoch == 1 else 1), *rest

    monkeypatch.setattr(SequenceToText, "losses", broken)
    cfg, record = start()
    with pytest.raises(TrainingError, match=r"the loss became nan at update \d+, epoch 2, batch 1 \(first: ted_"):
        train.run(cfg, record, tmp_path)
    kept, _ = read_checkpoint(tmp_path / "checkpoints" / "last.ckpt")
    assert all(torch.isfinite(value).all() for value in kept.values())


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
    start: Start, tmp_path: Path, overrides: list[str], message: str, trained: Path
) -> None:
    cfg, record = start("mode=test", f"checkpoint='{trained}'", *overrides)
    with pytest.raises(DataError, match=message):
        test.run(cfg, record, tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, root: Path, cache: Path) -> Path:
    directory = tmp_path_factory.mktemp("trained")
    cfg, record = make(root, cache)("task.train.max_epochs=1")
    train.run(cfg, record, directory)
    return directory


def test_a_checkpoint_cut_short_is_named(start: Start, trained: Path, tmp_path: Path) -> None:
    for name in ("averaged.safetensors", "last.ckpt"):
        whole = (trained / "checkpoints" / name).read_bytes()
        part = tmp_path / name
        part.write_bytes(whole[: len(whole) // 2])
        cfg, record = start("mode=test", f"checkpoint='{part}'")
        with pytest.raises(DataError, match=rf"{name}: not a readable attnlab checkpoint"):
            test.run(cfg, record, tmp_path)


def test_a_checkpoint_that_would_run_code_is_refused(start: Start, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"state_dict": Evil(), "identity": {}}, tmp_path / "evil.ckpt")
    cfg, record = start("mode=test", f"checkpoint='{tmp_path / 'evil.ckpt'}'")
    with pytest.raises(DataError, match="not a readable attnlab checkpoint"):
        test.run(cfg, record, tmp_path)
    assert not (tmp_path / "ran").exists()


CROSS = ["task.model.decoder._target_=attnlab.models.CrossDecoder", "+task.model.decoder.num_heads=2"]


@pytest.mark.parametrize("decoder", [pytest.param([], marks=pytest.mark.slow), CROSS], ids=["prefix", "cross"])
def test_translation_starts_from_a_recognition_encoder(start: Start, tmp_path: Path, decoder: list[str]) -> None:
    cfg, record = start("task.target=transcript", "task.train.max_epochs=1", *decoder)
    train.run(cfg, record, tmp_path / "asr")
    assert record["quality"]["wer"] >= 0
    assert record["kv_cache"]["bytes_measured"] == record["kv_cache"]["bytes_predicted"] > 0
    cfg, record = start(f"task.encoder_checkpoint='{tmp_path / 'asr'}'", "task.train.max_epochs=1")
    before: dict[str, Tensor] = {}
    fit = train.L.Trainer.fit

    def look(self: Any, module: SequenceToText, **kwargs: Any) -> None:
        before.update({k: v.clone() for k, v in module.model.encoder.state_dict().items()})
        fit(self, module, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.L.Trainer, "fit", look)
        train.run(cfg, record, tmp_path / "st")
    asr = weights(tmp_path / "asr")
    assert before
    assert all(torch.equal(value, asr[f"encoder.{key}"]) for key, value in before.items())
    cfg, record = start(f"task.encoder_checkpoint='{tmp_path / 'asr'}'", "task.model.encoder.ffn_dim=24")
    with pytest.raises(
        DataError, match=r"task.encoder_checkpoint: .*has shape \(16, 16\), this SpeechEncoder's is \(24, 16\); "
    ):
        train.run(cfg, record, tmp_path / "wider")
    assert not (tmp_path / "wider").exists()  # before any data is read
    cfg, record = start(f"task.encoder_checkpoint='{tmp_path / 'none'}'")
    with pytest.raises(DataError, match=r"task.encoder_checkpoint: .*none: there is no such checkpoint file"):
        train.run(cfg, record, tmp_path / "wider")


def test_the_last_checkpoint_is_the_last(start: Start, tmp_path: Path) -> None:
    """Also where no validation was among the best (accuracy ties at this size)."""
    cfg, record = start("task.train.keep_best=1", "task.train.max_epochs=3", "task.optimizer.lr=1e-9")
    train.run(cfg, record, tmp_path)
    last = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert last["global_step"] == record["training"]["steps"]
    assert not list(tmp_path.rglob("*.part"))


def test_a_new_run_does_not_mix_with_an_old_one(start: Start, tmp_path: Path) -> None:
    cfg, record = start("task.train.max_epochs=1")
    train.run(cfg, record, tmp_path)
    with pytest.raises(DataError, match="an earlier run's; resume="):
        train.run(cfg, record, tmp_path)


def test_text_that_looks_like_markup_is_shown_as_it_is(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg, record = start("task.train.max_epochs=1")
    train.run(cfg, record, tmp_path)
    rows = "id\tsource\treference\thypothesis\na\tone [/b] [laughter]\teins\tzwei\n"
    (tmp_path / "predictions.tsv").write_text(rows)
    show({**record, "corpus": "at /a[/b]"}, tmp_path)
    assert "one [/b] [laughter]" in capsys.readouterr().out


def test_weights_that_give_no_numbers_are_no_result(start: Start, tmp_path: Path, trained: Path) -> None:
    values, identity = read_checkpoint(trained / "checkpoints" / "averaged.safetensors")
    values["decoder.unembedding.weight"].fill_(torch.finfo(torch.float32).max)
    write_weights(tmp_path / "large.safetensors", values, identity)
    cfg, record = start("mode=test", f"checkpoint='{tmp_path / 'large.safetensors'}'")
    with pytest.raises(DataError, match="decoding produced no finished hypothesis"):
        test.run(cfg, record, tmp_path)


def test_validation_has_a_score_and_a_search_of_its_own(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beams: dict[bool, set[int]] = {True: set(), False: set()}
    decode = SequenceToText.decode

    def watched(self: SequenceToText, batch: Any, search: BeamSearch, *rest: Any, **named: Any) -> Any:
        beams[self.trainer.testing].add(search.beam)
        return decode(self, batch, search, *rest, **named)

    monkeypatch.setattr(SequenceToText, "decode", watched)
    search = ["task.train.validate_search.beam=1", "task.train.validate_search.max_len_b=9"]
    own = ["task.train.validate_score=wer", *search]
    cfg, record = start("task.train.validate_decode=3", *own, "task.train.monitor=val_wer", "task.train.max_epochs=2")
    train.run(cfg, record, tmp_path)
    assert beams == {True: {5}, False: {1}}
    with open(tmp_path / "curves" / "metrics.csv", encoding="utf-8", newline="") as file:
        found = [float(row["val_wer"]) for row in csv.DictReader(file) if row["val_wer"]]
    assert record["training"]["best_val_wer"] == pytest.approx(min(found), abs=1e-4)  # less is better
    assert record["quality"]["bleu"] >= 0 and "wer" not in record["quality"]
    said = record["training"]["decoded_validation"]
    assert (said["score"], said["search"]["beam"], said["search"]["max_len_b"]) == ("wer", 1, 9)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["task.train.monitor=val_bleu"],
            "task.train.monitor=val_bleu: expected val_loss or val_accuracy; task.train.v",
        ),
        (
            ["task.train.monitor=val_wer", "task.train.validate_decode=2"],
            "expected val_loss or val_accuracy or val_bleu",
        ),
        (["task.train.validate_score=intent"], "task.train.validate_score=intent: only with task.score=intent"),
        (["attention=multilinear", *CROSS], "task.attention_prefix=true: with task.model.decoder"),
        (
            ["task.train.validate_decode=2", "hardware=fsdp"],
            "task.train.validate_decode=2: with hardware=fsdp no process",
        ),
    ],
)
def test_what_no_training_can_have(start: Start, tmp_path: Path, overrides: list[str], message: str) -> None:
    cfg, record = start(*overrides)
    with pytest.raises(ConfigError, match=message):
        train.run(cfg, record, tmp_path)


def test_a_run_is_compared_with_its_baseline(start: Start, tmp_path: Path, trained: Path) -> None:
    checkpoint = f"checkpoint='{trained}'"
    records = {}
    for name, baseline in (("first", []), ("second", [f"baseline='{tmp_path / 'first'}'"])):
        (tmp_path / name).mkdir()
        cfg, record = start("mode=test", checkpoint, *baseline)
        record["environment"] |= {"device": "cpu", "threads": 1}
        test.run(cfg, record, tmp_path / name)
        records[name] = record | {"status": "finished"}
        write(records[name], tmp_path / name)
    found = records["second"]["inference"]["speedup"]
    seconds = [records[name]["inference"]["seconds"] for name in ("first", "second")]
    assert found["seconds"] == pytest.approx(seconds[0] / seconds[1], rel=1e-3)
    assert found["baseline"]["path"] == str(tmp_path / "first") and found["cache_bytes"] == 1.0
    cfg, record = start("mode=test", checkpoint, f"baseline='{tmp_path / 'first'}'", "task.decode.beam=2")
    record["environment"] |= {"device": "cpu", "threads": 1}
    with pytest.raises(DataError, match="baseline: inference.beam differs.*this run has 2, the baseline 5"):
        test.run(cfg, record, tmp_path)
    assert not (tmp_path / "predictions.tsv").exists()

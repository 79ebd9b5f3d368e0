"""Loggers beside the record, read back with their own libraries."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from attnlab.errors import ConfigError
from attnlab.modes import train
from attnlab.training.trainer import close_loggers
from tests.tasks.conftest import Start


def test_tensorboard_has_curves_configuration_and_scores(start: Start, tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    cfg, record = start("logger=tensorboard", "task.train.max_epochs=1", "task.train.log_every=1")
    train.run(cfg, record, tmp_path)
    close_loggers(cfg, record, tmp_path)
    logged = events.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    tags = logged.Tags()
    assert {"loss", "val_accuracy", "final/quality/bleu", "final/parameters/total"} <= set(tags["scalars"])
    assert logged.Scalars("final/parameters/total")[0].value == record["parameters"]["total"]
    assert "task.optimizer.lr" in (tmp_path / "tensorboard" / "hparams.yaml").read_text()
    assert (tmp_path / "curves" / "metrics.csv").is_file()


@pytest.mark.slow
def test_wandb_offline(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    cfg, record = start(
        "logger=[wandb,csv]", "logger.wandb.offline=true", "task.train.max_epochs=1", "task.train.log_every=1"
    )
    train.run(cfg, record, tmp_path)
    close_loggers(cfg, record, tmp_path)
    wandb.teardown()  # at the end of a process: waits for what is still to be written
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    log = next(folder.glob("*.wandb")).read_bytes()  # of protocol buffers
    assert all(key in log for key in (b"loss", b"val_accuracy", b"final/quality/bleu", b"final/parameters/total"))


@pytest.mark.slow
def test_mlflow_has_curves_configuration_and_scores(start: Start, tmp_path: Path) -> None:
    tracking: Any = pytest.importorskip("mlflow.tracking")
    cfg, record = start("logger=mlflow", "task.train.max_epochs=1", "task.train.log_every=1")
    train.run(cfg, record, tmp_path)
    close_loggers(cfg, record, tmp_path)
    client = tracking.MlflowClient((tmp_path / "mlflow").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("attnlab").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["task.optimizer.lr"] == str(cfg.task.optimizer.lr)
    assert {"loss", "val_accuracy", "final/quality/bleu"} <= set(run.data.metrics)
    assert run.data.metrics["final/parameters/total"] == record["parameters"]["total"]


def test_a_service_that_refuses_is_one_line_before_the_data(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")

    def refuse(**settings: object) -> None:
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", refuse)
    cfg, record = start("logger=wandb")
    with pytest.raises(ConfigError, match=r"logger=wandb: UsageError: No API key.*logger.wandb.offline=true"):
        train.run(cfg, record, tmp_path)
    assert record["corpus"] == "not run"


def test_a_service_that_fails_at_the_end_fails_no_run(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("tensorboard")
    loggers = importlib.import_module("lightning.pytorch.loggers")

    def fail(*_: object, **__: object) -> None:
        raise OSError("the network is gone")

    monkeypatch.setattr(loggers.TensorBoardLogger, "log_metrics", fail)
    cfg, record = start("logger=tensorboard")
    close_loggers(cfg, record, tmp_path)
    assert "logger=tensorboard: the final numbers were not logged" in caplog.text
    assert "the network is gone" in caplog.text

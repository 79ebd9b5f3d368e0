"""Every file of a run is on the list of files that runs write, so that its directory can be reused or removed."""

import os
from pathlib import Path

import pytest

from attnlab.config.check import check
from attnlab.run import job
from attnlab.run.directory import foreign, is_run
from attnlab.run.loading import load
from tests.conversion.test_runs import QUICK, SIZES, written
from tests.conversion.test_runs import TINY as DECODER
from tests.data.conftest import write_corpus
from tests.run.test_processes import write_texts
from tests.tasks.conftest import TINY as SPEECH
from tests.tasks.image_classification.test_task import TINY as IMAGES
from tests.tasks.language_modelling.test_task import TINY as TEXT


def ran(directory: Path, *settings: str) -> Path:
    """The directory of a run that has finished, with nothing in it that is not on the list."""
    directory.mkdir()
    (directory / "run.log").touch()  # Hydra's
    cfg = check([f"cache_dir='{directory.parent / 'cache'}'", *settings], load).jobs[0]
    assert job.run(cfg, "c", directory) == 0
    assert is_run(directory) and foreign(directory) == []
    return directory


def exported(run: Path) -> None:
    before = set(os.listdir(run))
    cfg = check(["mode=export", f"checkpoint='{run}'", "hardware=cpu"], load).jobs[0]
    assert job.run(cfg, "c", None) == 0
    assert set(os.listdir(run)) == before | {"exported"} and foreign(run) == []


@pytest.mark.slow
def test_a_training_of_text(tmp_path: Path) -> None:
    run = ran(tmp_path / "run", "task=wikitext2", f"data_root='{write_texts(tmp_path)}'", *TEXT)
    exported(run)
    assert (run / "vocabulary.json").is_file()


@pytest.mark.slow
def test_a_compression_of_images(tmp_path: Path) -> None:
    more = ["compress=truncatt", "rank=4", "logger=tensorboard", "trainer.profiler=simple", "task.train.max_epochs=1"]
    run = ran(tmp_path / "run", *IMAGES, *more)
    exported(run)
    again = check([f"resume='{run}'", "task.train.max_epochs=2"], load).jobs[0]
    assert job.run(again, "c", run) == 0 and foreign(run) == []
    tops = {"compressed", "pretraining", "tensorboard", "curves-2", "fit-profile.txt", "classes.json"}
    assert tops <= set(os.listdir(run))


@pytest.mark.slow
@pytest.mark.parametrize("profiler", ["advanced", "pytorch"])
def test_a_training_of_speech(profiler: str, tmp_path: Path) -> None:
    corpus = f"data_root='{write_corpus(tmp_path / 'corpus')}'"
    run = ran(tmp_path / "run", corpus, *SPEECH, f"trainer.profiler={profiler}")
    ran(tmp_path / "test", "mode=test", f"checkpoint='{run}'", "hardware=cpu")
    ran(tmp_path / "statistics", "mode=statistics", corpus)
    assert {"tokenizer.model", "ctc_tokenizer.model"} <= set(os.listdir(run))


@pytest.mark.parametrize("mode", [pytest.param("train", marks=pytest.mark.slow), "convert"])
def test_a_conversion(mode: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    model = f"model='{written(tmp_path / 'model', SIZES)}'"
    corpus = f"data_root='{write_texts(tmp_path)}'"
    run = ran(tmp_path / "run", *DECODER, *QUICK, model, corpus, "convert=mla", f"mode={mode}")
    assert (run / "conversion.json").is_file()

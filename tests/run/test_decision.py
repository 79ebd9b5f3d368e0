"""What a job of a multirun does, by the records that are there."""

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from attnlab.config.check import compose
from attnlab.run import decision
from attnlab.run import record as records
from attnlab.run.decision import claimed, decide, free, left_to, settings
from attnlab.run.directory import is_run
from attnlab.run.identity import NOTHING_READ
from attnlab.run.lock import locked


@pytest.fixture(scope="module")
def cfg() -> DictConfig:
    return compose("task=wikitext2", "attention=mtla", "stride=2", "hardware=cpu")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(decision, "_commit_now", lambda: "new" * 10)
    decision._content.cache_clear()
    return tmp_path


def changed(cfg: DictConfig, **values: Any) -> DictConfig:
    plain = OmegaConf.to_container(cfg)
    assert isinstance(plain, dict)
    for key, value in values.items():
        section, _, last = key.rpartition("__")
        (plain[section] if section else plain)[last] = value
    return OmegaConf.create(plain)


def ran(cfg: DictConfig, directory: str, status: str = "finished", checkpoint: bool = False, **values: Any) -> Path:
    record = records.new(cfg, "command")
    record["environment"] |= {"device": "cpu", "threads": 1, "git": "new" * 10}
    records.identify(record, values.pop("content", "sha256:sample"))
    record |= {"status": status, "corpus": "sample"}
    record |= {"error": "no luck"} if status in ("failed", "interrupted") else {}
    place = Path("outputs") / directory
    place.mkdir(parents=True)
    records.write(record | values, place)
    OmegaConf.save(cfg, place / "config.yaml")
    if checkpoint:
        (place / "checkpoints").mkdir()
        (place / "checkpoints" / "last.ckpt").touch()
    return place


def test_what_a_run_leaves_is_known_as_its_own(cfg: DictConfig) -> None:
    """By `attnlab runs prune`."""
    place = ran(cfg, "a")
    assert is_run(place)
    (place / "record.json").write_text("{")
    assert not is_run(place)
    (place / "run.log").touch()
    assert is_run(place)
    (place / "config.yaml").write_text("task: x\nmode: y\n")
    assert not is_run(place)


SWEEP = Path("outputs/multirun/new")
OWN = SWEEP / "3_job"


def test_a_job_that_nobody_has_done_starts(cfg: DictConfig) -> None:
    ran(changed(cfg, seed=2), "other_seed")
    ran(changed(cfg, mode="describe"), "other_mode")
    ran(changed(cfg, attention__stride=3), "other_recipe")
    found = decide(cfg, OWN, SWEEP)
    assert (found.what, found.directory) == ("start", OWN)


def test_a_finished_job_is_skipped_and_another_commit_is_said(cfg: DictConfig) -> None:
    done = ran(cfg, "sweep/1_job")
    ran(changed(cfg, cache_dir="/elsewhere", tags=["b"]), "failed", status="failed")
    found = decide(changed(cfg, hardware__devices=1, tags=["c"]), OWN, SWEEP)
    assert (found.what, found.directory) == ("skip", done)
    assert found.said == f"finished before, skipped: {done}"
    record = json.loads((done / "record.json").read_text())
    record["environment"]["git"] = "0123456789abcdef-dirty"
    records.write(record, done)
    assert decide(cfg, OWN, SWEEP).said.endswith(
        "(made by commit 0123456789-dirty, this is newnewnewn; rerun=true repeats it)"
    )
    assert decide(changed(cfg, rerun=True), OWN, SWEEP).what == "start"


def test_an_interrupted_job_continues_where_it_has_a_checkpoint(cfg: DictConfig) -> None:
    ran(cfg, "none_yet", status="interrupted")
    assert decide(cfg, OWN, SWEEP).said == f"interrupted before it saved a checkpoint, starts again: {OWN}"
    begun = ran(cfg, "begun", status="running", checkpoint=True)  # killed: nobody holds it
    found = decide(cfg, OWN, SWEEP)
    assert (found.what, found.directory) == ("continue", begun)
    assert found.said == f"interrupted before, continues from its checkpoint: {begun}"


def test_a_live_run_is_left_alone(cfg: DictConfig) -> None:
    live = ran(cfg, "live", status="running", checkpoint=True)
    with locked(live):
        found = decide(cfg, OWN, SWEEP)
    assert (found.what, found.directory) == ("leave", live)
    assert found.said.startswith("in progress elsewhere (process ")


def test_a_job_that_is_taken_is_skipped_once_it_has_finished(
    cfg: DictConfig, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(decision.log, "warning", lambda text, *about: warnings.append(text % about))
    with claimed(cfg, SWEEP) as nobody, claimed(cfg, SWEEP) as other, claimed(changed(cfg, seed=2), SWEEP) as seed:
        assert nobody is None and seed is None and other is not None
        with claimed(changed(cfg, rerun=True), SWEEP) as again:
            assert again is None
        ran(cfg, "other_corpus", content="sha256:other", corpus="elsewhere")
        found = decide(cfg, OWN, SWEEP, other)
        assert found.what == "leave" and left_to(found.left, SWEEP) is None
        ran(cfg, "done")
        assert decide(cfg, OWN, SWEEP, other).what == "skip"
        assert left_to(found.left, SWEEP) == Path("outputs/done")
    (here / "outputs" / ".jobs").rmdir()
    (here / "outputs" / ".jobs").touch()
    with claimed(cfg, SWEEP) as nobody:
        assert nobody is None and "no job can be taken there" in warnings[0]


def test_a_failed_job_is_tried_again_unless_retry_is_false(cfg: DictConfig) -> None:
    failed = ran(cfg, "failed", status="failed", error="no\nluck")
    found = decide(cfg, OWN, SWEEP)
    assert (found.what, found.said) == ("start", f"failed before (no luck), starts again: {OWN}")
    found = decide(changed(cfg, retry=False), OWN, SWEEP)
    assert (found.what, found.directory) == ("skip", failed)
    assert found.said == f"failed before (no luck), left (retry=false): {failed}"
    begun = ran(cfg, "later", status="failed", checkpoint=True)
    found = decide(cfg, OWN, SWEEP)
    assert (found.what, found.directory) == ("continue", begun)
    ran(cfg, "at_last")
    assert decide(changed(cfg, retry=False), OWN, SWEEP).what == "skip"


def test_a_corpus_that_changed_at_its_place_is_another(cfg: DictConfig, here: Path) -> None:
    corpus = here / "corpus"
    corpus.mkdir()
    (corpus / "train.txt").write_text("one two three")
    mine = changed(cfg, data_root=str(corpus), cache_dir=str(here / "cache"))
    content = decision.fingerprint.corpus(corpus, here / "cache")
    done = ran(mine, "done", content=content, corpus=f"WikiText-2 at {corpus}: ...")
    assert decide(mine, OWN, SWEEP).directory == done
    assert decide(cfg, OWN, SWEEP).what == "start"  # of the sample corpus
    moved = corpus.rename(here / "moved")
    assert decide(changed(mine, data_root=str(moved)), OWN, SWEEP).directory == done
    (moved / "train.txt").write_text("one two four!")
    decision._content.cache_clear()
    assert decide(changed(mine, data_root=str(moved)), OWN, SWEEP).what == "start"
    assert decide(changed(mine, data_root=str(here / "nowhere")), OWN, SWEEP).what == "start"  # it will say so itself


def test_modes(cfg: DictConfig) -> None:
    described = changed(cfg, mode="describe")
    done = ran(described, "described", content=NOTHING_READ, corpus="none")
    assert decide(described, OWN, SWEEP).directory == done
    asked = changed(cfg, mode="generate", checkpoint=None, prompt="a")
    ran(asked, "asked")
    assert decide(asked, OWN, SWEEP).what == "start"  # its result is what it prints


def test_a_measurement_of_another_machine_is_another(cfg: DictConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = changed(cfg, mode="bench")
    done = ran(bench, "bench", content=NOTHING_READ, corpus="none")
    monkeypatch.setattr(decision, "_machine", lambda accelerator: ("cpu", 1))
    assert decide(bench, OWN, SWEEP).directory == done
    monkeypatch.setattr(decision, "_machine", lambda accelerator: ("cpu", 2))
    assert decide(bench, OWN, SWEEP).what == "start"


def test_runs_of_a_sweep_outside_outputs_are_found(cfg: DictConfig, here: Path) -> None:
    sweep = here / "mine"
    done = ran(cfg, "../mine/0_job")
    assert decide(cfg, sweep / "0_job", sweep).directory.resolve() == done.resolve()
    again = decide(changed(cfg, rerun=True), sweep / "0_job", sweep)
    assert again.directory == sweep / "0_job_2"  # the first run stays
    assert free(sweep / "1_job") == sweep / "1_job"


def test_the_settings_that_go_with_resume(cfg: DictConfig) -> None:
    given = ["--config-dir=/mine", "task=wikitext2", "stride=2", "mode=train", "hardware=cpu", "~logger", "retry=true"]
    given += ["task.data.num_workers=${seed}", "trainer.limit_val_batches=3", "task.train.max_steps=5", "tags=[a]"]
    kept = ["--config-dir=/mine", "hardware=cpu", "task.data.num_workers=0", "trainer.limit_val_batches=3", "tags=[a]"]
    assert settings(changed(cfg, task__data=OmegaConf.create({"num_workers": 0})), given) == kept

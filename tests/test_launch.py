"""attnlab.train and attnlab.sweep: the command line in Python."""

import builtins
import gc
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import attnlab
from attnlab.errors import ConfigError, DataError

TINY = ["task=wikitext2", "mode=describe", "hardware=cpu"]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ATTNLAB_STAMP")
    monkeypatch.setenv("PYTHONPATH", str(Path(attnlab.__file__).parents[1]))


def state() -> list[Any]:
    """The settings of this process that a run of the command changes."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    loggers = logging.raiseExceptions, logging.root.level, list(logging.root.handlers)
    return [handlers, loggers, gc.isenabled(), Path.cwd(), dict(os.environ)]


def test_a_run_leaves_this_process_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    before = state()
    run = attnlab.train(*TINY, "attention=mha")
    assert state() == before
    assert '"status": "finished"' in capsys.readouterr().out  # as in a notebook
    assert repr(run) == f"Run({run.directory.relative_to(Path.cwd())}, finished)"
    assert run.record["attention"] == "mha" and run.record["command"].startswith("python -m attnlab task=wikitext2")


def test_errors_are_raised() -> None:
    with pytest.raises(ConfigError, match="nearest: wikitext2"):
        attnlab.train("task=wikitxt2")
    with pytest.raises(ConfigError, match=r"call attnlab\.sweep"):
        attnlab.train("-m", *TINY)
    with pytest.raises(ConfigError, match="several values need -m"):
        attnlab.train(*TINY, "attention=mha,mtla")
    Path("used").mkdir()
    Path("used", "mine.txt").touch()
    with pytest.raises(ConfigError, match=r"^hydra\.run\.dir=.*it holds mine\.txt"):  # of the run's process
        attnlab.train(*TINY, "hydra.run.dir=used")
    with pytest.raises(DataError, match="no record"):
        _ = attnlab.Run(Path("used")).record


@pytest.mark.slow
def test_a_sweep_returns_its_runs_in_order() -> None:
    runs = attnlab.sweep(*TINY, "attention=mtla,mha")
    assert [(run.status, run.record["attention"]) for run in runs] == [("finished", "mtla"), ("finished", "mha")]


@pytest.mark.slow
def test_an_interrupt_reaches_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the button of a notebook does: it arrives while a line is printed."""

    def interrupt(*values: Any, **options: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(builtins, "print", interrupt)
    with pytest.raises(KeyboardInterrupt):
        attnlab.train("task=wikitext2", "hardware=cpu", f"hydra.run.dir={Path.cwd()}/run", f"cache_dir={Path.cwd()}")
    assert attnlab.Run(Path("run").absolute()).status in ("interrupted", "no record")

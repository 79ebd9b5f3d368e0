import copy
import json
import shlex
from collections.abc import Callable
from functools import cache, reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from attnlab.config.build import CONF
from attnlab.config.check import compose
from attnlab.report import figure
from attnlab.report.match import composed
from attnlab.run import record as records
from attnlab.run.store import collect

MUSTC = "MuST-C en-de at /some/where: train 229703, dev 1423, tst-COMMON 2641 segments"
Run = Callable[..., Path]


def finished(cfg: DictConfig, arguments: list[str]) -> dict[str, Any]:
    record = copy.deepcopy(records.new(cfg, " ".join(arguments)))
    record |= {"status": "finished", "corpus": MUSTC, "quality": {"bleu": 20.0}}
    record["environment"] |= {"device": "cpu", "threads": 2, "git": "abc"}
    records.identify(record, "the corpus")
    record["inference"] |= {"batch": 8, "beam": 50, "dtype": "float32", "protocol": "search", "seconds": 100.0}
    return record


@cache
def every() -> dict[Path, dict[str, Any]]:
    """The committed records, which may be lines of packed files."""
    return {saved.path: saved.record for saved in collect([CONF.parent / "experiments"])}


def committed(file: str) -> dict[str, Any]:
    return copy.deepcopy(every()[CONF.parent / "experiments" / file])


def set_values(record: dict[str, Any], values: dict[str, Any]) -> None:
    """Replace values of a record; `__` in a key stands for a dot."""
    for key, value in values.items():
        *sections, last = key.split("__")
        reduce(getitem, sections, record)[last] = value


@pytest.fixture(scope="session")
def template() -> dict[str, Any]:
    """A finished record of task=mustc attention=mha, for tests that copy it: composing takes half a second."""
    arguments = ["task=mustc", "attention=mha"]
    return finished(compose(*arguments), arguments)


@pytest.fixture
def unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are drawn and their data written; only matplotlib's rendering to pixels is left out."""
    monkeypatch.setattr(figure, "png", lambda *_: b"")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Writes a finished run directory of a table's row (its overrides) below tmp_path/runs; returns the record's path.

    `overrides`: of the command line; everything else replaces values in the record, `__` standing for a dot.
    """

    def make(name: str, row: str, *overrides: str, **values: Any) -> Path:
        pretrained = ["task.encoder_checkpoint=asr"] if "mustc" in row else []
        arguments = [*shlex.split(row), *pretrained, *overrides]
        cfg = composed(*arguments)
        record = finished(cfg, arguments)
        set_values(record, values)
        directory = tmp_path / "runs" / name
        directory.mkdir(parents=True)
        OmegaConf.save(cfg, directory / "config.yaml")
        (directory / "record.json").write_text(json.dumps(record))
        return directory / "record.json"

    return make

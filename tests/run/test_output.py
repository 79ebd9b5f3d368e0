"""Standard output that is closed or full ends the printing, never the run."""

import errno
import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from attnlab.config.check import compose
from attnlab.run import job
from attnlab.run import record as records
from tests.command import environment
from tests.data.conftest import write_corpus
from tests.golden.runs import LANGUAGE, corpus


class Broken(io.StringIO):
    """Standard output that fails with `number`; None: it works. Notes the status of the record when it is used."""

    def __init__(self, number: int | None, directory: Path) -> None:
        super().__init__()
        self.number, self.directory, self.statuses = number, directory, set[str]()

    def write(self, text: str) -> int:
        self.statuses.add(records.read(self.directory)["status"])
        if self.number is not None:
            raise OSError(self.number, "fails")
        return super().write(text)


@pytest.mark.parametrize("number", [None, errno.EPIPE, errno.EIO, errno.ENOSPC])
def test_the_finished_record_is_written_before_anything_is_printed(
    number: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    cfg = compose("task=mustc", "mode=statistics", f"data_root='{write_corpus(tmp_path / 'corpus')}'", "hardware=cpu")
    monkeypatch.setattr(sys, "stdout", output := Broken(number, run))
    assert job.run(cfg, "a command", run) == 0
    assert output.statuses == {"finished"} == {records.read(run)["status"]}
    assert ("segments" in output.getvalue()) == (number is None)


def shell(text: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command line of bash, in which "$@" is the command."""
    command = ["bash", "-c", text, "bash", sys.executable, "-m", "attnlab", *words]
    return subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=600)


def test_a_reader_who_has_enough_ends_the_listing_quietly(tmp_path: Path) -> None:
    done = shell('"$@" | true; exit ${PIPESTATUS[0]}', "list", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
    assert shell('"$@" >/dev/full', "list", cwd=tmp_path).stderr == "error: standard output: No space left on device\n"


CLOSED = {
    '"$@" | true; exit ${PIPESTATUS[0]}': 128 + signal.SIGPIPE,
    '"$@" >&-': 0,
    '"$@" 2>&-': 0,
    '"$@" <&- >&- 2>&-': 0,
    '"$@" >/dev/full': 1,
    '"$@" 2>/dev/full': 0,
}


@pytest.mark.slow
@pytest.mark.parametrize("text", CLOSED)
def test_a_training_is_finished_whatever_becomes_of_its_output(text: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [*LANGUAGE.split(), "attention=mha", "hardware=cpu", f"cache_dir='{tmp_path / 'cache'}'"]
    words += [f"data_root='{corpus('wikitext2', tmp_path / 'text')}'", f"hydra.run.dir='{run}'"]
    done = shell(text, *words, cwd=tmp_path)
    record: dict[str, Any] = json.loads((run / "record.json").read_text())
    assert (done.returncode, record["status"]) == (CLOSED[text], "finished"), done.stderr
    assert "error" not in record and record["quality"]["perplexity"] > 0
    assert ("error: standard output: No space left" in done.stderr) == (done.returncode == 1)

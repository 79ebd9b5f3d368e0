"""Second spellings of keys."""

import sys

import pytest

from attnlab import cli
from attnlab.config.check import compose
from attnlab.config.spelling import spelled
from attnlab.errors import ConfigError

SEARCH = "compress.search=[{layers: [0]},{layers: [1]}]"


def test_keys_get_their_own_names() -> None:
    assert spelled(["-m", "compress.search=[{a: b=c}]", "compress=laser"]) == [
        "-m", "task.search=[{a: b=c}]", "compress=laser",
    ]  # fmt: skip
    cfg = compose("task=reasoning", "compress=tensorllm", SEARCH)
    assert cfg.task.search == [{"layers": [0]}, {"layers": [1]}]
    with pytest.raises(ConfigError, match="task.search"):
        compose("task=imagenet", "compress=irratt", SEARCH)


def test_the_command_line_knows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[object] = []
    monkeypatch.setattr(sys, "argv", ["attnlab", "task=reasoning", "compress=tensorllm", SEARCH])
    monkeypatch.setattr(cli, "run", lambda plan, given, created: found.append((plan.jobs[0].task.search, given[-1])))
    assert cli.main() == 0
    assert found == [([{"layers": [0]}, {"layers": [1]}], "task.search=[{layers: [0]},{layers: [1]}]")]

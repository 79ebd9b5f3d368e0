"""The output of `mode=predict`, and its settings: a wrong one is refused before the model is read."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from attnlab.decoding import BeamSearch, Sampling
from attnlab.errors import ConfigError, WriteError
from attnlab.modes.predict import destination
from attnlab.tasks.prediction import changed
from tests.modes.conftest import TrainedRun
from tests.modes.test_export_trained import LANGUAGE, TRANSLATION


@pytest.mark.parametrize("name", ["o.txt", "link"])
def test_a_file_is_there_when_it_is_complete(name: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "o.txt")
    with destination(str(tmp_path / name)) as file:
        file.write("a\n")
        assert not (tmp_path / "o.txt").exists()
    assert (tmp_path / "link").is_symlink() and (tmp_path / "o.txt").read_text() == "a\n"


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with destination(str(tmp_path / "pipe")) as file:
        file.write("a\n")
    assert os.read(reader, 9) == b"a\n" and (tmp_path / "pipe").is_fifo()
    os.close(reader)


def test_nowhere_to_write(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    wrong: list[tuple[str, type[Exception], str]] = [
        (str(tmp_path), ConfigError, "a folder; expected the file to write"),
        ("", ConfigError, "output=: empty"),
        (str(tmp_path / "file" / "o.txt"), WriteError, "cannot be written"),
        (str(tmp_path / ("o" * 250)), WriteError, "cannot be written"),  # its partial file's name is too long
    ]
    for output, kind, message in wrong:
        with pytest.raises(kind, match=message), destination(output):
            pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


@pytest.mark.parametrize(
    ("search", "settings", "message"),
    [
        (Sampling(), {"tokens": "x"}, "task.x.tokens=x: expected int >= 1"),
        (Sampling(), {"seed": "a"}, "task.x.seed=a: expected int"),
        (BeamSearch(), {"beam": None}, "task.x.beam=null: expected int >= 1"),
        (BeamSearch(), {"length_penalty": "a"}, "task.x.length_penalty=a: expected float"),
    ],
)
def test_wrong_settings(search: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        changed(search, settings, "task.x")


@pytest.mark.slow
def test_a_trained_model_is_used_without_lightning(trained_run: TrainedRun, tmp_path: Path) -> None:
    """Lightning takes seconds to import."""
    text, translation = (
        f"checkpoint='{trained_run(*settings)[0].rename(tmp_path / settings[0])}'"
        for settings in (LANGUAGE, TRANSLATION)
    )
    commands = [
        ["mode=predict", translation, "input=a", "task.decode.beam=1"],
        ["mode=export", translation, "format=safetensors", f"hydra.run.dir='{tmp_path}/exported'"],
        ["mode=predict", text, "input=w3", "task.sampling.tokens=2"],
        ["mode=generate", text, "prompt=w3", "task.sampling.tokens=2"],
        ["mode=describe", "task=wmt16"],
    ]
    script = f"import sys; from attnlab.cli import run; print(list(map(run, {commands})), 'lightning' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.endswith(f"{[0] * len(commands)} False\n"), done.stderr

"""Input that cannot work, as a command sees it: one line, at the right time, and nothing is lost."""

import errno
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from attnlab.compression.decompositions.tucker import tucker
from attnlab.config.check import compose
from attnlab.errors import ConfigError
from attnlab.pretrained import huggingface
from attnlab.run import job
from attnlab.run.record import read
from attnlab.tasks.reasoning.model import AskedModel
from tests.tasks.reasoning.conftest import Folder

TENSORLLM = ["compress=tensorllm", "compress.ranks=[12,4]"]
CLAIMS = [{"claim": f"The number is {i}.", "label": ["SUPPORTS", "REFUTES"][i % 2]} for i in range(10)]

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def claims(tmp_path: Path) -> Path:
    (tmp_path / "claims").mkdir()
    write(tmp_path / "claims", CLAIMS)
    return tmp_path / "claims"


def write(root: Path, rows: list[Any]) -> None:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (root / "paper_dev.jsonl").write_text("\n".join(lines) + "\n")


@pytest.fixture
def run(claims: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """run(model, overrides ...) -> the exit code and the line of the error, as the command has them."""

    def command(model: Path | str, *overrides: str, directory: str = "run") -> tuple[int, str]:
        (tmp_path / directory).mkdir(exist_ok=True)
        capfd.readouterr()
        try:
            cfg = compose("task=reasoning", "hardware=cpu", f"cache_dir='{tmp_path / 'cache'}'", f"model={model}",
                          f"data_root='{claims}'", "task.questions=fever", *overrides)  # fmt: skip
        except ConfigError as error:
            return 2, str(error)
        code = job.run(cfg, "test", tmp_path / directory)
        lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(lines) == (code != 0), lines
        return code, "".join(lines).removeprefix("error: ")

    return command


# --- before the weights are read ------------------------------------------------------------------------------------


def test_questions(claims: Path, folder: Folder, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AskedModel, "load", lambda *_: pytest.fail("the weights were read"))
    write(claims, [*CLAIMS, {"claim": "A."}])
    (claims / "validation.json").write_text('[{"question": "Who?", "answer": "I"}, {"question": "Why?"}]')
    for questions, expected in (
        ("fever", f"{claims / 'paper_dev.jsonl'} line 11: 'label' is missing"),
        ("hotpotqa", f"{claims / 'validation.json'} item 2: 'answer' is missing"),
    ):
        code, message = run(folder("llama"), *TENSORLLM, f"task.questions={questions}", directory=questions)
        assert code == 1 and message.startswith(expected)


def test_a_model_without_weights(folder: Folder, run: Run, tmp_path: Path) -> None:
    """Published names and folders alike, in less time than the hub's own retries take."""
    shutil.copytree(folder("llama"), tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    began = time.perf_counter()
    code, message = run(tmp_path / "model", *TENSORLLM)
    assert code == 1 and f"no weights in {tmp_path / 'model'}; expected model.safetensors" in message
    code, message = run("meta-llama/Llama-2-7b-hf", *TENSORLLM)
    assert code == 1 and "the hub cannot be reached ([Errno -2] Name or service not known); download it" in message
    assert time.perf_counter() - began < 20


# --- with the weights -----------------------------------------------------------------------------------------------


class Linear4bit(nn.Linear):
    """Stands for bitsandbytes' class."""


def test_quantised_projections(folder: Folder, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = huggingface.load(str(folder("llama")))
    attention = model.model.layers[1].self_attn
    attention.v_proj = Linear4bit(attention.v_proj.in_features, attention.v_proj.out_features, bias=False)
    monkeypatch.setattr(huggingface, "load", lambda *arguments, **options: model)
    code, message = run(folder("llama"), *TENSORLLM)
    assert code == 2 and message.startswith("model.layers.1.self_attn.v_proj is a ")
    assert "its weights are quantised or have adapters" in message
    assert not (tmp_path / "run" / "compressed").exists()
    assert read(tmp_path / "run")["compression"]["quality"]["dense"]["questions"] == 8  # what was measured stays


# --- interrupted, and a full disk -----------------------------------------------------------------------------------


def test_an_interrupted_command_goes_on(
    folder: Folder, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command again takes the finished layer, and gives the bits of a run that nothing interrupted."""
    model, done = folder("llama"), list[int]()

    def interrupted(*arguments: Any, **options: Any) -> Any:
        done.append(1)
        if len(done) == 2:  # the second layer
            os.kill(os.getpid(), signal.SIGINT)
        return tucker(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr("attnlab.compression.methods.tensorllm.tucker", interrupted)
        code, message = run(model, *TENSORLLM)
    assert code == 130 and message.startswith("interrupted by SIGINT")
    assert read(tmp_path / "run")["status"] == "interrupted"
    assert run(model, *TENSORLLM) == (0, "")
    assert [layer.get("stored", False) for layer in read(tmp_path / "run")["compression"]["layers"]] == [True, False]
    assert run(model, *TENSORLLM, f"cache_dir='{tmp_path / 'other'}'", directory="unbroken") == (0, "")
    assert not any("stored" in layer for layer in read(tmp_path / "unbroken")["compression"]["layers"])
    assert content(tmp_path / "run" / "compressed") == content(tmp_path / "unbroken" / "compressed")


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_full_disk(folder: Folder, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line names what cannot be written, and the compressed folder of an earlier run in the directory stays."""
    assert run(folder("llama"), *TENSORLLM) == (0, "")
    place = tmp_path / "run" / "compressed"
    before = content(place)
    path = tmp_path / "run" / "record.json"  # a finished run's directory would be refused
    path.write_text(path.read_text().replace('"status": "finished"', '"status": "failed"'))

    def save(files: dict[str, bytes], folder: Path) -> None:
        (folder / "tokenizer.json").write_bytes(b"")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface, "write_files", save)
    code, message = run(folder("llama"), "compress=tensorllm", "compress.ranks=[8,4]")
    assert code == 1 and message.startswith(str(place)) and "cannot be written (No space left" in message
    assert content(place) == before
    assert [path.name for path in (tmp_path / "run").iterdir() if path.name.startswith(".")] == []

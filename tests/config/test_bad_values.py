"""Values that used to be refused late or by a library's text, and own files that are no configuration."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file

from attnlab.config.bounds import fits
from attnlab.config.build import CONF
from attnlab.config.check import check
from attnlab.config.model import check_weights
from attnlab.config.schema import signature
from attnlab.errors import ConfigError
from attnlab.run.directory import directory_of
from attnlab.tasks.base import Trains, task_of


def test_how_files_of_weights_begin(tmp_path: Path) -> None:
    tensor = {"x": torch.zeros(2)}
    save_file(tensor, tmp_path / "a.safetensors")
    torch.save(tensor, tmp_path / "b.ckpt")
    torch.save(tensor, tmp_path / "c.pth", _use_new_zipfile_serialization=False)
    for path in sorted(tmp_path.iterdir()):
        check_weights("checkpoint", str(path))
    complete = (tmp_path / "a.safetensors").read_bytes()
    for content in (b"", complete[:40], b"{}" * 9, b"\x00" * 9):
        (tmp_path / "a.safetensors").write_bytes(content)
        with pytest.raises(ConfigError, match=r"a\.safetensors: holds no weights, or is damaged"):
            check_weights("checkpoint", str(tmp_path / "a.safetensors"))


@pytest.mark.parametrize(
    ("task", "monitor", "known"),
    [
        ("wikitext2", "val_accuracy", "val_loss or loss"),
        pytest.param("mustc", "val_bleu", "val_loss or val_accuracy or loss", marks=pytest.mark.slow),
        pytest.param("slurp", "x", "val_loss or val_accuracy or val_intent_accuracy or loss", marks=pytest.mark.slow),
        pytest.param("imagenet", "accuracy", "val_loss or val_accuracy or loss", marks=pytest.mark.slow),
    ],
)
def test_a_callback_that_watches_what_no_validation_gives(task: str, monitor: str, known: str) -> None:
    stopping = ["callbacks=early_stopping", "+callbacks.early_stopping.mode=min"]
    cfg = check([f"task={task}", *stopping, "+callbacks.early_stopping.monitor=val_loss"]).jobs[0].copy()
    task_of(cfg, Trains).check_monitors()
    OmegaConf.set_readonly(cfg, False)
    cfg.callbacks.early_stopping.monitor = monitor
    with pytest.raises(ConfigError, match=rf"callbacks\.early_stopping\.monitor={monitor}: expected {known}$"):
        task_of(cfg, Trains).check_monitors()


def test_runs_of_the_wrong_kind(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: 1\n")
    (tmp_path / "last.ckpt").write_text("")
    with pytest.raises(ConfigError, match=r"last\.ckpt: a file; resume= takes the directory of a run"):
        directory_of("resume", str(tmp_path / "last.ckpt"))
    (tmp_path / "record.json").write_text("{cut sh")
    assert directory_of("resume", str(tmp_path)) == tmp_path


FILES = {  # a file in --config-dir: its content, what chooses it, what the error names
    "attention/mine.yaml": (b"", "attention=mine", "mine.yaml: expected keys and values"),
    "attention/list.yaml": (b"- 1\n", "attention=list", "list.yaml: expected keys and values, found list"),
    "attention/latin.yaml": ("a: é\n".encode("latin-1"), "attention=latin", "latin.yaml: not YAML in UTF-8"),
    "attention/bad.yaml": (b"a: [1\nb: 2\n", "attention=bad", r"bad\.yaml: not YAML in UTF-8 .* line 2"),
    "attention/self.yaml": (b"defaults: [self]\n", "attention=self", "attention=self: a file builds on itself"),
    "experiment/again.yaml": (
        b"# @package _global_\ndefaults: [{/experiment: again}]\n",
        "experiment=again",
        "experiment",
    ),
    "attention/mha.yaml": (b"_target_: mine.MHA\n", "attention=mha", "attention/mha.yaml is a built-in file"),
    "hydra/job_logging/default.yaml": (b"version: 1\n", "seed=2", "default.yaml is a built-in file"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_no_configuration(name: str, tmp_path: Path) -> None:
    content, chosen, message = FILES[name]
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        check([f"--config-dir={tmp_path}", chosen])
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_device_that_is_not_there_is_refused_before_data(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "attnlab", "hardware.accelerator=mps", f"hydra.run.dir={tmp_path / 'run'}"]
    done = subprocess.run([*command, f"cache_dir={tmp_path / 'cache'}"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 2 and "hardware.accelerator=mps: torch finds no Apple GPU here" in done.stderr
    assert not (tmp_path / "cache" / "samples").exists()


SIZE = re.compile(r"(^|_)(d_model|dim|rank|layers|heads|groups|window|size|length|context|text|width|channels|mels)$")
TARGETS = {
    target for file in CONF.rglob("*.yaml") for target in re.findall(r"_target_: (attnlab\.\S+)", file.read_text())
}


@pytest.mark.parametrize("target", sorted({*TARGETS, "attnlab.config.settings.Root", "attnlab.config.settings.Task"}))
def test_every_size_has_an_upper_bound(target: str) -> None:
    """A typing error such as `num_layers=100000000` would take minutes, or all of the memory, before an error."""
    sizes = {key: annotation for key, annotation in signature(target).parameters.items() if SIZE.search(key)}
    for key, annotation in sizes.items():
        if annotation is not None and not fits(annotation, "text") and key not in ("batch_size", "eval_batch_size"):
            assert not fits(annotation, 10**8), f"{target}({key}=): expected Size, Layers or another upper bound"

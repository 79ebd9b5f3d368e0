"""Values that used to be refused late or by a library's text, and own files that are no configuration."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file

from attnlab.cli import command
from attnlab.config.annotation import fits
from attnlab.config.build import CONF
from attnlab.config.check import PATHS, check
from attnlab.config.model import check_weights
from attnlab.config.rules import check_augmentation, check_heads
from attnlab.config.schema import signature
from attnlab.errors import ConfigError
from attnlab.run.directory import directory_of
from attnlab.run.loading import load
from attnlab.tasks.base import Trains, task_of

BAD = {
    "stride=100000": "attention.stride=100000: expected int >= 1 and <= 1024",
    "task.train.max_minutes=-1": "task.train.max_minutes=-1: expected float > 0 or null",
    "task.train.validate_every=0": "expected int >= 1 or null",
    "task.train.validate_every_epochs=-1": "expected int >= 1",
    "task.train.log_every=0": "expected int >= 1",
    "attention=mha attention.rope_theta=-5": "attention.rope_theta=-5: expected float > 0",
    "task.model.decoder.ffn_dim=0": "expected int >= 1",
    "task.model.decoder.projector_dim=0": "expected int >= 1",
    "task.model.encoder.conv_channels=0": "expected int >= 1",
    "task.model.encoder.num_layers=0": "task.model.encoder.num_layers=0: expected int >= 1",
    "task.model.encoder.conv_kernels=[]": "expected a list, each int >= 1 and <= 1048576, not empty or null",
    "checkpoint=/etc/passwd mode=test": "checkpoint=/etc/passwd: holds no weights, or is damaged; expected a .safeten",
    "cache_dir=/etc/passwd": "cache_dir=/etc/passwd: a file; expected a directory",
    "attention.num_heads=0": "attention.num_heads=0: expected int >= 1",
    "seed=9223372036854775809": "expected int >= 0 and <= 4294967295",
    "+trainer.limit_train_batches=-1": "trainer.limit_train_batches=-1: expected int >= 1 or float > 0 and <= 1",
    "+trainer.deterministic=foo": "trainer.deterministic=foo: expected bool or warn or null",
    "task.model.d_model=1000000000000": "task.model.d_model=1000000000000: expected int >= 1 and <= 1048576",
    "task.model.decoder.num_layers=100000000": "num_layers=100000000: expected int >= 1 and <= 1024",
    "rank=100000000000": "rank=100000000000: expected int >= 1 and <= 1048576",
    "resume=/etc/passwd": "resume=/etc/passwd: a file; resume= takes the directory of a run",
}
MORE_BAD = {
    "task=imagenet task.model.depth=0": "task.model.depth=0: expected int >= 1 or null",
    "checkpoint=/dev/null mode=test": "checkpoint=/dev/null: not a file; expected a .safetensors file",
    "checkpoint=/etc mode=predict input=x": "checkpoint=/etc: not the directory of a run: there is no config.yaml",
    "task=imagenet model=/etc/passwd": "model=/etc/passwd: holds no weights, or is damaged",
    "task.encoder_checkpoint=/etc/passwd": "task.encoder_checkpoint=/etc/passwd: holds no weights, or is damaged",
}


@pytest.mark.parametrize("line", [*BAD, *(pytest.param(line, marks=pytest.mark.slow) for line in MORE_BAD)])
def test_a_bad_value_is_one_line(line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(shlex.split(line), load)
    assert (BAD | MORE_BAD)[line] in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("key", [key for key in PATHS if key != "DATA_ROOT"])
def test_a_path_that_is_too_long(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=rf"^{key}=aaa.*\.\.\.: not the path of a file or folder \(File name too long\)$"
    ):
        check([f"{key}={'a' * 5000}"], load)
    monkeypatch.setenv("DATA_ROOT", "b" * 5000)
    with pytest.raises(ConfigError, match="^DATA_ROOT=bbb.*: not the path"):
        check([], load)


def test_how_files_of_weights_begin(tmp_path: Path) -> None:
    tensor = {"x": torch.zeros(2)}
    save_file(tensor, tmp_path / "a.safetensors")
    torch.save(tensor, tmp_path / "b.ckpt")
    torch.save(tensor, tmp_path / "c.pth", _use_new_zipfile_serialization=False)
    for path in sorted(tmp_path.iterdir()):
        check_weights("checkpoint", str(path))
    whole = (tmp_path / "a.safetensors").read_bytes()
    for content in (b"", whole[:40], b"{}" * 9, b"\x00" * 9):
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


@pytest.mark.parametrize("flag", ["--info", pytest.param("--info=all", marks=pytest.mark.slow)])
def test_what_is_shown_is_checked_first(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hydra builds its callbacks even where it only shows how a configuration is composed."""
    (tmp_path / "mine.yaml").write_text(
        "defaults: [config, _self_]\n"
        f"hydra: {{callbacks: {{mine: {{_target_: os.mkdir, path: {tmp_path / 'touched'}}}}}}}\n"
    )
    monkeypatch.setattr(sys, "argv", ["attnlab", flag, f"--config-dir={tmp_path}", "--config-name=mine"])
    assert command() == 2
    assert "hydra.callbacks: not supported" in capsys.readouterr().err
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("policy", ["foo", "rand-m9-foo1", "rand-m9.5", "augmix-x3", "v0-m9", "rand-m9-inc", "-"])
def test_augmentations_that_timm_does_not_know(policy: str) -> None:
    with pytest.raises(ConfigError, match="task.data.auto_augment="):
        check_augmentation(policy)


@pytest.mark.parametrize(
    "policy",
    [None, "rand-m9-mstd0.5-inc1", "rand-m9-n3-p0.5-mmax10-t0", "augmix-m5-w4-d2-b1", "v0", "original-mstd0.5"],
)
def test_augmentations_that_timm_knows(policy: str | None) -> None:
    check_augmentation(policy)


def test_heads_that_do_not_divide() -> None:
    with pytest.raises(ConfigError, match=r"attention.num_kv_heads=3: expected a divisor of attention.num_heads=4"):
        check_heads({"num_heads": 4, "num_kv_heads": 3}, "attention")
    with pytest.raises(ConfigError, match=r"attention.mechanisms.gqa.num_kv_heads=3"):
        check_heads({"mechanisms": {"gqa": {"num_heads": 4, "num_kv_heads": 3}}}, "attention")
    check_heads({"num_heads": 4, "num_kv_heads": None}, "attention")
    check_heads(None, "attention")


def test_runs_of_the_wrong_kind(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: 1\n")
    (tmp_path / "last.ckpt").write_text("")
    with pytest.raises(ConfigError, match=r"last\.ckpt: a file; resume= takes the directory of a run"):
        directory_of("resume", str(tmp_path / "last.ckpt"))
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(ConfigError, match="checkpoints: expected the directory"):
        directory_of("checkpoint", str(tmp_path))
    (tmp_path / "checkpoints").unlink()
    (tmp_path / "record.json").write_text("{cut sh")
    assert directory_of("resume", str(tmp_path)) == tmp_path
    (tmp_path / "record.json").unlink()
    (tmp_path / "record.json").mkdir()
    with pytest.raises(ConfigError, match=r"record\.json: expected the record"):
        directory_of("resume", str(tmp_path))


FILES = {  # name: content, chosen by, what is said
    "attention/mine.yaml": (b"", "attention=mine", "mine.yaml: an empty file; expected keys and values"),
    "attention/list.yaml": (b"- 1\n", "attention=list", "list.yaml: expected keys and values, found list"),
    "attention/latin.yaml": ("a: é\n".encode("latin-1"), "attention=latin", "latin.yaml: not UTF-8 at byte 3"),
    "attention/self.yaml": (b"defaults: [self]\n", "attention=self", r"builds on itself \(self -> self\)"),
    "attention/plain.yaml": (b"num_heads: 4\n", "attention=plain", "attention=plain: expected a _target_"),
    "experiment/again.yaml": (
        b"# @package _global_\ndefaults: [{/experiment: again}]\n",
        "experiment=again",
        "builds on itself",
    ),
    "experiment/map.yaml": (b"defaults: {a: 1}\n", "experiment=map", "defaults: expected a list, found dict"),
    "attention/mha.yaml": (b"_target_: mine.MHA\n", "attention=mha", "attention/mha.yaml is a built-in file"),
    "config.yaml": (b"seed: 3\n", "attention=mha", "config.yaml is a built-in file"),
    "hydra/job_logging/default.yaml": (b"version: 1\n", "seed=2", "default.yaml is a built-in file"),
}


@pytest.mark.parametrize("name", FILES)
def test_own_files_that_are_no_configuration(name: str, tmp_path: Path) -> None:
    content, chosen, said = FILES[name]
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=said) as caught:
        check([f"--config-dir={tmp_path}", chosen])
    assert "\n" not in str(caught.value)


def test_types_in_an_own_file_are_those_of_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    file = tmp_path / "experiment" / "mine.yaml"
    file.write_text("# @package _global_\nstride: 100000\n")
    with pytest.raises(ConfigError, match="attention.stride=100000: expected int >= 1 and <= 1024"):
        check([f"--config-dir={tmp_path}", "experiment=mine"])


def test_a_search_path_in_an_own_root_file(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [config, _self_]\nhydra: {searchpath: ['file:///evil']}\n")
    with pytest.raises(ConfigError, match=r"hydra\.searchpath: --config-dir"):
        check([f"--config-dir={tmp_path}", "--config-name=mine"])


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
    found = signature(target)
    sizes = {key: annotation for key, annotation in (found.parameters if found else {}).items() if SIZE.search(key)}
    for key, annotation in sizes.items():
        if annotation is not None and not fits(annotation, "text") and key not in ("batch_size", "eval_batch_size"):
            assert not fits(annotation, 10**8), f"{target}({key}=): expected Size, Layers or another upper bound"

"""A configuration runs no commands: a `_target_` must derive from the base class that its place expects."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra import initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from attnlab.config.build import CONF, instantiate
from attnlab.config.check import check_fixed, check_hydra, compose
from attnlab.config.compose import Composer
from attnlab.config.nodes import check_target
from attnlab.errors import ConfigError
from tests.config.test_command_line import write_option

ATTENTION = "expected a class derived from attnlab.attention.Attention"


@pytest.fixture(scope="module")
def plain() -> DictConfig:
    return compose("task=wikitext2", "attention=mha")


def changed(cfg: DictConfig, key: str, value: Any) -> DictConfig:
    """Like a run's config.yaml: plain values, one of them set."""
    copied = OmegaConf.create(OmegaConf.to_container(cfg))
    assert isinstance(copied, DictConfig)
    OmegaConf.update(copied, key, value, merge=False, force_add=True)
    return copied


def call(target: str, /, **more: Any) -> dict[str, Any]:
    return {"_target_": target, **more}


TOUCH = {"command": "touch /tmp/attnlab_was_here"}
HOSTILE = {  # key: node, what the refusal says
    "a function of the standard library": ("attention", call("os.system", **TOUCH), ATTENTION),
    "by way of one of ours": ("attention", call("attnlab.cli.os.system", **TOUCH), "no such class"),
    "a class of another base": ("attention", call("torch.nn.Linear", in_features=1, out_features=1), ATTENTION),
    "a function of ours": ("attention", call("attnlab.run.files.write_text", path="x", text="y"), ATTENTION),
    "a method of the right class": ("attention", call("attnlab.attention.MHA.to_bytes"), "no such class"),
    "code from the hub": ("task.model", call("torch.hub.load", repo_or_dir="a/b", model="c"), "torch.nn.Module"),
    "a partial": ("task.optimizer", call("os.system", _partial_=True), "derived from torch.optim.Optimizer"),
    "a function inside a callback": (
        "callbacks.mine",
        call("lightning.pytorch.callbacks.LambdaCallback", on_fit_start=call("os.system", _partial_=True)),
        "callbacks.mine.on_fit_start._target_=os.system: nothing is built here",
    ),
    "the trainer's profiler": ("trainer.profiler", call("os.system"), "lightning.pytorch.profilers.Profiler"),
    "a list of nodes": ("tags", [call("os.system")], "tags.0._target_=os.system: nothing is built here"),
    "a name that is code": ("attention", call("os.system('x')"), "expected the dotted name of a class"),
    "no text": ("attention", {"_target_": ["os", "system"]}, "expected the dotted name of a class"),
    "what a reference hides": ("attention", call("${hide:}"), "expected the dotted name of a class"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_configuration_is_refused_before_anything_is_imported(name: str, plain: DictConfig) -> None:
    key, value, message = HOSTILE[name]
    before = set(sys.modules)
    with pytest.raises(ConfigError, match=message) as caught:
        check_fixed(changed(plain, key, value))
    assert str(caught.value).startswith((key, f"{key}._target_")) and "\n" not in str(caught.value)
    assert not {"subprocess", "shutil", "torch", "pip", "http.server"} & (set(sys.modules) - before)


@pytest.mark.parametrize(
    ("path", "node"),
    [
        ("attention", call("subprocess.Popen", args=["false"])),
        ("elsewhere", call("os.getcwd")),
        ("task.data", call("attnlab.data.recall.data.RecallData", task="${oc.create:{_target_: pathlib.Path}}")),
        ("bench", "${oc.create:{_target_: os.getcwd}}"),
    ],
)
def test_what_a_reference_has_hidden_is_refused_where_it_is_built(path: str, node: Any) -> None:
    with pytest.raises(ConfigError, match=r"_target_=.*: (expected|nothing)"):
        instantiate(OmegaConf.create({"node": node}).node, path=path)


def test_a_function_in_a_private_folder_is_refused_without_its_import(
    tmp_path: Path, plain: DictConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil_mechanism.py").write_text(
        f"open({str(tmp_path / 'imported')!r}, 'w')\nimport os\nfrom torch import nn\n"
        "def run(**keys): ...\nMade = type('Made', (), {})\nclass Other: ...\nclass Lie(nn.Module): ...\nVALUE = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("run", "Made", "Other", "Lie", "VALUE", "os.system", "missing"):
        with pytest.raises(ConfigError, match=r"attention\._target_=evil_mechanism\."):
            check_fixed(changed(plain, "attention", {"_target_": f"evil_mechanism.{name}"}))
    assert not (tmp_path / "imported").exists()


def test_one_s_own_classes_pass_wherever_they_lie(
    tmp_path: Path, plain: DictConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "custom").mkdir()
    (tmp_path / "custom" / "__init__.py").write_text("from .loud import Loud as Louder\n")
    (tmp_path / "custom" / "loud.py").write_text(
        "import torch\nimport torch.nn as nn\nimport attnlab.attention\nimport lightning as L\n"
        "from attnlab.attention import MHA\nclass Middle(MHA): ...\nclass Loud(Middle): ...\n"
        "class Direct(attnlab.attention.Attention): ...\nclass Net(torch.nn.Module): ...\nclass Short(nn.Module): ...\n"
        "class Watch(L.Callback): ...\nclass Slow(torch.optim.SGD): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    right = {"attention": ("Louder", "loud.Loud", "loud.Direct"), "task.model": ("loud.Net", "loud.Short")}
    right |= {"callbacks.x": ("loud.Watch",), "task.optimizer": ("loud.Slow",)}
    for key, names in right.items():
        for name in names:
            check_target(f"custom.{name}", key)
    with pytest.raises(ConfigError, match="expected a class derived from torch.optim.Optimizer"):
        check_target("custom.loud.Net", "task.optimizer")
    assert "custom" not in sys.modules


HYDRA: dict[str, tuple[str, Any]] = {  # key below hydra, value
    "launcher": ("launcher", call("os.system")),
    "sweeper": ("sweeper", call("subprocess.Popen", args="x")),
    "a class inside": ("launcher.x", call("os.system")),
    "a function of a plugin": ("launcher", call("hydra._internal.core_plugins.basic_launcher.configure_log")),
    "a reference to a node": ("launcher.x", "${task.evil}"),
    "callback": ("callbacks", {"x": call("os.system")}),
    "a factory of a handler": ("job_logging.handlers.x", {"()": "os.system"}),
    "the environment": ("job.env_set", {"LD_PRELOAD": "/evil.so"}),
    "a function of the search": ("sweeper.custom_search_space", "os.system"),
    "a command of the cluster": ("launcher.setup", ["touch x"]),
}


@pytest.fixture(scope="module")
def composed() -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return Composer().compose(["attention=mha"])


def hydra(composed: DictConfig, key: str, value: Any) -> DictConfig:
    """Hydra's node with another value."""
    cfg = copy.deepcopy(composed)
    OmegaConf.set_struct(cfg, False)
    cfg.task.evil = {"x": call("os.system")}
    cfg.hydra = OmegaConf.create(OmegaConf.to_container(cfg.hydra))  # without Hydra's own types
    OmegaConf.update(cfg.hydra, key, value, merge=False, force_add=True)
    return cfg.hydra


@pytest.mark.parametrize("name", HYDRA)
def test_hydras_own_node(name: str, composed: DictConfig) -> None:
    key, value = HYDRA[name]
    with pytest.raises(ConfigError, match=rf"^hydra\.{key.partition('.')[0]}"):
        check_hydra(hydra(composed, key, value), composed.hydra, [])


def test_what_a_person_writes_on_the_command_line_of_a_cluster(composed: DictConfig) -> None:
    check_hydra(composed.hydra, composed.hydra, [])
    check_hydra(hydra(composed, "launcher.setup", ["module load cuda"]), composed.hydra, ["hydra.launcher.setup"])


@pytest.mark.slow
def test_the_command_itself_runs_nothing(tmp_path: Path) -> None:
    made, config = tmp_path / "made", tmp_path / "options"
    node = json.dumps({"_target_": "os.system", "command": f"touch {made}"})
    for name, text in (("callback", f"callbacks:\n    x: {node}"), ("launcher", f"launcher: {node}")):
        write_option(config, f"experiment/{name}", f"# @package _global_\nhydra:\n  {text}\n")
        for more in ([], ["-m", "seed=1,2"], ["--info", "all"]):
            command = [sys.executable, "-m", "attnlab", f"--config-dir={config}", f"experiment={name}", *more]
            done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
            assert done.returncode == 2 and not made.exists(), done.stderr

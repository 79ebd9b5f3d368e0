"""What a `_target_` may name: a class of the base that its place expects, wherever it can be imported from.

A configuration may come from somebody else, and must not run commands. So a name is followed through the source of its
module (`schema.py`) before anything is imported, and what it leads to counts: `torch.os.system` is a function of `os`.
A class passes if it derives from the base of its place; a function passes if it is listed there. The base of a node
inside another is that of the place, or else the class that the outer constructor's annotation names.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from hydra import conf as hydra_files
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from attnlab.config.nearest import nearest
from attnlab.config.schema import ROOT, ancestors, classes_of, definition, siblings, signature
from attnlab.errors import ConfigError


@dataclass(frozen=True)
class Place:
    """What a place expects: classes derived from one of `bases`, or one of `functions`; all are dotted names."""

    bases: tuple[str, ...]
    functions: tuple[str, ...] = ()

    def __str__(self) -> str:
        classes = f"a class derived from {' or '.join(self.bases)}"
        return f"{classes}, or {' or '.join(self.functions)}" if self.functions else classes


_ATTENTION = Place(("attnlab.attention.Attention",))
_METHOD = Place(("attnlab.compression.methods.base.Method",))
_MODULE = Place(("torch.nn.Module",))
# `*` stands for one part of a path.
PLACES: Mapping[str, Place] = {
    "attention": _ATTENTION,
    "attention.mechanisms.*": _ATTENTION,
    "compress": _METHOD,
    "compress.steps.*": _METHOD,
    "convert": Place(("attnlab.conversion.base.Conversion",)),
    "convert.calibration": Place(("attnlab.conversion.settings.Calibration",)),
    "convert.healing": Place(("attnlab.conversion.settings.Healing",)),
    "bench": Place(("attnlab.bench.Settings",)),
    "logger.*": Place(("lightning.pytorch.loggers.Logger",)),
    "callbacks.*": Place(("lightning.pytorch.callbacks.Callback",)),
    "trainer.profiler": Place(("lightning.pytorch.profilers.Profiler",)),
    "task.kind": Place(("attnlab.tasks.base.Task",)),
    "task.data": Place(("attnlab.data.base.Data", "attnlab.data.questions.Questions")),
    "task.model": Place(
        (
            "torch.nn.Module",
            "attnlab.pretrained.timm.VisionTransformer",
            "attnlab.tasks.reasoning.model.AskedModel",
        )
    ),
    "task.model.encoder": _MODULE,
    "task.model.decoder": _MODULE,
    "task.model.ordinary": _ATTENTION,
    "task.optimizer": Place(("torch.optim.Optimizer",), ("timm.optim.create_optimizer_v2",)),
    "task.schedule": Place(("torch.optim.lr_scheduler.LRScheduler",), ("timm.scheduler.create_scheduler_v2",)),
    "task.decode": Place(("attnlab.decoding.BeamSearch",)),
    "task.sampling": Place(("attnlab.decoding.Sampling",)),
    "task.score": Place(
        ("attnlab.tasks.language_modelling.score.LanguageScore", "attnlab.tasks.recall.score.RecallScore")
    ),
    "task.evaluation": Place(("attnlab.tasks.harness.Harness",)),
}


def place_of(path: str) -> Place | None:
    """What the place of a node expects, by its dotted path; None where nothing is listed."""
    return next((place for pattern, place in PLACES.items() if _matches(pattern, path)), None)


def _matches(pattern: str, path: str) -> bool:
    names, parts = pattern.split("."), path.split(".")
    return len(names) == len(parts) and all(name in ("*", part) for name, part in zip(names, parts, strict=True))


def nodes(node: Any, path: str = "", outer: tuple[str, str] = ("", "")) -> Iterator[tuple[str, str, Place | None]]:
    """Every `_target_` below a node: the path of its node, the target, and what its place expects.

    Args:
        outer: the nearest `_target_` around `node`, and its parameter in which `node` lies.

    Raises:
        ConfigError: a `_target_` is not a text.
    """
    if isinstance(node, list):
        for i, item in enumerate(node):
            yield from nodes(item, f"{path}.{i}", outer)
    if not isinstance(node, dict):
        return
    target = node.get("_target_")
    if "_target_" in node:
        if not isinstance(target, str) or not re.fullmatch(r"\w+(\.\w+)*", target):
            raise ConfigError(f"{path}._target_={target}: expected the dotted name of a class, package.module.Name")
        yield path, target, place_of(path) or annotated(*outer)
    for key, child in node.items():
        inside = (target, str(key)) if isinstance(target, str) else outer
        yield from nodes(child, f"{path}.{key}" if path else str(key), inside)


def annotated(target: str, parameter: str) -> Place | None:
    """What the annotation of a class' parameter expects; None if it names no class, or `target` is empty."""
    try:
        bases = classes_of(target, parameter) if target else []
    except LookupError:  # reported where `target` itself is checked
        return None
    return Place(tuple(bases)) if bases else None


def check_targets(cfg: Mapping[str, Any]) -> None:
    """Check every `_target_` of a configuration without Hydra's node.

    Raises:
        ConfigError: names the key and what its place expects.
    """
    for path, target, place in nodes(dict(cfg)):
        check_target(target, f"{path}._target_", place)


def check_target(target: str, key: str, place: Place | None) -> None:
    """Check one `_target_`. Nothing is imported.

    Raises:
        ConfigError: names the key and what is expected.
    """
    if place is None:
        raise ConfigError(
            f"{key}={target}: nothing is built here; the outer class' parameter has to be annotated with the class "
            "that it expects"
        )
    standard = target.partition(".")[0] in sys.stdlib_module_names
    try:
        if not standard:
            signature(target)  # LookupError: no such module, or a module of this package without that name
    except LookupError as error:
        raise ConfigError(f"{key}={target}: no such class{nearest(target, siblings(target))}") from error
    names = set() if standard else ancestors(target) or {canonical(target)}
    if not names & {canonical(name) for name in (*place.bases, *place.functions)}:
        hint = "" if standard or ancestors(target) else "; a class is written as `class Name(Base)` in its module"
        raise ConfigError(f"{key}={target}: expected {place}{hint}")


def require_target(imported: Any, target: str, path: str, outer: tuple[str, str] = ("", "")) -> None:
    """Check what a `_target_` has led to, once it is imported: a reference may have hidden it from `check_target`.

    Args:
        path: of the node, dotted. Without `outer` and where nothing is listed for it any class passes.
        outer: the `_target_` around the node, and its parameter in which the node lies.

    Raises:
        ConfigError: it is no class of the place's base.
    """
    place = place_of(path) or annotated(*outer)
    if place is None:
        fits = isinstance(imported, type) and not outer[0]
    elif isinstance(imported, type):  # a base that is not loaded can be no base of one that is
        bases = [_loaded(name) for name in place.bases]
        fits = any(isinstance(base, type) and issubclass(imported, base) for base in bases)
    else:
        fits = any(imported is _loaded(name) for name in place.functions)
    if not fits:
        raise ConfigError(f"{path}._target_={target}: expected {place or 'nothing that is built'}")


def _loaded(name: str) -> Any:
    """What a dotted name leads to, if its module is imported; else None."""
    module, _, attribute = canonical(name).rpartition(".")
    return getattr(sys.modules.get(module), attribute, None)


@lru_cache
def canonical(name: str) -> str:
    """A dotted name by the module that defines it."""
    defined = definition(name)
    return ".".join(defined) if defined else name


# --- Hydra's own node -------------------------------------------------------------------------------------------

_HYDRA = {
    "hydra.launcher": Place(("hydra.plugins.launcher.Launcher",)),
    "hydra.sweeper": Place(("hydra.plugins.sweeper.Sweeper",)),
    "hydra.sweeper.sampler": Place(("optuna.samplers.BaseSampler",)),
}
BUILT_IN = (ROOT / "attnlab" / "conf", Path(hydra_files.__file__).parent)  # this package's YAML files, and Hydra's
_PLUGINS = ("hydra", "hydra_plugins", "optuna")  # top-level packages of Hydra, its plugins, and their samplers
_COMMANDS = ("setup", "srun_args", "python", "additional_parameters")  # of submitit's launcher: run by a shell


def check_hydra(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Check what files of --config-dir make of Hydra's own node, of which Hydra builds objects and runs commands.

    Args:
        overrides: the keys that the command line sets.

    Raises:
        ConfigError: names the key and what is expected.
    """
    for name in ("launcher", "sweeper"):
        key = f"hydra.{name}"
        try:  # what a reference hides is checked too
            node: dict[str, Any] = OmegaConf.to_container(cfg.hydra[name], resolve=True)  # type: ignore[assignment]
        except (OmegaConfBaseException, ValueError) as error:
            raise ConfigError(f"{key}: {str(error).splitlines()[0]}; expected plain values") from error
        for path, target, _ in nodes(node, key):
            place = _HYDRA.get(path)
            if place is None or target.partition(".")[0] not in _PLUGINS:
                raise ConfigError(f"{path}._target_={target}: expected {place or 'no _target_'}, of a plugin of Hydra")
            check_target(target, f"{path}._target_", place)
        for command in _COMMANDS if name == "launcher" else ():
            if node.get(command) and not any(f"{key}.{command}".startswith(override) for override in overrides):
                raise ConfigError(f"{key}.{command}: a file cannot bring commands; give it on the command line")
        searched = [str(key).lstrip("+~") for key in node.get("params") or ()]
        if node.get("custom_search_space") or any(key.startswith("hydra") for key in searched):
            raise ConfigError(f"{key}: a search space has keys of a run only; give it on the command line")
    if cfg.hydra.callbacks:
        raise ConfigError("hydra.callbacks: not supported; callbacks=... are those of Lightning")
    job: Any = OmegaConf.to_container(cfg.hydra.job)
    if job["env_set"] or re.search(r"[/\\]|\$\{", str(job["name"])):
        raise ConfigError("hydra.job: expected a plain name, and no env_set: set environment variables in the shell")
    for name in ("job_logging", "hydra_logging"):
        choice = str(cfg.hydra.runtime.choices[f"hydra/{name}"])
        files = [home / "hydra" / name / f"{choice}.yaml" for home in BUILT_IN if re.fullmatch(r"\w+", choice)]
        known = [yaml.safe_load(file.read_text(encoding="utf-8")) for file in files if file.is_file()]
        if OmegaConf.to_container(cfg.hydra[name]) not in known:
            raise ConfigError(f"hydra.{name}: cannot be changed together with --config-dir")

"""What a `_target_` may name: a class of the base that its place expects, wherever it can be imported from.

A configuration may come from somebody else, and must not run commands. So a name is followed through the source of its
module (`schema.py`) before anything is imported, and what it leads to counts: `torch.os.system` is a function of `os`.
A class passes if it derives from the base of its place; a function passes if it is listed there. The base of a node
inside another is that of the place, or else the class that the outer constructor's annotation names.
"""

import importlib
import pkgutil
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from attnlab.config.nearest import nearest
from attnlab.config.schema import Lineage, classes_of, definition, lineage, returned, siblings, signature
from attnlab.errors import ConfigError


@dataclass(frozen=True)
class Place:
    """What a place expects: classes derived from one of `bases`, or one of `functions`.

    Args:
        bases: dotted names.
        functions: dotted names.
    """

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
PUBLISHED = "bench.published"  # the name of a function, by its annotation one from Attention to Attention


def place_of(path: str) -> Place | None:
    """What a place expects that is listed here; None for any other place.

    Args:
        path: of the node, dotted.
    """
    return next((place for pattern, place in PLACES.items() if _matches(pattern, path)), None)


def _matches(pattern: str, path: str) -> bool:
    names, parts = pattern.split("."), path.split(".")
    return len(names) == len(parts) and all(name in ("*", part) for name, part in zip(names, parts, strict=True))


def nodes(node: Any, path: str = "", outer: tuple[str, str] = ("", "")) -> Iterator[tuple[str, str, Place | None]]:
    """Every `_target_` below a node: the path of its node, the target, and what its place expects.

    Args:
        node: plain mappings, lists and values.
        path: of `node`, dotted.
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
    """What the annotation of a class' parameter expects; None if it names no class.

    Args:
        target: the class; empty: none.
        parameter: its parameter.
    """
    try:
        bases = classes_of(target, parameter) if target else []
    except LookupError:  # reported where `target` itself is checked
        return None
    return Place(tuple(bases)) if bases else None


def check_targets(cfg: Mapping[str, Any]) -> None:
    """Check every `_target_` of a configuration, and `bench.published`.

    Args:
        cfg: plain mappings, lists and values, without Hydra's node.

    Raises:
        ConfigError: names the key and what its place expects.
    """
    for path, target, place in nodes(dict(cfg)):
        check_target(target, f"{path}._target_", place)
    bench = cfg.get("bench")
    if isinstance(bench, Mapping) and "published" in bench:
        check_function(str(bench["published"]), PUBLISHED, "attnlab.attention.Attention")


def check_target(target: str, key: str, place: Place | None) -> None:
    """Check one `_target_`. Nothing is imported, unless the source of an installed package does not tell what it is.

    Args:
        target: a dotted name.
        key: for the error.
        place: what is expected; None: nothing may be built there.

    Raises:
        ConfigError: names the key and what is expected.
    """
    if place is None:
        raise ConfigError(
            f"{key}={target}: nothing is built here; the outer class' parameter has to be annotated with the class "
            "that it expects"
        )
    try:
        if _is_standard(target):
            raise ConfigError(f"{key}={target}: expected {place}")
        signature(target)  # LookupError: no such module, or a module of this package without that name
        known = lineage(target)
        if known is None:
            found = _imported(target, key, place)
            fits = _is_one(found, place)
        elif known.kind == "class":
            fits = any(_canonical(base) in known.ancestors for base in place.bases)
            if not fits and not known.complete:
                fits = _is_one(_imported(target, key, place), place)
        else:
            fits = definition(target) in [definition(name) for name in place.functions]
    except (LookupError, ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{key}={target}: no such class{nearest(target, siblings(target))}") from error
    if not fits:
        raise ConfigError(f"{key}={target}: expected {place}")


def check_function(target: str, key: str, result: str) -> None:
    """Check the name of a function, which is not imported: its annotation says what it returns.

    Args:
        target: a dotted name.
        key: for the error.
        result: the dotted name of the base of what it returns.

    Raises:
        ConfigError: names the key and what is expected.
    """
    try:
        if not (standard := _is_standard(target)):
            signature(target)
        known = Lineage("value") if standard else lineage(target)
    except LookupError:
        known = None
    if known is None:
        raise ConfigError(f"{key}={target}: cannot be imported; expected package.function")
    wanted = _canonical(result)
    ancestors = [one.ancestors for name in returned(target) if (one := lineage(name)) is not None]
    if known.kind != "function" or not any(wanted in names for names in ancestors):
        raise ConfigError(f"{key}={target}: expected a function whose annotated result is {result}")


def require_target(found: Any, target: str, path: str, outer: tuple[str, str] = ("", "")) -> None:
    """Check what a `_target_` has led to, once it is imported: as :func:`check_target`, for what source cannot tell.

    Args:
        found: the object.
        target: the dotted name.
        path: of the node, dotted. Without `outer` and where nothing is listed for it any class passes.
        outer: the `_target_` around the node, and its parameter in which the node lies.

    Raises:
        ConfigError: it is no class of the place's base.
    """
    place = place_of(path) or annotated(*outer)
    fits = _is_one(found, place) if place else isinstance(found, type) and not outer[0]
    if not fits:
        raise ConfigError(f"{path}._target_={target}: expected {place or 'nothing that is built'}")


def _is_one(found: Any, place: Place) -> bool:
    """Whether an object is a class of a place's base, or one of its functions.

    A base that is not loaded can be no base of `found`, which is.
    """
    if not isinstance(found, type):
        return any(found is _loaded(name) for name in place.functions)
    bases = [_loaded(name) for name in place.bases]
    return any(isinstance(base, type) and issubclass(found, base) for base in bases)


def _loaded(name: str) -> Any:
    """What a dotted name leads to, if its module is imported; else None."""
    module, _, attribute = _canonical(name).rpartition(".")
    return getattr(sys.modules.get(module), attribute, None)


@lru_cache
def _canonical(name: str) -> str:
    """A dotted name by the module that defines it."""
    found = definition(name)
    return ".".join(found) if found else name


def _imported(target: str, key: str, place: Place) -> Any:
    """The object of a name whose source does not tell what it is; only of packages that are installed."""
    top = target.partition(".")[0]
    if not _is_installed(top) or "__main__" in target.split("."):
        raise ConfigError(
            f"{key}={target}: expected {place}, and the source does not say that it is one: write it as `class "
            "Name(Base)` in its module"
        )
    importlib.import_module("attnlab.torchvision_schemas")  # before torchvision, which timm and lightning import
    try:
        return pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError):  # there is no such name
        raise
    except (Exception, SystemExit) as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ConfigError(f"{key}={target}: its module cannot be imported ({said}); expected {place}") from error


def _is_standard(target: str) -> bool:
    """Whether a name begins in Python's own library, of which no class has a base of ours."""
    return target.partition(".")[0] in sys.stdlib_module_names


def _is_installed(top: str) -> bool:
    """Whether a top-level package is this one, or lies where pip installs packages."""
    if top == "attnlab":
        return True
    spec = find_spec(top)
    places = [*(spec.submodule_search_locations or []), spec.origin or ""] if spec else []
    roots = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    return any(place and set(Path(place).resolve().parents) & roots for place in places)


# --- Hydra's own node -------------------------------------------------------------------------------------------

_HYDRA: Mapping[str, Place] = {
    "hydra.launcher": Place(("hydra.plugins.launcher.Launcher",)),
    "hydra.sweeper": Place(("hydra.plugins.sweeper.Sweeper",)),
    "hydra.callbacks.*": Place(("hydra.experimental.callback.Callback",)),
    "hydra.sweeper.sampler": Place(("optuna.samplers.BaseSampler",)),
}
_PLUGINS = ("hydra", "hydra_plugins")  # top-level packages of Hydra and its plugins
_COMMANDS = ("setup", "srun_args", "python", "additional_parameters")  # of submitit's launcher: run by a shell
_BUILT = ("launcher", "sweeper", "callbacks", "job_logging", "hydra_logging")  # others hold texts and numbers
_LOGS = ("hydra.job_logging", "hydra.hydra_logging")
_HANDLERS = (
    "attnlab.run.console.StderrHandler",
    "logging.FileHandler",
    "logging.NullHandler",
    "logging.StreamHandler",
)
_FORMATTERS = ("logging.Formatter", "colorlog.ColoredFormatter")
_STREAMS = ("ext://sys.stdout", "ext://sys.stderr")
_PLAIN_REFERENCES = re.compile(r"([^$]*\$\{hydra\.[\w.]+\}[^$]*)+")
_LOG_FILE = re.compile(r"\$\{hydra\.(runtime\.output_dir|run\.dir|sweep\.dir)\}/(\$\{hydra\.job\.name\}|[\w-]+)\.log")


def check_hydra(cfg: DictConfig, given: Sequence[str], own: bool) -> None:
    """Check Hydra's node, of which Hydra builds launchers, sweepers, callbacks and the logging.

    Args:
        cfg: the composed configuration.
        given: the keys that the command line sets.
        own: whether a directory of own files (--config-dir) takes part.

    Raises:
        ConfigError: names the key and what is expected.
    """
    hydra: dict[str, Any] = OmegaConf.to_container(cfg.hydra, resolve=False)  # type: ignore[assignment]
    parts = {key: node for key, node in hydra.items() if key not in ("runtime", "overrides")}
    for name in _BUILT:
        _check_references(cfg, hydra.get(name), f"hydra.{name}")
    for path, target, _ in nodes(parts, "hydra"):
        place = next((one for name, one in _HYDRA.items() if _matches(name, path)), None)
        key = f"{path}._target_"
        plugin = target.partition(".")[0] in _PLUGINS or path == "hydra.sweeper.sampler"
        if place is None or not plugin:
            raise ConfigError(f"{key}={target}: expected {place or 'no _target_'} of Hydra or of a plugin of Hydra")
        check_target(target, key, place)
    if hydra.get("job", {}).get("env_set"):
        raise ConfigError("hydra.job.env_set: a configuration sets no environment variables; set them in the shell")
    if re.search(r"[/\\]|\$\{", str(hydra.get("job", {}).get("name"))):
        raise ConfigError(f"hydra.job.name={hydra['job']['name']}: expected a plain name")
    sweeper = hydra.get("sweeper")
    if isinstance(sweeper, Mapping) and sweeper.get("custom_search_space"):
        raise ConfigError(
            "hydra.sweeper.custom_search_space: names a function; give the search space on the command line"
        )
    launcher = hydra.get("launcher")
    launcher = launcher if isinstance(launcher, Mapping) else {}
    for name in _COMMANDS if own else ():
        if launcher.get(name) and not any(f"hydra.launcher.{name}".startswith(key) for key in given):
            raise ConfigError(
                f"hydra.launcher.{name}: a file of --config-dir cannot bring commands; give it on the command line"
            )
    for path in _LOGS:
        _check_logging(hydra.get(path.partition(".")[2]), path, "")


def _check_references(cfg: DictConfig, node: Any, path: str) -> None:
    """Refuse references that lead to groups of keys: what they hold would be built without having been checked."""
    if isinstance(node, Mapping | list):
        for key, child in node.items() if isinstance(node, Mapping) else enumerate(node):
            _check_references(cfg, child, f"{path}.{key}")
        return
    if not isinstance(node, str) or "${" not in node:
        return
    try:
        leads_to_group = OmegaConf.is_config(OmegaConf.select(cfg, path))
    except OmegaConfBaseException:  # known only when a job runs
        leads_to_group = _PLAIN_REFERENCES.fullmatch(node) is None
    if leads_to_group:
        raise ConfigError(f"{path}={node}: expected values, not a reference to a group of keys")


def _check_logging(node: Any, path: str, section: str) -> None:
    """Refuse what would build or call something else than the handlers and formatters of Python's logging."""
    if isinstance(node, Mapping):
        for key, child in node.items():
            here = f"{path}.{key}"
            if key in ("()", "class", "factory"):
                allowed = _FORMATTERS if section == "formatters" else _HANDLERS if section == "handlers" else ()
                if child not in allowed or (key == "()" and section != "formatters"):
                    raise ConfigError(f"{here}={child}: expected {' or '.join(allowed) or 'no class'}")
            if key == "filename":
                if not (isinstance(child, str) and _LOG_FILE.fullmatch(child)):
                    raise ConfigError(f"{here}={child}: expected ${{hydra.runtime.output_dir}}/<name>.log")
                continue
            _check_logging(child, here, section or str(key))
    elif isinstance(node, list):
        for i, child in enumerate(node):
            _check_logging(child, f"{path}.{i}", section)
    elif isinstance(node, str) and (re.match(r"\w+://", node) or "${" in node) and node not in _STREAMS:
        raise ConfigError(f"{path}={node}: expected a plain value, {' or '.join(_STREAMS)}")

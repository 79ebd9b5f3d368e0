"""From YAML to one fixed configuration, and from a node of it to an object.

Resolvers for the files in conf/:

    ${or:a,b,...}             the first value that is not null; null if all are
    ${mul:a,b}  ${min:a,b}
    ${fit:a,b}                how many times b fits into a, at least 1
    ${div:a,b}                must be exact
    ${pick:k,{a: 1, b: 2},3}  the value of k in the mapping, or the third argument, if there is one
    ${choice:group}           the name of the option chosen in a group
    ${corpus:}                the option chosen of task; of own data the name of its folder
    ${made:}                  the chosen conversion, else the attention, else the compression

Imports Hydra and OmegaConf only: the command line is checked with it before anything heavy is imported.
"""

import ctypes
import functools
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from attnlab.config.nodes import bases_of, check_target
from attnlab.errors import ConfigError

CONF = (Path(__file__).parents[1] / "conf").resolve()  # a link in a checkout, a folder in the wheel
ABOUT = {  # the groups of conf/, as `attnlab list` prints them
    "task": "what is trained or asked, on which corpus",
    "attention": "the mechanism",
    "compress": "how a pretrained model's weights are made smaller",
    "convert": "what the attention of a pretrained decoder becomes",
    "scale": "sample: minutes on two CPU cores; paper: the published recipe; pretrained: with model=",
    "hardware": "accelerator, devices, precision, strategy",
    "recipe": "a task's values at a scale; follows from task and scale",
    "bench": "what mode=bench measures",
    "logger": "where curves go besides CSV files; a list works",
    "callbacks": "of Lightning; a list works",
    "experiment": "a published row that is more than task, attention and scale",
    "debug": "a short run that finds errors",
}
GROUPS = tuple(ABOUT)
PATTERN = "attention.pattern"  # of a hybrid stack: the mechanism of each layer
LISTS = ("logger", "callbacks")  # groups of which several options may be chosen
KNOBS = ("stride", "rank")
KNOB_GROUPS = ("attention", "compress", "convert")  # the nodes that may read a knob
BFLOAT16 = (8, 0)  # the compute capability from which NVIDIA's devices have bfloat16 and TF32 (Ampere)
LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"  # of NVIDIA's driver
AMD = Path("/dev/kfd")  # of AMD's
PATHS = ("data_root", "cache_dir", "checkpoint", "resume", "baseline")


def _divide(a: int, b: int) -> int:
    if a % b:
        raise ValueError(f"{a} is not a multiple of {b}")
    return a // b


def _choice(group: str, *, _root_: DictConfig) -> str | None:
    """The option chosen in a group: in a frozen configuration, in a composed one, or without its Hydra node."""
    if "choices" in _root_:
        return _root_.choices[group]
    hydra = _root_.hydra if "hydra" in _root_ else HydraConfig.get()
    return hydra.runtime.choices[group]


def _made(*, _root_: DictConfig) -> str | None:
    convert, attention = (_choice(group, _root_=_root_) for group in ("convert", "attention"))
    return convert if convert not in (None, "none") else attention or _choice("compress", _root_=_root_)


def _corpus(*, _root_: DictConfig) -> str | None:
    own = str(_choice("experiment", _root_=_root_)).startswith("own/") and _root_.data_root
    return Path(_root_.data_root).expanduser().absolute().name if own else _choice("task", _root_=_root_)


def _named(key: str, value: Any) -> str:
    """A setting as a part of a directory's name, such as `_lr=0.001`; of a path its last part."""
    text = re.sub(r"[^\w.+-]+", "-", Path(value).name if isinstance(value, str) else str(value))
    return f"_{key.rpartition('.')[2]}={text.strip('-')[:40]}"


RESOLVERS: dict[str, Callable[..., Any]] = {
    "or": lambda *values: next((value for value in values if value is not None), None),
    "unless": lambda first, value: value if first is None else None,
    "mul": lambda a, b: a * b,
    "fit": lambda a, b: max(1, a // b),
    "div": _divide,
    "min": min,
    "pick": lambda key, table, *default: table.get(key, *default) if default else table[key],
    "choice": _choice,
    "made": _made,
    "named": _named,
    "corpus": _corpus,
}
for name, function in RESOLVERS.items():
    OmegaConf.register_new_resolver(name, function, replace=True)


def freeze(cfg: DictConfig, choices: Mapping[str, str | None]) -> DictConfig:
    """Resolve every reference of a composed configuration and make it read-only.

    Adds `choices`, the option of each group, and sets the root's `stride` and `rank` to the values in use. null: the
    mechanism has no such knob.
    """
    cfg = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])  # Hydra's node is large
    knobs = {knob: knob_paths(cfg, knob) for knob in KNOBS}
    with open_dict(cfg):
        cfg.choices = {group: choices.get(group) for group in GROUPS}
    _make_absolute(cfg)  # before others refer to them
    resolve(cfg)
    for path, text in [leaf for leaf in leaves(written(cfg)) if isinstance(leaf[1], str) and "${" in leaf[1]]:
        OmegaConf.update(cfg, path, escaped(text))  # what was escaped is no reference now
    for knob, paths in knobs.items():
        cfg[knob] = OmegaConf.select(cfg, paths[0]) if paths else None
    return closed(cfg)


def escaped(text: str) -> str:
    """A text as OmegaConf holds it where no part of it is a reference."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def closed(cfg: DictConfig) -> DictConfig:
    """Make a configuration without references read-only, with absolute paths and the precision of this machine."""
    _make_absolute(cfg)
    _settle(cfg.hardware)
    OmegaConf.set_struct(cfg, True)
    OmegaConf.set_readonly(cfg, True)
    return cfg


def absolute(key: str, value: Any) -> Path:
    """The absolute path that a key has. ConfigError: it begins with ~, and no home directory is known."""
    try:
        return Path(str(value)).expanduser().absolute()
    except RuntimeError as error:
        unknown = "HOME is not set, and the system knows no home directory of this user"
        raise ConfigError(f"{key}={value}: {unknown}; set HOME, or give {key}= a path without ~") from error


def _make_absolute(cfg: DictConfig) -> None:
    with open_dict(cfg):
        for key in PATHS:
            if cfg.get(key) is not None:
                cfg[key] = escaped(str(absolute(key, cfg[key])))


def _settle(hardware: DictConfig) -> None:
    """Replace `auto` by the precision of this machine: bf16-mixed on CUDA devices with bfloat16, else 32-true.

    A GPU that is asked for and missing, as on a login node, counts as one with bfloat16. Without bfloat16
    `hardware.tf32` has its default.
    """
    if hardware.precision != "auto" and hardware.tf32:
        return
    asked = hardware.accelerator == "cuda" or (hardware.accelerator == "gpu" and sys.platform != "darwin")
    versions = capabilities(hardware.devices) if hardware.accelerator in ("auto", "gpu", "cuda") else []
    ampere = min(versions) >= BFLOAT16 if versions else asked
    if hardware.precision == "auto":
        hardware.precision = "bf16-mixed" if ampere else "32-true"
    if not ampere:
        hardware.tf32 = True


def capabilities(devices: int | str | ListConfig | list[int]) -> list[tuple[int, int]]:
    """The compute capability of each CUDA device of a run on this machine; torch is imported only with a driver."""
    if not has_driver():
        return []
    import torch

    if not torch.cuda.is_available():  # torch for CPUs, or no device
        return []
    there = range(torch.cuda.device_count())
    if isinstance(devices, int):
        there = there[:devices]
    return [torch.cuda.get_device_capability(i) for i in there if isinstance(devices, int | str) or i in devices]


def has_driver() -> bool:
    """Whether the driver of a CUDA device is installed; without it torch finds none."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return AMD.exists()
    return True


def require_device(wanted: str, cuda: bool, apple: bool) -> None:
    """Refuse an accelerator that is not here (ConfigError). `cuda`, `apple`: whether there may be such a GPU."""
    if not {"cuda": cuda, "mps": apple, "gpu": cuda or apple}.get(wanted, True):
        raise ConfigError(f"hardware.accelerator={wanted}: torch finds no such device here; take hardware=cpu or auto")


def resolve(cfg: DictConfig) -> None:
    """Resolve every reference in place. ConfigError names the key whose reference fails, and the reference."""
    try:
        OmegaConf.resolve(cfg)
    except OmegaConfBaseException:
        for path, raw in leaves(written(cfg)):
            try:
                OmegaConf.select(cfg, path)
            except OmegaConfBaseException as error:
                reason = str(error).splitlines()[0].removeprefix("ValueError raised while resolving interpolation: ")
                raise ConfigError(f"{path} = {raw}: {reason}") from error
        raise


def written(node: Any) -> Any:
    """A node as plain dict and list, references as they are written."""
    return OmegaConf.to_container(node, resolve=False) if OmegaConf.is_config(node) else node


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value in plain dict and list with its dotted path."""
    if not isinstance(node, dict | list):
        yield path, node
        return
    for key, child in node.items() if isinstance(node, dict) else enumerate(node):
        yield from leaves(child, f"{path}.{key}" if path else str(key))


def at(node: Any, key: str, default: Any = None) -> Any:
    """The value at a dotted key of nested mappings, or `default`."""
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return default
        node = node[part]
    return node


def knob_paths(cfg: DictConfig, knob: str) -> list[str]:
    """Where the unresolved attention and compress nodes read `${stride}` or `${rank}`."""
    nodes = [(group, written(cfg.get(group))) for group in KNOB_GROUPS]
    return [path for group, node in nodes for path, raw in leaves(node, group) if f"${{{knob}}}" in str(raw)]


def instantiate(node: DictConfig, path: str = "", **kwargs: Any) -> Any:
    """Build the class that `_target_` names, and first the nodes in it; `kwargs` join or replace the node's keys.

    A node with `_partial_: true` gives a callable that waits for the other arguments. `path` is the place of a node
    that was taken out of its configuration. ConfigError names the place of a node whose target does not exist or
    raises TypeError or ValueError. Other exceptions pass unchanged.
    """
    path = path or str(node._get_full_key(None))
    if "_target_" not in node and bases_of(path):
        raise ConfigError(f"{path}: expected a _target_, the class that is built; the file that sets it has none")
    return _build(node, path, kwargs)


def _build(node: Any, path: str, more: Mapping[str, Any]) -> Any:
    if isinstance(node, ListConfig):
        return [_build(item, f"{path}.{i}", {}) for i, item in enumerate(node)]
    if not isinstance(node, DictConfig):
        return node
    keys = [str(key) for key in node if key not in ("_target_", "_partial_") and key not in more]
    arguments = {key: _build(node[key], f"{path}.{key}", {}) for key in keys} | dict(more)
    if "_target_" not in node:
        return arguments
    target = node["_target_"]
    check_target(target, path)  # again: a reference may have hidden it
    try:
        function = pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{path}._target_={target}: cannot be imported: {error}") from error
    call = _Call(function, **arguments)
    call.path = path
    return call if node.get("_partial_") else call()


class _Call(functools.partial[Any]):
    """A partial that turns TypeError and ValueError into a ConfigError with its place in the configuration."""

    path: str

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self.path}: {error}") from error

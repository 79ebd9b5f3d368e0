"""Everything that can be wrong with a command line, found before data or model are touched.

A typo must cost seconds. So nothing here imports torch: the configuration is composed with Hydra, classes are read as
source (`schema.py`), and the first problem is raised as a ConfigError of one line with the nearest valid names.
"""

import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from attnlab.config import build as config
from attnlab.config.compose import KEYS, Composer, one_line, require, require_key
from attnlab.config.nearest import nearest
from attnlab.config.schema import siblings, signature
from attnlab.errors import ConfigError

READ_BY = {  # the modes that read a key
    "checkpoint": ("test", "generate", "evaluate"),
    "resume": ("train",),
    "prompt": ("generate",),
}
AT_LEAST = {  # what would otherwise be noticed in the middle of a run, or after it
    "task.data.max_frames": 1,
    "task.decode_max_frames": 1,
    "task.attention_heads": 1,
    "task.model.d_model": 1,
    "task.model.encoder.num_layers": 0,
    "task.model.decoder.num_layers": 1,
    "task.train.max_epochs": 1,
    "task.train.accumulate": 1,
    "task.train.keep_best": 1,
    "task.train.ctc_weight": 0,
    "task.optimizer.lr": 0,
    "task.decode.beam": 1,
    "task.decode.max_len_b": 0,
    "task.decode.min_len": 0,
}


@dataclass(frozen=True)
class Plan:
    """What a command line asks for: each job's fixed configuration, and where a multirun's jobs lie."""

    jobs: list[DictConfig]
    multirun: bool
    sweep_directory: Path


def check(arguments: Sequence[str]) -> Plan:
    """Compose and check what the command line asks for. ConfigError: the first thing that is wrong with it."""
    parser = get_args_parser()
    parser.error = _usage  # type: ignore[method-assign]
    options = parser.parse_args(arguments)
    if options.config_path or options.config_name:
        raise ConfigError("--config-path and --config-name are fixed; --config-dir adds a directory of YAML files")
    with initialize_config_dir(str(config.CONF), job_name="run", version_base="1.3"):
        composer = Composer(options.config_dir)
        overrides = [composer.parse(text) for text in options.overrides]
        multirun = options.multirun or "hydra.mode=MULTIRUN" in options.overrides
        swept = [override for override in overrides if override.is_sweep_override()]
        if swept and not multirun:
            raise ConfigError(f"{swept[0].input_line}: several values need -m; quote the value if it is one text")
        try:
            jobs = BasicSweeper.split_arguments(overrides, None)[0] if swept else [options.overrides]
        except HydraException as error:
            raise ConfigError(one_line(error)) from error
        composed = [composer.compose_checked(job) for job in jobs]
        plan = Plan([_fix(cfg, composer) for cfg in composed], multirun, Path(composed[0].hydra.sweep.dir))
    if multirun and any(job.resume is not None for job in plan.jobs):
        raise ConfigError("resume= continues one run: leave -m out")
    return plan


def compose(*overrides: str) -> DictConfig:
    """The checked and fixed configuration of `python -m attnlab <overrides>`."""
    return check(overrides).jobs[0]


def _usage(message: str) -> NoReturn:
    raise ConfigError(f"{message}; settings are written key=value, for instance attention=mtla")


def _fix(cfg: DictConfig, composer: Composer) -> DictConfig:
    """What concerns a composed configuration as a whole; the configuration to run with."""
    if cfg.mode not in cfg.task.modes:
        raise ConfigError(f"mode={cfg.mode}: task={cfg.hydra.runtime.choices.task} has {', '.join(cfg.task.modes)}")
    missing = [key for key, raw in config.leaves(config.written(cfg)) if raw == "???" and not key.startswith("hydra.")]
    if missing:
        raise ConfigError(f"{missing[0]} has no default: give {missing[0]}=...")
    for key, modes in READ_BY.items():
        if cfg[key] is not None and cfg.mode not in modes:
            raise ConfigError(f"{key}= is read by mode={' and mode='.join(modes)}, not by mode={cfg.mode}")
        if key != "prompt" and cfg[key] is not None and not Path(cfg[key]).expanduser().exists():
            raise ConfigError(f"{key}={cfg[key]}: no such file or directory")
    if cfg.mode in READ_BY["checkpoint"] and cfg.checkpoint is None:
        raise ConfigError(f"mode={cfg.mode} needs checkpoint=<a run directory or a checkpoint file>")
    if cfg.data_root == "":
        raise ConfigError("data_root is empty: name the corpus' directory, or leave it out for the sample corpus")
    _check_task(cfg)
    _check_knobs(cfg, composer)
    fixed = config.freeze(cfg, cfg.hydra.runtime.choices)
    for key in KEYS:
        require_key(key, config.written(OmegaConf.select(fixed, key)))
    _check_targets(config.written(fixed), "")
    for key, least in AT_LEAST.items():
        value = OmegaConf.select(fixed, key)
        if isinstance(value, int | float) and value < least:
            raise ConfigError(f"{key}={value}: expected at least {least}")
    return fixed


def _check_task(cfg: DictConfig) -> None:
    """What the task has no use for is refused, not left unread."""
    choices = cfg.hydra.runtime.choices
    if choices.attention is not None and "attention_heads" not in cfg.task:
        raise ConfigError(f"attention={choices.attention}: task={choices.task} brings its own attention; leave it out")
    if choices.compress != "none" and not cfg.task.get("compressible"):
        raise ConfigError(f"compress={choices.compress}: task={choices.task} has no pretrained model to compress")


def _check_knobs(cfg: DictConfig, composer: Composer) -> None:
    for knob in config.KNOBS:
        if cfg[knob] is None or config.knob_paths(cfg, knob):
            continue
        chosen = [f"{group}={name}" for group in config.KNOB_GROUPS if (name := cfg.hydra.runtime.choices[group])]
        having = [
            f"{group}={option}"
            for group in config.KNOB_GROUPS
            for option in composer.options(group)
            if f"${{{knob}}}" in composer.text(group, option)
        ]
        if set(chosen) & set(having):
            raise ConfigError(f"{knob}={cfg[knob]} has no effect: what it sets is itself set on the command line")
        mechanism = " with ".join(name for name in chosen if name != "compress=none") or chosen[-1]
        raise ConfigError(f"{mechanism} has no {knob}; with one: {', '.join(having) or 'none'}")


def _check_targets(node: object, path: str) -> None:
    """Every `_target_` exists, and takes the keys beside it with the values they have."""
    if isinstance(node, list):
        for i, item in enumerate(node):
            _check_targets(item, f"{path}.{i}")
    if not isinstance(node, dict):
        return
    if "_target_" in node:
        _check_target(node, path)
    for key, child in node.items():
        _check_targets(child, f"{path}.{key}" if path else str(key))


def _check_target(node: dict[str, object], path: str) -> None:
    target = node["_target_"]
    try:
        found = signature(str(target))
        if found is None:
            pkgutil.resolve_name(str(target))  # its source does not tell: compiled, or misspelt
    except (LookupError, ImportError, AttributeError, ValueError) as error:
        hint = nearest(str(target), siblings(str(target)))
        raise ConfigError(f"{path}._target_={target}: no such class{hint}") from error
    for key, value in node.items():
        if found is None or key in ("_target_", "_partial_"):
            continue
        if key not in found.parameters and not found.open:
            hint = nearest(key, found.parameters)
            raise ConfigError(f"{path}.{key}: {str(target).rpartition('.')[2]} has no parameter {key!r}{hint}")
        annotation = found.parameters.get(key)
        built = isinstance(value, dict) and "_target_" in value
        if annotation is not None and not built:
            require(f"{path}.{key}", annotation, value)

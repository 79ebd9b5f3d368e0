"""Check a command line before data or a model are loaded.

Nothing here imports torch: classes are read as source (`schema.py`), so that a typo costs seconds. The first problem is
raised as a ConfigError of one line with the nearest valid names.
"""

import os
import pkgutil
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.types import IntervalSweep, Override, OverrideType, RangeSweep
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from attnlab.config import build as config
from attnlab.config.batch import check_batch
from attnlab.config.compose import Composer, implied_options, one_line, quoted
from attnlab.config.nodes import check_nodes, check_target, targets
from attnlab.config.rules import TIMM, check_composed, check_relations, check_weights
from attnlab.config.schema import constant, definition
from attnlab.errors import ConfigError, DataError, nearest

SWEEPER = "hydra/sweeper"
SPELLINGS = {
    "compress.search": "task.search",  # the task scores the settings; their keys are those of `compress`
    "task.score": "task.score.name",
}
SLURM = "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher"
FOLDER = "task.evaluation.folder"  # its files of tasks name functions, which are run
SUBDIR = "hydra.sweep.subdir"
IN_NAMES = ("task", "attention", "compress", "convert")  # that the directory of every job names
RESERVED = (  # of Hydra's node: what runs code or commands, or names files; --config-dir cannot set it
    *("callbacks", "job.env_set", "job.name", "job_logging", "hydra_logging"),
    *(f"launcher.{name}" for name in ("setup", "srun_args", "python", "additional_parameters")),
    *("sweeper.params", "sweeper.custom_search_space"),
)
FILES = ("task.data.vocabulary.file", "task.text.file", "convert.calibration.file", "compress.calibration")


# --- the command line: its flags, its settings, and the settings of each job of a multirun -----------------------


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line."""

    words: list[str]  # as typed, the flags first
    flags: Namespace  # Hydra's
    settings: list[Override]  # with the keys that the configuration files and records have
    composer: Composer  # for the files that the flags name

    @property
    def keys(self) -> list[str]:
        """The keys and groups that are set."""
        return [setting.key_or_group for setting in self.settings]

    @property
    def swept(self) -> list[Override]:
        """The settings with several values."""
        return [setting for setting in self.settings if setting.is_sweep_override()]

    @property
    def multirun(self) -> bool:
        return bool(self.flags.multirun or "hydra.mode=MULTIRUN" in self.flags.overrides)

    @property
    def searches(self) -> bool:
        """Whether another sweeper than Hydra's basic one chooses the values."""
        return any(setting.key_or_group == SWEEPER and setting.value() != "basic" for setting in self.settings)

    def jobs(self) -> list[list[Override]]:
        """The settings of every job of Hydra's basic sweeper; of a sweeper that searches, one job with first values.

        ConfigError: several values without -m, or a search without its direction.
        """
        if not self.multirun:
            raise ConfigError(f"{self.swept[0].input_line}: several values need -m; quote the value if it is one text")
        lines: list[list[str]]
        if not self.searches:
            try:
                lines = BasicSweeper.split_arguments(self.settings, None)[0]
            except HydraException as error:
                raise ConfigError(one_line(error)) from error
        elif "hydra.sweeper.direction" not in self.keys:
            metric = "the metric by which the task chooses checkpoints"
            raise ConfigError(f"{SWEEPER}: give hydra.sweeper.direction=maximize or minimize, for {metric}")
        else:
            fixed = [_text(setting) for setting in self.settings if setting not in self.swept]
            lines = [[*fixed, *(f"{setting.key_or_group}={_first(setting)}" for setting in self.swept)]]
        return [[self.composer.parse(text) for text in line] for line in lines]

    def for_hydra(self) -> list[str]:
        """The settings with which Hydra composes a multirun: the keys need not exist before the swept options."""
        forced = [f"++{_text(setting)}" if self._is_forced(setting) else _text(setting) for setting in self.settings]
        return [*forced, *implied_options(self.settings)]

    def names_of_jobs(self, of_runs: bool) -> list[str]:
        """Hydra's setting for names of directories that end with what is swept; empty: those of conf/."""
        keys = dict.fromkeys(setting.key_or_group for setting in self.swept)
        swept = [
            key for key in keys if key not in (*IN_NAMES, *config.LISTS) and not key.startswith(("hydra", "checkpoint"))
        ]
        values = [f"${{choice:{key}}}" if key in config.GROUPS else f"${{{key}}}" for key in swept]
        parts = [f"${{named:{key},{value}}}" for key, value in zip(swept, values, strict=True)]
        made = "" if of_runs else "_${corpus:}_${made:}"
        if SUBDIR in self.keys or not (of_runs or parts):
            return []
        return [f"{SUBDIR}={quoted('${hydra.job.num}' + made + ''.join(parts))}"]

    def of_job(self, texts: Sequence[str]) -> list[str]:
        """A job's command line, from the settings that Hydra's sweeper gives it."""
        forced = {f"++{setting.key_or_group}" for setting in self.settings if self._is_forced(setting)}
        settings = [text[2:] if text.partition("=")[0] in forced else text for text in texts]
        sources = [f"--config-dir={self.flags.config_dir}"] * (self.flags.config_dir is not None)
        return [*sources, *(text for text in settings if not text.startswith("hydra."))]

    @staticmethod
    def _is_forced(setting: Override) -> bool:
        key = setting.key_or_group
        return "." in key and setting.type == OverrideType.CHANGE and not key.startswith("hydra.")


def parse_flags(words: Sequence[str]) -> Namespace:
    """Hydra's flags, which may stand anywhere, and the other words as `overrides`. ConfigError: a wrong flag."""
    parser = get_args_parser()
    parser.error = _usage  # type: ignore[method-assign]
    flags: Namespace = parser.parse_intermixed_args(list(words))
    if flags.config_path or flags.config_name:
        flag = "--config-path" if flags.config_path else "--config-name"
        raise ConfigError(f"{flag} is fixed; --config-dir adds a directory of YAML files")
    return flags


def parse(words: Sequence[str], flags: Namespace, composer: Composer) -> CommandLine:
    """The settings of a command line, inside :meth:`Composer.hydra`. ConfigError: a word is not a setting."""
    texts = list(flags.overrides)
    multirun = bool(flags.multirun) or "hydra.mode=MULTIRUN" in texts
    settings = list(map(_forced, composer.settings(texts, multirun)))
    return CommandLine([*(word for word in words if word not in texts), *texts], flags, settings, composer)


def _forced(setting: Override) -> Override:
    """A setting with the key that the configuration has, and that may be new."""
    if setting.key_or_group.startswith("trainer."):  # arguments of Lightning's Trainer, which no file lists
        return replace(setting, type=OverrideType.FORCE_ADD)
    if isinstance(setting.value(), dict):
        return setting
    return replace(setting, key_or_group=SPELLINGS.get(setting.key_or_group, setting.key_or_group))


def _text(setting: Override) -> str:
    """A setting as a word of the command line."""
    return f"{setting.get_key_element()}={str(setting.input_line).partition('=')[2]}"


def _first(setting: Override) -> str:
    """The first value of a search space."""
    space = setting.value()
    return str(space.start) if isinstance(space, IntervalSweep | RangeSweep) else next(setting.sweep_string_iterator())


def _usage(message: str) -> NoReturn:
    raise ConfigError(f"{message}; settings are written key=value, for instance attention=mtla")


# --- the jobs of a command line ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A job that uses or continues a run."""

    cfg: DictConfig
    directory: str  # where it writes


@dataclass(frozen=True)
class Command:
    """A checked command line."""

    line: CommandLine
    jobs: list[DictConfig]  # the fixed configuration of each; of a sweeper that searches, of one with the first values
    texts: list[list[str]]  # the settings of each job
    hydra: DictConfig  # the composed configuration of the first job, with Hydra's node
    directory: Path  # of the run, or of the multirun
    keeps: bool  # whether the run has a directory, with its record
    here: bool  # whether the jobs run on this machine
    for_hydra: list[str]  # the settings that Hydra is called with


Loader = Callable[[Composer, Sequence[Override]], Job | None]


def check(words: Sequence[str], load: Loader | None = None, read_models: bool = True) -> Command:
    """Compose and check the jobs of a command line, sys.argv[1:]. ConfigError: the first error, in one line.

    `load` gives the job of settings that use or continue a run, or None. `read_models`: the pretrained model that a
    configuration names is there, and decides the rest of it.
    """
    flags = parse_flags(words)
    composer = Composer(flags.config_dir)
    with composer.hydra():
        line = parse(words, flags, composer)
        settings = line.jobs() if line.swept else [line.settings]
        load = load if {"checkpoint", "resume"} & set(line.keys) else None
        loaded = [load(composer, job) if load else None for job in settings]
        of_hydra = [str(setting.input_line) for setting in line.settings if setting.key_or_group.startswith("hydra.")]
        composed = [
            composer.compose(of_hydra) if run else _complete(composer.job(job), job, read_models)
            for run, job in zip(loaded, settings, strict=True)
        ]
        here = composed[0].hydra.launcher.get("_target_") != SLURM or "SUBMITIT_EXECUTOR" in os.environ
        if not here:
            _check_cluster(composed, line.multirun)
        if flags.config_dir is not None:
            fixed = [setting for setting in line.settings if setting not in line.swept]
            # Hydra composes the multirun itself with these
            shared = [s for s in fixed if s.key_or_group in config.GROUPS or s.key_or_group.startswith("hydra")]
            for cfg in [*composed, *([composer.job(shared)] if line.swept else [])]:
                check_hydra(cfg.hydra, Composer().compose([]).hydra, line.keys)
        jobs = [run.cfg if run else _fix(cfg, composer) for run, cfg in zip(loaded, composed, strict=True)]
        for job in jobs:
            if job.mode == "evaluate" and FOLDER not in line.keys:
                _check_folder(job)
        run = loaded[0]
        if line.multirun and any(job.resume is not None for job in jobs):
            raise ConfigError("resume= continues one run: leave -m out")
        outputs = [job.output for job in jobs if job.output is not None]
        if line.multirun and len(set(outputs)) < len(outputs):
            once = "leave output= out: each job has its record.json, or start each alone, without -m"
            raise ConfigError(f"output={outputs[0]}: {len(outputs)} jobs would write this file; {once}")
        if (flags.cfg or flags.info) and run:
            raise ConfigError("--cfg and --info show what is composed; a run that is loaded has its config.yaml")
        hydra = composed[0].hydra
        directory = Path(hydra.sweep.dir if line.multirun else hydra.run.dir)
        if run and not line.multirun and "hydra.run.dir" not in line.keys:
            directory = Path(run.directory)
        keeps = line.multirun or flags.cfg or "hydra.run.dir" in line.keys
        for_hydra = line.for_hydra() if line.multirun or flags.info else []
        return Command(
            line,
            jobs,
            [[str(setting.input_line) for setting in job] for job in settings],
            composed[0],
            directory,
            bool(keeps or constant(f"attnlab.modes.{jobs[0].mode}.KEEPS") is not False),
            here and not flags.cfg,
            [*for_hydra, *line.names_of_jobs(bool(run))],
        )


def compose(*overrides: str) -> DictConfig:
    """The checked and fixed configuration of `python -m attnlab <overrides>`."""
    return check(overrides).jobs[0]


def _complete(cfg: DictConfig, settings: Sequence[Override], read_models: bool) -> DictConfig:
    """Complete a composed configuration by the function that CONFIGURE names beside the class `task.kind`.

    It is imported only for `task.match`, `model=` and `convert=`, which it reads.
    """
    if cfg.task.get("match") is None and cfg.model is None and cfg.hydra.runtime.choices.convert in (None, "none"):
        return cfg
    defined = definition(str(OmegaConf.select(cfg, "task.kind._target_")))
    function = constant(f"{defined[0]}.CONFIGURE") if defined else None
    if not isinstance(function, str):
        return cfg
    try:
        completed: DictConfig = pkgutil.resolve_name(function)(cfg, [s.key_or_group for s in settings], read_models)
    except OmegaConfBaseException as error:  # of a reference that leads nowhere
        raise ConfigError(one_line(error)) from error
    return completed


def _fix(cfg: DictConfig, composer: Composer) -> DictConfig:
    """Check a composed configuration, and return it resolved and read-only."""
    missing = [key for key, raw in config.leaves(config.written(cfg)) if raw == "???" and not key.startswith("hydra.")]
    if missing:
        raise ConfigError(f"{missing[0]} has no default: give {missing[0]}=...")
    check_composed(cfg, composer)
    fixed = config.freeze(cfg, cfg.hydra.runtime.choices)
    check_fixed(fixed)
    return fixed


def check_fixed(cfg: DictConfig) -> None:
    """Check every node of a resolved configuration against its signature, and the keys that depend on each other."""
    check_nodes(config.written(cfg))
    check_relations(cfg)
    check_batch(cfg)


def _check_cluster(jobs: Sequence[DictConfig], multirun: bool) -> None:
    """Refuse jobs that SLURM's launcher cannot submit."""
    if not multirun:
        raise ConfigError("hardware=slurm: jobs are submitted by -m, a single one too; on this machine: hardware=gpu")
    if shutil.which("sbatch") is None:
        raise ConfigError("hardware=slurm: this machine has no sbatch; start the command on a login node")
    for name in ("devices", "num_nodes"):
        if len(values := {str(job.hardware[name]): None for job in jobs}) > 1:
            numbers = " and ".join(values)
            raise ConfigError(f"hardware.{name}={numbers}: expected one value for all jobs of a multirun on SLURM")


def check_hydra(hydra: DictConfig, builtin: DictConfig, keys: Sequence[str]) -> None:
    """Refuse parts of Hydra's node that run code, unless they equal `builtin` or the command line sets their `keys`."""
    for name in RESERVED:
        value, expected = (config.written(OmegaConf.select(node, name)) for node in (hydra, builtin))
        if value and value != expected and not any(f"hydra.{name}".startswith(key) for key in keys):
            raise ConfigError(f"hydra.{name}: a file of --config-dir cannot set it; give it on the command line")
    for name in ("launcher", "sweeper"):
        try:  # what a reference hides is checked too
            node = OmegaConf.to_container(hydra[name], resolve=True)
        except (OmegaConfBaseException, ValueError) as error:
            raise ConfigError(f"hydra.{name}: {str(error).splitlines()[0]}; expected plain values") from error
        for path, target in targets(node, f"hydra.{name}"):
            check_target(target, path)


def _check_folder(job: DictConfig) -> None:
    """Refuse a folder of tasks that a file names: its functions and templates of prompts run code."""
    folder = OmegaConf.select(job, FOLDER)
    if folder is not None:
        raise ConfigError(
            f"{FOLDER}={folder}: a file of the configuration names this folder, and tasks can bring code; if the "
            f"folder is yours, give {FOLDER}=<folder> on the command line, or {FOLDER}=null for the harness's own tasks"
        )


# --- what has to be on this machine ------------------------------------------------------------------------------


def check_present(cfg: DictConfig) -> None:
    """Refuse a job whose device, corpus or files are missing on this machine; ConfigError names the key or the path."""
    if cfg.mode not in ("describe", "export"):
        config.require_device(str(cfg.hardware.accelerator), config.has_driver(), sys.platform == "darwin")
    if constant(f"attnlab.modes.{cfg.mode}.READS_CORPUS") is not True:
        return
    if cfg.checkpoint is None:  # a run has what it was made of in its directory
        for key in FILES:
            value = OmegaConf.select(cfg, key)
            if value not in (None, "validation") and not (file := Path(value).expanduser()).is_file():
                what = "a directory" if file.is_dir() else "no such file"
                raise ConfigError(f"{key}={value}: {what}; expected a text file")
        encoder = cfg.task.get("encoder_checkpoint")
        if encoder is not None and not Path(encoder).expanduser().is_dir():
            check_weights("task.encoder_checkpoint", str(encoder))
    if cfg.task.data.get("root") is not None:
        _check_corpus(cfg)
    if OmegaConf.select(cfg, "task.model._target_") == TIMM:
        _check_timm(cfg)


def _check_corpus(cfg: DictConfig) -> None:
    """Refuse a `data_root` that lacks files which its reader needs; the reader says which."""
    data = cfg.task.data
    reader = definition(str(data._target_))
    layout = constant(f"{reader[0]}.LAYOUT") if reader else None
    if not isinstance(layout, str):
        return
    root = Path(data.root).expanduser()
    try:
        pkgutil.resolve_name(layout)(root, data)
    except DataError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(f"data_root={root}: cannot be read ({error.strerror}: {error.filename})") from error


def _check_timm(cfg: DictConfig) -> None:
    """Refuse a model or an optimizer that timm does not have. It imports timm, as the run does next."""
    import attnlab.torchvision_schemas  # noqa: F401  (before timm)

    import timm
    from timm.optim import list_optimizers

    for key, name in (("task.model.name", cfg.task.model.name), ("model", cfg.model or "")):
        model = name.partition(".")[0]
        if model and "/" not in name and not timm.is_model(model) and not Path(name).expanduser().exists():
            raise ConfigError(f"{key}={name}: timm has no such model{nearest(model, map(str, timm.list_models()))}")
    optimizer, known = cfg.task.optimizer.get("opt"), [str(name) for name in list_optimizers()]
    if optimizer is not None and optimizer.lower().removeprefix("lookahead_") not in known:
        raise ConfigError(f"task.optimizer.opt={optimizer}: timm has no such optimizer{nearest(optimizer, known)}")

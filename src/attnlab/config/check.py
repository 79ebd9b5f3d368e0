"""Check a whole command line before data or a model are loaded.

A typo must cost seconds. So nothing here imports torch: the configuration is composed with Hydra, classes are read as
source (`schema.py`), and the first problem is raised as a ConfigError of one line with the nearest valid names.
"""

import os
import pkgutil
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from attnlab.config import build as config
from attnlab.config.batch import check_batch
from attnlab.config.bounds import literals, marks
from attnlab.config.command_line import CommandLine, parse, parse_flags
from attnlab.config.compose import Composer
from attnlab.config.model import TIMM, check_model, check_weights
from attnlab.config.nearest import nearest
from attnlab.config.nodes import canonical, check_nodes, declared, mappings, targets
from attnlab.config.rules import check_relations, check_trainer
from attnlab.config.schema import File, ancestors, constant, definition
from attnlab.config.settings import MODES
from attnlab.errors import ConfigError, DataError

SLURM = "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher"
FOLDER = "task.evaluation.folder"  # its files of tasks name functions, which are run
READ_BY = {  # root keys that only some modes read
    "checkpoint": ("test", "predict", "generate", "evaluate", "describe", "export"),
    "prompt": ("generate",),
    "format": ("export",),
    "input": ("predict",),
    "output": ("predict",),
    "resume": ("train",),
    "baseline": ("train", "test", "compress"),
}
NEED_WEIGHTS = ("test", "predict", "generate", "evaluate")
# What a directory has that `checkpoint=` may name: a run's, a compressed model's, one of transformers.
USABLE = ("config.yaml", "record.json", "checkpoints", "compressed", "manifest.json", "config.json")
NUMBERED = "hydra.sweep.subdir=${hydra.job.num}"  # of jobs that use runs of several tasks
BUILT = {  # what Hydra builds, with the base of its classes, from its plugins alone
    "hydra.launcher": "hydra.plugins.launcher.Launcher",
    "hydra.sweeper": "hydra.plugins.sweeper.Sweeper",
    "hydra.sweeper.sampler": "optuna.samplers.BaseSampler",
}
PLUGINS = ("hydra._internal.core_plugins.", "hydra_plugins.", "optuna.samplers.")
RESERVED = (  # of Hydra's node: what runs code or commands, or names files; --config-dir cannot set it
    *("callbacks", "job.env_set", "job.name", "job_logging", "hydra_logging"),
    *(f"launcher.{name}" for name in ("setup", "srun_args", "python", "additional_parameters")),
    *("sweeper.params", "sweeper.custom_search_space"),
)


@dataclass(frozen=True)
class Job:
    """A job that uses or continues a run.

    Args:
        directory: where the job writes.
    """

    cfg: DictConfig
    choices: list[str]
    directory: str


@dataclass(frozen=True)
class Command:
    """A checked command line.

    Args:
        line: as it was parsed.
        jobs: the fixed configuration of each job; of a sweeper that searches, of one with the first values.
        texts: the settings of each job.
        hydra: the composed configuration of the first job, with Hydra's node.
        directory: of the run, or of the multirun.
        keeps: whether the run has a directory, with its record.
        here: whether the jobs run on this machine.
        for_hydra: the settings that Hydra is called with.
    """

    line: CommandLine
    jobs: list[DictConfig]
    texts: list[list[str]]
    hydra: DictConfig
    directory: Path
    keeps: bool
    here: bool
    for_hydra: list[str] = field(default_factory=list)


Loader = Callable[[Composer, Sequence[Override]], Job | None]


def check(words: Sequence[str], load: Loader | None = None, read_models: bool = True) -> Command:
    """Compose and check the jobs of a command line.

    Args:
        words: as in sys.argv[1:].
        load: gives the job of settings that use or continue a run, by the run's own configuration; None for any other
            settings. Without it everything is composed.
        read_models: whether the pretrained model that a configuration names is there, and decides the rest of it.

    Raises:
        ConfigError: the first error found, in one line.
    """
    flags = parse_flags(words)
    composer = Composer(flags.config_dir)
    with composer.hydra():
        line = parse(words, flags, composer)
        settings = line.jobs()
        loaded = [load(composer, job) if load else None for job in settings]
        of_hydra = [str(setting.input_line) for setting in line.settings if setting.key_or_group.startswith("hydra.")]
        composed = [
            composer.compose(of_hydra) if run else _complete(composer.job(job), job, read_models)
            for run, job in zip(loaded, settings, strict=True)
        ]
        check_cluster(composed, line.multirun)
        if flags.config_dir is not None:
            builtin = Composer().compose([]).hydra
            fixed = [setting for setting in line.settings if setting not in line.swept]  # Hydra composes these first
            for cfg in [*composed, *([composer.job(_of_groups(fixed, composer))] if line.swept else [])]:
                check_hydra(cfg.hydra, builtin, line.keys)
        jobs = [run.cfg if run else _fix(cfg, composer) for run, cfg in zip(loaded, composed, strict=True)]
        for job in jobs:
            _check_folder(job, line.keys)
        run = loaded[0]
        if line.multirun and any(job.resume is not None for job in jobs):
            raise ConfigError("resume= continues one run: leave -m out")
        if (flags.cfg or flags.info) and run:
            raise ConfigError("--cfg and --info show what is composed; a run that is loaded has its config.yaml")
        hydra = composed[0].hydra
        directory = Path(hydra.sweep.dir if line.multirun else hydra.run.dir)
        if run and not line.multirun and "hydra.run.dir" not in line.keys:
            directory = Path(run.directory)
        keeps = line.multirun or flags.cfg or "hydra.run.dir" in line.keys
        return Command(
            line,
            jobs,
            [[str(setting.input_line) for setting in job] for job in settings],
            composed[0],
            directory,
            bool(keeps or constant(f"attnlab.modes.{jobs[0].mode}.KEEPS") is not False),
            not flags.cfg and (hydra.launcher._target_ != SLURM or "SUBMITIT_EXECUTOR" in os.environ),
            [*line.for_hydra(), *_names_of_directories(loaded, line.keys)],
        )


def _of_groups(settings: Sequence[Override], composer: Composer) -> list[Override]:
    """The settings that choose options, or set keys of Hydra's."""
    return [s for s in settings if s.key_or_group in composer.groups or s.key_or_group.startswith("hydra")]


def _complete(cfg: DictConfig, settings: Sequence[Override], read_models: bool) -> DictConfig:
    """What the task makes of a composed configuration: the function that CONFIGURE names beside the class `task.kind`.

    It takes the configuration, the keys of the command line and `read_models`, and imports no torch for nothing.
    """
    defined = definition(str(OmegaConf.select(cfg, "task.kind._target_")))
    function = constant(f"{defined[0]}.CONFIGURE") if defined else None
    if not isinstance(function, str):
        return cfg
    completed: DictConfig = pkgutil.resolve_name(function)(cfg, [s.key_or_group for s in settings], read_models)
    return completed


def _names_of_directories(loaded: Sequence[Job | None], keys: Sequence[str]) -> list[str]:
    """Options of the runs that a multirun's jobs use, for the names of the jobs' directories."""
    first = loaded[0].choices if loaded[0] else []
    shared = [text for text in first if all(run is not None and text in run.choices for run in loaded)]
    chosen = [text for text in shared if text.partition("=")[0] not in keys]
    if first and "hydra.sweep.subdir" not in keys and any(run and run.choices != first for run in loaded):
        one_task = any(text.startswith("task=") for text in chosen)
        chosen.append(NUMBERED + "_${hydra.runtime.choices.task}" * one_task)
    return chosen


def check_cluster(jobs: Sequence[DictConfig], multirun: bool) -> None:
    """Refuse SLURM's launcher where it could not submit the jobs. Inside a job, which it has started, all is well."""
    if jobs[0].hydra.launcher._target_ != SLURM or "SUBMITIT_EXECUTOR" in os.environ:
        return
    if not multirun:
        raise ConfigError("hardware=slurm: jobs are submitted by -m, a single one too; on this machine: hardware=gpu")
    plugins = find_spec("hydra_plugins")  # a namespace that the first plugin makes
    if plugins is None or find_spec("hydra_plugins.hydra_submitit_launcher") is None:
        raise ConfigError("hardware=slurm: needs hydra-submitit-launcher; pip install 'attnlab[launch]'")
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "hardware=slurm: this machine has no sbatch; start the command on a login node of the cluster"
        )
    for name in ("devices", "num_nodes"):
        if len(values := {str(job.hardware[name]): None for job in jobs}) > 1:
            numbers = " and ".join(values)
            raise ConfigError(f"hardware.{name}={numbers}: expected one value for all jobs of a multirun on SLURM")


def check_hydra(hydra: DictConfig, builtin: DictConfig, keys: Sequence[str]) -> None:
    """Check what files of --config-dir make of Hydra's own node, of which Hydra builds objects and runs commands.

    Args:
        builtin: the node without these files.
        keys: those that the command line sets.

    Raises:
        ConfigError: names the key.
    """
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
            base, plugin = BUILT.get(path), str(target)
            if base is None or not plugin.startswith(PLUGINS) or canonical(base) not in ancestors(plugin):
                raise ConfigError(f"{path}._target_={target}: expected {base or 'no _target_'}, of a plugin of Hydra")


def _check_folder(job: DictConfig, keys: Sequence[str]) -> None:
    """Refuse a folder of tasks that a file names, a run's or one of --config-dir: only the command line may.

    Besides `!function`, which names a file beside that of the task, prompts are templates that can reach all of Python.
    """
    folder = OmegaConf.select(job, FOLDER)
    if job.mode == "evaluate" and folder is not None and FOLDER not in keys:
        raise ConfigError(
            f"{FOLDER}={folder}: a file of the configuration names this folder, and tasks can bring code; if the "
            f"folder is yours, give {FOLDER}=<folder> on the command line, or {FOLDER}=null for the harness's own tasks"
        )


def compose(*overrides: str) -> DictConfig:
    """The checked and fixed configuration of `python -m attnlab <overrides>`."""
    return check(overrides).jobs[0]


def _fix(cfg: DictConfig, composer: Composer) -> DictConfig:
    """Check a composed configuration as a whole, and return it resolved and read-only."""
    choices = cfg.hydra.runtime.choices
    missing = [key for key, raw in config.leaves(config.written(cfg)) if raw == "???" and not key.startswith("hydra.")]
    if missing:
        raise ConfigError(f"{missing[0]} has no default: give {missing[0]}=...")
    check_mode(cfg, choices.task)
    _check_task(cfg, composer)
    _check_references(cfg, composer)
    _check_knobs(cfg, composer)
    fixed = config.freeze(cfg, choices)
    check_fixed(fixed)
    return fixed


def check_fixed(cfg: DictConfig) -> None:
    """Check every node of a resolved configuration against its signature, and the keys that depend on each other."""
    check_trainer(cfg)
    check_nodes(config.written(cfg))
    check_relations(cfg)
    check_batch(cfg)


def check_mode(cfg: DictConfig, task: str) -> None:
    """Check that the mode exists, that the option `task` has it, and that it reads the root keys that are set."""
    if cfg.mode not in MODES:
        raise ConfigError(f"mode={cfg.mode}: no such mode{nearest(str(cfg.mode), MODES)}")
    every_task = [mode for mode in MODES if constant(f"attnlab.modes.{mode}.EVERY_TASK") is True]
    if cfg.mode not in (modes := list(dict.fromkeys([*cfg.task.modes, *every_task]))):
        raise ConfigError(f"mode={cfg.mode}: task={task} has no such mode; it has {', '.join(modes)}")
    for key, readers in READ_BY.items():
        if cfg[key] is not None and cfg.mode not in readers:
            raise ConfigError(f"{key}= is read by mode={' and mode='.join(readers)}, not by mode={cfg.mode}")
    for key in ("checkpoint", "resume", "baseline"):
        if cfg[key] is not None and not Path(cfg[key]).expanduser().exists():
            raise ConfigError(f"{key}={cfg[key]}: no such file or directory")
    if Path(cfg.cache_dir).expanduser().is_file():
        raise ConfigError(f"cache_dir={cfg.cache_dir}: a file; expected a directory, which is made if it is missing")
    if cfg.mode == "predict" and cfg.input is None:
        raise ConfigError("mode=predict needs input=<a text, a file or a folder>")
    _check_weights(cfg)
    if cfg.data_root == "":
        raise ConfigError("data_root is empty: name the corpus' directory, or leave it out for the sample corpus")
    if cfg.data_root is not None and "root" not in cfg.task.data:
        raise ConfigError(
            f"data_root={cfg.data_root}: task={task} generates its data and reads no corpus; remove data_root=, or "
            "unset the variable DATA_ROOT"
        )
    if cfg.checkpoint is not None:
        _check_checkpoint(str(cfg.checkpoint))


def _check_weights(cfg: DictConfig) -> None:
    """Refuse a mode without the weights that it needs."""
    untrained = cfg.task.modes[0] == "compress"  # such a task trains nothing: model= names what it has
    pretrained = cfg.task.get("weights") is not None  # a decoder, which can be used as it is
    if untrained and cfg.checkpoint is not None and cfg.model is not None:
        raise ConfigError(f"checkpoint={cfg.checkpoint} and model={cfg.model}: give one of them")
    if cfg.checkpoint is not None:
        return
    if cfg.mode == "export" and (cfg.model is None or pretrained):
        raise ConfigError("mode=export needs checkpoint=<a trained run>, or model=<a run of mode=compress>")
    if cfg.mode not in NEED_WEIGHTS:
        return
    choices = cfg.hydra.runtime.choices
    pretrained_images = OmegaConf.select(cfg, "task.model._target_") == TIMM and cfg.task.model.weights is not None
    if cfg.mode == "test" and pretrained_images and choices.compress == "none":
        return  # it is scored as it is
    if not ((untrained or pretrained) and cfg.model is not None):
        also = ", or model=<a run, a folder or a name of the hub>" * untrained
        raise ConfigError(f"mode={cfg.mode} needs checkpoint=<a run directory or a checkpoint file>{also}")
    if pretrained and choices.convert != "none":
        raise ConfigError(
            f"mode={cfg.mode} with convert={choices.convert}: a model is converted by mode=convert, or by training; "
            "give checkpoint=<that run>, or leave convert= out"
        )


def _check_checkpoint(value: str) -> None:
    """Refuse a directory that is no run's, and a file that holds no weights."""
    path = Path(value).expanduser()
    if not path.is_dir():
        check_weights("checkpoint", value)
    elif not any((path / name).exists() for name in USABLE):
        raise ConfigError(f"checkpoint={value}: not the directory of a run: there is no config.yaml")


def _check_task(cfg: DictConfig, composer: Composer) -> None:
    """Refuse groups that the task does not use, and a scale for which it has no recipe."""
    choices = cfg.hydra.runtime.choices
    follows = choices.recipe == f"{choices.task}_{choices.scale}"
    if follows and choices.scale not in (scales := composer.scales(choices.task)):
        raise ConfigError(f"task={choices.task} has no scale={choices.scale}{nearest(choices.scale, scales)}")
    if choices.attention is not None and "attention_heads" not in cfg.task:
        raise ConfigError(f"attention={choices.attention}: task={choices.task} brings its own attention; leave it out")
    if choices.compress != "none" and not cfg.task.get("compressible"):
        raise ConfigError(f"compress={choices.compress}: task={choices.task} has no pretrained model to compress")
    if cfg.mode == "compress" and choices.compress == "none" and cfg.task.modes[0] != "compress":
        methods = ", ".join(name for name in composer.options("compress") if name != "none")
        raise ConfigError(f"mode=compress needs compress=<method>, one of {methods}")
    if cfg.mode == "convert" and choices.convert == "none":
        raise ConfigError("mode=convert needs convert=<method>: mla, mtla, tpa or gqa")
    if choices.convert != "none" and cfg.task.get("weights") is None:
        raise ConfigError(f"convert={choices.convert}: task={choices.task} has no pretrained decoder to convert")
    if cfg.task.get("weights") is not None:
        return
    if cfg.model is not None and not any("${model}" in str(raw) for _, raw in config.leaves(config.written(cfg.task))):
        raise ConfigError(
            f"model={cfg.model}: task={choices.task} trains from random weights; imagenet, reasoning and tasks of "
            "language models begin with pretrained ones"
        )
    if cfg.model is not None:
        check_model(cfg.model, cfg.task.model._target_)


def _check_references(cfg: DictConfig, composer: Composer) -> None:
    """Refuse references of a measurement that are no mechanisms, and values of others."""
    if cfg.mode != "bench" or cfg.hydra.runtime.choices.attention is None:
        return
    known = ["published", "compiled", *composer.options("attention")]
    names = {str(name).partition(".")[0]: "" for name in cfg.bench.references or ()}
    plain = [re.sub("^(published|compiled)_", "", name) for name in names]
    for name, mechanism in zip(names, plain, strict=True):
        if mechanism not in known:
            raise ConfigError(f"bench.references: {name} is no mechanism{nearest(mechanism, known)}")
    for override in map(str, cfg.bench.overrides or ()):
        if "=" not in override or override.partition(".")[0] not in plain:
            raise ConfigError(f"bench.overrides: {override}: expected REFERENCE.KEY=VALUE, of one in bench.references")


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
        named = [name for name in chosen if not name.endswith("=none")]
        mechanism = " with ".join(named) or chosen[-1]
        raise ConfigError(f"{mechanism} has no {knob}; with one: {', '.join(having) or 'none'}")


def check_device(cfg: DictConfig) -> None:
    """Refuse a device that this machine cannot have, as far as that is known without torch."""
    wanted, apple, hardware = str(cfg.hardware.accelerator), sys.platform == "darwin", cfg.hardware
    cuda = wanted not in ("cpu", "mps") and config.has_driver()
    if (wanted in ("gpu", "cuda") and not cuda and not (wanted == "gpu" and apple)) or (wanted == "mps" and not apple):
        raise ConfigError(f"hardware.accelerator={wanted}: no such device here; take hardware=cpu or hardware=auto")
    if wanted in ("cpu", "auto") and isinstance(hardware.devices, ListConfig) and not cuda and not apple:
        raise ConfigError(f"hardware.devices={hardware.devices}: expected the number of processes on a CPU")
    if hardware.precision == "16-mixed" and not cuda:
        raise ConfigError("hardware.precision=16-mixed: float16 needs a CUDA device; take 32-true or bf16-mixed")


def check_present(cfg: DictConfig) -> None:
    """Refuse a job whose device, corpus or files are not on this machine, before a run directory is changed.

    Raises:
        ConfigError: names the key or the path, and what is expected there.
    """
    if cfg.mode not in ("describe", "export"):
        check_device(cfg)
    if constant(f"attnlab.modes.{cfg.mode}.READS_CORPUS") is not True:
        return
    if cfg.checkpoint is None:  # a run has what it was made of in its directory
        _check_files(config.written(cfg))
        encoder = cfg.task.get("encoder_checkpoint")
        if encoder is not None and not Path(encoder).expanduser().is_dir():
            check_weights("task.encoder_checkpoint", str(encoder))
    _check_corpus(cfg)


def _check_corpus(cfg: DictConfig) -> None:
    """Refuse a `data_root` that lacks files which its reader needs; the reader says which."""
    data = cfg.task.data
    reader = definition(str(data._target_))
    layout = constant(f"{reader[0]}.LAYOUT") if reader else None
    if data.get("root") is None or not isinstance(layout, str):
        return
    root = Path(data.root).expanduser()
    try:
        pkgutil.resolve_name(layout)(root, data)
    except DataError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(f"data_root={root}: cannot be read ({error.strerror}: {error.filename})") from error


def _check_files(root: Any) -> None:
    """Refuse a file that a node names and that does not exist."""
    for path, node in mappings(root):
        for key, value in node.items():
            names_file = isinstance(value, str) and any(_is_file(kind, value) for kind in declared(node, path, key))
            if names_file and not (file := Path(value).expanduser()).is_file():
                what = "a directory" if file.is_dir() else "no such file"
                raise ConfigError(f"{f'{path}.{key}' if path else key}={value}: {what}; expected a text file")


def _is_file(annotation: Any, value: str) -> bool:
    """Whether an annotation says that this value is the path of a file that must exist."""
    marked = any(isinstance(mark, File) for mark in marks(annotation))
    return marked and value not in literals(annotation)

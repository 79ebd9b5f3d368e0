"""The configuration of a run that is used (`checkpoint=`) or continued (`resume=`); it is never composed again.

A run directory may come from somebody else. So its config.yaml has no references, and a `_target_` in it names a class
of this package or one of a YAML file of the configuration.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from attnlab.config import build as config
from attnlab.config.check import Job, check_fixed
from attnlab.config.compose import TEXTS, Composer, assigned, check_value, flat, quoted, walk
from attnlab.config.nodes import check_nodes, targets
from attnlab.config.rules import USABLE, check_mode
from attnlab.config.schema import definition
from attnlab.errors import ConfigError, printable
from attnlab.run.directory import CONFIG, directory_of, near
from attnlab.run.identity import current, stable_name
from attnlab.run.record import UNREADABLE, first_process, recorded
from attnlab.run.store import OUTPUTS, entries

OF_THE_COMMAND = ("mode", "checkpoint", "resume", "format", "dtype", "baseline", *TEXTS)  # never the run's
ELSEWHERE = ("hardware", "bench", "logger")  # say where and how something is measured; they may be chosen again
FREE = (  # keys, and everything below them, that may be set with checkpoint= and resume=
    *OF_THE_COMMAND, *ELSEWHERE, "prove", "data_root", "cache", "cache_dir", "hydra", "trainer", "tags", "retry",
    "rerun",
    "task.decode", "task.decode_max_frames", "task.sampling", "task.score", "task.evaluation", "task.data.root",
    "task.data.cache_dir", "task.data.num_workers", "task.data.batch_size", "task.data.max_frames",
    "task.data.eval_batch_size",
)  # fmt: skip
WITH_CHECKPOINT = ("seed",)  # of what is drawn
LIMITS = ("task.train.max_steps", "task.train.max_epochs", "task.train.max_minutes")  # with resume=: a new run
FOLLOWING = {  # keys that were references to another
    "data_root": ("task.data.root",),
    "cache_dir": ("task.data.cache_dir",),
    "seed": ("task.data.seed", "task.sampling.seed"),
    "task.train.max_epochs": ("task.schedule.num_epochs",),
}
WITH_WEIGHTS = ("checkpoints", "compressed")  # folders of a run that checkpoint= can use
PACKAGES = ("attnlab.", "torch.optim.")  # whose classes a run may name
NAME = re.compile(r"\w[\w.+-]*(/\w[\w.+-]*)*")  # of an option: its file's path in the group, without the suffix
BUILT = ("attention", "task.kind", "task.data", "task.model", "task.optimizer")  # nodes with a _target_, or null
DAMAGED = (*UNREADABLE, OSError, OmegaConfBaseException, yaml.YAMLError)  # how a configuration of other values fails
PLACES = ("accelerator", "devices", "num_nodes", "strategy")  # of the hardware: this machine's, not the run's


def is_free(key: str, more: Sequence[str] = ()) -> bool:
    """Whether a key may be set with `checkpoint=` and `resume=`, or is one of `more` or below one."""
    return any(f"{key}.".startswith(f"{free}.") for free in (*FREE, *more))


def load(composer: Composer, overrides: Sequence[Override]) -> Job | None:
    """The job of a command line that names a run by `checkpoint=` or `resume=`; None for any other.

    ConfigError: the configuration of the run cannot be read, or an override would change it.
    """
    runs = {key: o.value() for o in overrides if (key := str(o.key_or_group)) in ("checkpoint", "resume")}
    named = [(key, str(value)) for key, value in runs.items() if value is not None]
    if len(named) > 1:
        raise ConfigError("checkpoint= uses a run and resume= continues one: give one of them")
    if not named:
        return None
    key, value = named[0]
    if key == "checkpoint" and (newest := newest_run(value)):
        value = str(newest)
        overrides = [*overrides, composer.parse(f"checkpoint={quoted(value)}")]  # the last one counts
    if (run := directory_of(key, value)) is None:
        return None
    try:
        return _Loading(composer, key, run).job(overrides)
    except DAMAGED as error:  # values of another kind than in every run
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ConfigError(f"{run / CONFIG}: not the configuration of a run ({reason})") from error


def newest_run(value: str) -> Path | None:
    """The run with weights that began last, in outputs/ for "latest", else in a folder that is no run itself.

    It is named on stderr. None: `value` names a run or weights. ConfigError: there is no such run.
    """
    path = Path(value).expanduser()
    if value.strip() and path.is_dir() and not any((path / name).exists() for name in USABLE):
        root = path
    elif value == "latest" and not path.exists():
        root = OUTPUTS
    else:
        return None
    usable = [run for run in entries(root) if (run.directory / CONFIG).is_file()]
    usable = [run for run in usable if any((run.directory / name).is_dir() for name in WITH_WEIGHTS)]
    if not usable:
        none = f"no run with weights in {root}" if root == OUTPUTS else "not the directory of a run"
        raise ConfigError(f"checkpoint={value}: {none}{', and no run with weights is in it' * (root != OUTPUTS)}")
    run = max(usable, key=lambda run: (run.started, run.directory))
    if first_process():
        others = f", the newest of {len(usable)} runs with weights" if len(usable) > 1 else ""
        print(printable(f"checkpoint={value}: {near(run.directory)} ({run.status}{others})"), file=sys.stderr)
    return run.directory


def configuration(run: str | Path, *settings: str, config_dir: str | None = None) -> DictConfig:
    """The fixed configuration of `attnlab mode=predict checkpoint=RUN <settings>`.

    The run may name classes of YAML files in `config_dir`. ConfigError: as :func:`load`, or `run` is no run.
    """
    composer = Composer(config_dir)
    with composer.hydra():
        path = Path(run).expanduser().absolute()
        texts = ["mode=predict", "input=''", f"checkpoint={quoted(str(path))}", *settings]
        if (job := load(composer, composer.settings(texts))) is None:
            raise ConfigError(f"{run}: not the directory of a run: there is no {CONFIG}")
        return job.cfg


class _Loading:
    """Makes the configuration of one job from a run's; `key` is "checkpoint" or "resume"."""

    def __init__(self, composer: Composer, key: str, run: Path) -> None:
        self.composer, self.key, self.run, self.path = composer, key, run, run / CONFIG
        self.saved = self._read()

    def job(self, overrides: Sequence[Override]) -> Job:
        for override in overrides:
            self.composer.check_form(override)
        overrides = list({str(override.key_or_group): override for override in overrides}.values())  # the last counts
        chosen = [o for o in overrides if o.key_or_group in config.GROUPS]
        values = [o for o in overrides if o not in chosen and not str(o.key_or_group).startswith(("hydra.", "hydra/"))]
        elsewhere = [o for o in chosen if o.key_or_group in ELSEWHERE]
        overlays: dict[str, Any] = {}
        for override in chosen:
            group, name = str(override.key_or_group), override.value()
            if group == "experiment" and name != self.saved["choices"].get(group):
                overlays |= self._overlay(str(name))
            elif override not in elsewhere:
                self._agree(group, name, self.saved["choices"].get(group))
        cfg = self._with_today(elsewhere)
        changed = self._change(cfg, overlays, values)
        config.closed(cfg)
        check_mode(cfg, cfg.choices.task)
        if self.key == "resume":
            self._check_continues(changed)
        try:
            check_nodes(config.written(cfg))  # what the command sets was checked as it was set
        except ConfigError as error:
            raise ConfigError(f"{self.path}: {error}") from error
        check_fixed(cfg)
        return Job(cfg, self._directory(cfg, changed))

    # --- the run's configuration --------------------------------------------------------------------------------

    def _read(self) -> dict[str, Any]:
        """The run's configuration in today's words, of plain values."""
        saved: dict[str, Any] = current(yaml.safe_load(self.path.read_text(encoding="utf-8")))
        for key in BUILT:
            value, _, rest = walk(saved, key)
            if not rest and value is not None and not value.keys() & {"_target_", "pattern"}:
                raise ConfigError(f"{self.path}: {key}._target_ is missing: not the configuration of a run")
        for group, chosen in saved["choices"].items():
            for name in chosen if group in config.LISTS and isinstance(chosen, list) else [chosen]:
                if name is not None and not (isinstance(name, str) and NAME.fullmatch(name)):
                    raise ConfigError(f"{self.path}: choices.{group}={chosen}: expected the name of an option")
        for key, value in config.leaves(saved):
            if isinstance(value, str) and "${" in value:
                raise ConfigError(f"{self.path}: {key} is a reference ({value}); the configuration of a run has none")
        for path, target in targets(saved):  # `check_fixed` then asks for the base that each place expects
            if not isinstance(target, str) or not self._is_known(target):
                raise ConfigError(
                    f"{self.path}: {path}._target_={target} is no class of attnlab or of its configuration, and a run "
                    "directory cannot bring code; if it is yours, give --config-dir=<the directory whose YAML file "
                    "names it>"
                )
        return saved

    def _is_known(self, target: str) -> bool:
        source = definition(target)
        ours = target.startswith(PACKAGES) and source and source[0].startswith(PACKAGES)
        return bool(ours) or stable_name(target) in self._named

    @cached_property
    def _named(self) -> set[str]:
        """The stable names of all `_target_` in YAML files."""
        files = [file for directory in self.composer.directories for file in directory.rglob("*.yaml")]
        return {stable_name(name) for file in files for name in re.findall(r"_target_: *([\w.]+)", file.read_text())}

    # --- what the command adds ----------------------------------------------------------------------------------

    def _with_today(self, elsewhere: Sequence[Override]) -> DictConfig:
        """The run's configuration with the command's keys, this machine's hardware and defaults of later keys."""
        today = self.composer.compose([str(o.input_line) for o in elsewhere])
        chosen = {str(o.key_or_group) for o in elsewhere}
        root = {key: config.written(today[key]) for key in today if key != "hydra"}
        saved = dict(self.saved)
        for key in OF_THE_COMMAND:
            saved[key] = None
        saved["mode"] = "train" if self.key == "resume" else ""
        saved["model"] = saved.get("model") if self.key == "resume" else None  # checkpoint= takes its place
        saved["hardware"] = {**root["hardware"], **saved["hardware"]}
        if self.key == "checkpoint" or "hardware" in chosen:
            everything = "hardware" in chosen and self.key == "checkpoint"
            names = root["hardware"] if everything else PLACES
            saved["hardware"] |= {name: root["hardware"][name] for name in names}
        if self.key == "checkpoint" or "logger" in chosen:
            saved["logger"] = root["logger"]  # what uses a run does not add to its curves
        saved |= {"bench": root["bench"], "prove": root["prove"]}
        for missing in map(str, root.keys() - saved.keys()):
            added = today[missing]
            saved[missing] = OmegaConf.to_container(added, resolve=True) if OmegaConf.is_config(added) else added
        saved["choices"] = {group: saved["choices"].get(group) for group in config.GROUPS}
        saved["choices"] |= {group: today.hydra.runtime.choices[group] for group in chosen}
        if not Path(str(saved["cache_dir"])).is_dir():  # of another machine
            saved["cache_dir"] = str(Path(str(today.cache_dir)).expanduser())
            saved["task"].get("data", {})["cache_dir"] = saved["cache_dir"]
        return OmegaConf.create(saved)

    def _overlay(self, name: str) -> dict[str, Any]:
        """The keys that an experiment's file sets; its options must be the run's.

        Its task may be another one if the file sets only free keys, such as those of `mode=evaluate`.
        """
        overlay = yaml.safe_load(self.composer.text("experiment", name)) or {}
        defaults = overlay.pop("defaults", [])
        settings = dict(flat("", overlay)) if overlay else {}
        any_task = bool(settings) and all(self._is_free(key) and not walk(self.saved, key)[2] for key in settings)
        for entry in defaults:
            for group, option in entry.items() if isinstance(entry, Mapping) else ():
                group = group.rpartition("/")[2]
                if not (any_task and group == "task"):
                    self._agree(group, option, self.saved["choices"].get(group))
        return settings

    def _change(self, cfg: DictConfig, overlays: Mapping[str, Any], overrides: Sequence[Override]) -> list[str]:
        """Set what may be set; the limits of training that were set."""
        plain, changed = config.written(cfg), []
        pairs = [pair for override in overrides for pair in assigned(plain, override)]
        for key, value in [*overlays.items(), *pairs]:
            if key not in TEXTS and "${" in str(value):
                raise ConfigError(f"{key}={value}: with {self.key}= give a value, not a reference")
            check_value(config.written(cfg), key, value)
            before, _, rest = walk(plain, key)
            if self._is_free(key):
                OmegaConf.update(cfg, key, value, force_add=True)
                for other in FOLLOWING.get(key, ()):
                    if not walk(plain, other)[2] and OmegaConf.select(cfg, other) == before:
                        OmegaConf.update(cfg, other, value)
                changed += [key] if key in LIMITS and before != value else []
            else:
                self._agree(key, value, None if rest else before, known=not rest)
        if self.key == "checkpoint" and not cfg.mode:
            raise ConfigError(f"checkpoint={self.run}: say what to do with the run, for instance mode=test")
        return changed

    def _check_continues(self, changed: Sequence[str]) -> None:
        """Refuse to continue a finished run as it is."""
        if not (self.run / "checkpoints" / "last.ckpt").is_file():
            raise ConfigError(f"resume={self.run}: nothing to resume; expected a run that saved checkpoints/last.ckpt")
        if recorded(self.run).get("status") == "finished" and not changed:
            raise ConfigError(
                f"resume={self.run}: the run is finished; raise task.train.max_steps or max_epochs to train further, "
                f"or score it with mode=test checkpoint={self.run}"
            )

    def _is_free(self, key: str) -> bool:
        more = LIMITS if self.key == "resume" else WITH_CHECKPOINT
        if self.key == "resume" and key in ("hardware.precision", "hardware.tf32"):
            return False
        return is_free(key, more)

    def _agree(self, key: str, value: Any, before: Any, known: bool = True) -> None:
        """Refuse a value that is not the run's, which is `before`. `known`: the run has the key."""
        if known and value == before:
            return
        value_there = "null" if before is None else before
        may = "decoding, paths, hardware, bench and logger"
        may += ", and task.train.max_steps, max_epochs or max_minutes," if self.key == "resume" else ""
        raise ConfigError(
            f"{key}={value}: {self.key}= takes the configuration of its run, which has {key}={value_there}; "
            f"leave {key}= out, or train another run ({may} may be given)"
        )

    def _directory(self, cfg: DictConfig, changed: list[str]) -> str:
        """The directory of the job: that of the run if it continues unchanged, else a new one."""
        if self.key == "resume" and not changed:
            return str(self.run)
        stamp = os.environ.get("ATTNLAB_STAMP") or datetime.now().strftime("%Y-%m-%d_%H-%M-%S_%f")
        corpus, made = (config.RESOLVERS[name](_root_=cfg) for name in ("corpus", "made"))
        return f"outputs/{corpus}/{made}/{stamp}"

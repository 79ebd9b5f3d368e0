"""What `resume=RUN` may change: a continued run is one run, so everything that shapes its numbers stays as it was."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from attnlab.config.build import leaves
from attnlab.errors import ConfigError
from attnlab.runs.identity import canonical

LIMITS = ("task.train.max_steps", "task.train.max_epochs", "task.train.max_minutes")  # how long a run trains
FOLLOWS = ("task.schedule.num_epochs",)  # is `max_epochs`, where a schedule has it
FREE = (  # when and how a run is validated and scored
    "task.train.validate_",
    "task.train.monitor",
    "task.train.keep_best",
    "task.decode",
    "task.score",
    "task.sampling",
    "task.evaluation",
)


def check_resumed(cfg: DictConfig) -> None:
    """Refuse `resume=` with another recipe or seed, and of a run that is finished.

    Limits of training may be raised, hardware may change, and so may validation and scoring.

    Args:
        cfg: the fixed configuration; nothing is checked without `resume`.

    Raises:
        ConfigError: names the keys that differ from the run's config.yaml, or says that nothing is left to train.
    """
    if cfg.resume is None:
        return
    path = Path(cfg.resume) / "config.yaml"
    try:
        old = yaml.safe_load(path.read_text(encoding="utf-8"))
        before = _values(old)
    except FileNotFoundError:
        return  # the checkpoint alone: its own identity is compared when it is loaded
    except (OSError, ValueError, yaml.YAMLError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: not the configuration of a run ({' '.join(str(error).split())})") from error
    now = _values(OmegaConf.to_container(cfg, resolve=True))
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    wrong = [key for key in changed if key not in (*LIMITS, *FOLLOWS) and not key.startswith(FREE)]
    if wrong:
        told = ", ".join(f"{key}={before.get(key)}" for key in wrong[:3]) + (", ..." if len(wrong) > 3 else "")
        raise ConfigError(
            f"resume={cfg.resume}: the run was started with {told}; give the same values, "
            "or leave resume= out to start a new run"
        )
    if not set(changed) & set(LIMITS) and _status(path.with_name("record.json")) == "finished":
        raise ConfigError(
            f"resume={cfg.resume}: the run is finished; raise task.train.max_steps or max_epochs to train further, "
            f"or score it with mode=test checkpoint={cfg.resume}"
        )


def _values(config: Any) -> dict[str, Any]:
    """The seed and every value that counts for the recipe, by its dotted key."""
    return {"seed": config["seed"], **dict(leaves(canonical(config, weights={})))}


def _status(path: Path) -> str | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # no record, or a broken one: the run did not finish
    return record.get("status") if isinstance(record, Mapping) else None

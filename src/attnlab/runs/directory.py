"""The directory of a run that `checkpoint=` or `resume=` names, and how its configuration is read: as data."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from attnlab.errors import ConfigError

CONFIG = "config.yaml"


def directory_of(key: str, value: str) -> Path | None:
    """The run directory that a path names, itself or by a file in its checkpoints/; None where it names none.

    Args:
        key: `checkpoint` or `resume`, for the errors.
        value: the path that was given.

    Raises:
        ConfigError: there is no such path, or the directory has checkpoints and no configuration, or `resume=` names
            no run.
    """
    if not value.strip():
        raise ConfigError(f"{key}= is empty: name the directory of a run, or leave it out")
    path = Path(value).expanduser().absolute()
    if not path.exists():
        raise ConfigError(f"{key}={value}: no such file or directory")
    places = [path] if path.is_dir() else [path.parent, path.parent.parent]
    found = next((place for place in places if (place / CONFIG).is_file()), None)
    if key == "resume" and (found is None or not path.is_dir()):
        raise ConfigError(
            f"resume={value}: {'a file' if path.is_file() else f'no run: it has no {CONFIG}'}; resume= takes the "
            f"directory of a run, with {CONFIG} and checkpoints/last.ckpt"
        )
    if found is not None:
        _check_kinds(found)
    if found is None and path.is_dir() and (path / "checkpoints").is_dir():
        raise ConfigError(f"{path / CONFIG}: no such file; a run directory has it: copy the whole directory")
    if found is None and key == "resume":
        raise ConfigError(f"resume={value}: not the directory of a run: there is no {CONFIG}")
    return found


def _check_kinds(run: Path) -> None:
    """Refuse a run whose record is no file with an object, or whose checkpoints are no directory."""
    record, checkpoints = run / "record.json", run / "checkpoints"
    if checkpoints.exists() and not checkpoints.is_dir():
        raise ConfigError(f"{checkpoints}: a file; expected the directory of the run's checkpoints")
    if record.exists() and not record.is_file():
        what = "a directory" if record.is_dir() else "no regular file"
        raise ConfigError(f"{record}: {what}; expected the run's record, a file")
    try:
        found = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    except (OSError, ValueError, RecursionError):
        return  # cut short: the run did not finish
    if not isinstance(found, Mapping):
        raise ConfigError(f"{record}: expected the record of a run, a JSON object; found {type(found).__name__}")


class PlainLoader(yaml.SafeLoader):
    """Without aliases: a few lines of them can stand for endless or for billions of values."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.YAMLError(f"line {event.start_mark.line + 1}: an alias, *{event.anchor}")
        return super().compose_node(parent, index)

"""What a job needs of this machine: its device, its corpus, and the files that it names. No library is loaded.

A class that reads a corpus says in the constant LAYOUT of its module which function checks the files of a directory;
the modules of these functions do not import torch. A file that a signature annotates with `File` must exist.
"""

import pkgutil
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from attnlab.config.annotation import File, literals, marks
from attnlab.config.build import written
from attnlab.config.compose import declared
from attnlab.config.hardware import check_device
from attnlab.config.model import check_weights
from attnlab.config.schema import constant, definition
from attnlab.errors import ConfigError, DataError


def check_present(cfg: DictConfig) -> None:
    """Refuse a job whose device, corpus or files are not on this machine.

    Raises:
        ConfigError: names the key or the path, and what is expected there.
    """
    check_device(cfg)
    if constant(f"attnlab.modes.{cfg.mode}.READS_CORPUS") is not True:
        return
    if cfg.checkpoint is None:  # a run has what it was made of in its directory
        _check_files(written(cfg), "")
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


def _check_files(node: Any, path: str) -> None:
    """Refuse a file that a node names and that does not exist."""
    if isinstance(node, dict):
        for key, value in node.items():
            here = f"{path}.{key}" if path else str(key)
            named = isinstance(value, str) and any(_is_file(one, value) for one in declared(node, path, key))
            if named and not (file := Path(value).expanduser()).is_file():
                what = "a directory" if file.is_dir() else "no such file"
                raise ConfigError(f"{here}={value}: {what}; expected a text file")
            _check_files(value, here)


def _is_file(annotation: Any, value: str) -> bool:
    """Whether an annotation says that this value is the path of a file that must exist."""
    marked = any(isinstance(mark, File) for mark in marks(annotation))
    return marked and value not in literals(annotation)

"""mode=export model=RUN: write a compressed language model as a plain Hugging Face checkpoint."""

import logging
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from attnlab.compression import folder
from attnlab.errors import ConfigError
from attnlab.pretrained import huggingface

log = logging.getLogger(__name__)

EXPORTED = "exported"  # the folder of the run with the checkpoint


def run(cfg: DictConfig, record: dict[str, Any], directory: Path) -> None:
    """Multiply the factors out and write what transformers loads without attnlab, with the tokenizer if there is one.

    Args:
        cfg: the run's whole configuration, resolved; `model` is a run with a compressed model, or its folder.
        record: gets `exported`, the folder.
        directory: the run's; the checkpoint is its folder `exported`.

    Raises:
        ConfigError: `model=` names no compressed model, one that is no language model, or one that a dense model
            cannot hold exactly.
        DataError: the folder is damaged.
        WriteError: the checkpoint cannot be written.
    """
    source = folder.find(cfg.model) if cfg.model else None
    if source is None:
        given = f"model={cfg.model}" if cfg.model else "model= is not given"
        raise ConfigError(f"mode=export: {given}; give a run of mode=compress, or its folder {folder.COMPRESSED}")
    words = str(source) if (source / "tokenizer_config.json").is_file() else None
    huggingface.export(folder.densified(source), directory / EXPORTED, words)
    if words is None:
        log.warning("%s has no tokenizer; the checkpoint has none", source)
    record["exported"] = str(directory / EXPORTED)
    print(directory / EXPORTED)

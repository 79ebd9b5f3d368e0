"""conversion.json of a run directory: the configuration of each layer's converted attention, and the report."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnlab.config.batch import counted
from attnlab.config.nodes import check_nodes
from attnlab.conversion.base import attention_of
from attnlab.conversion.layers import STORED
from attnlab.errors import ConfigError, DataError
from attnlab.models.decoder import Decoder
from attnlab.run.files import write_text

CONVERSION = "conversion.json"


def write_layers(
    path: Path, nodes: Sequence[Mapping[str, Any]], about: Mapping[str, Any] | None = None, stored: Path | None = None
) -> None:
    """Write conversion.json.

    Args:
        nodes: `_target_` and arguments of each layer's attention.
        about: the record's section `conversion`, for a resumed run.
        stored: the cache folder with the finished layers.
    """
    content = {"layers": list(nodes), "about": about, "stored": stored and stored.name}
    write_text(path, json.dumps(content, indent=1) + "\n")


def read_layers(path: Path) -> list[dict[str, Any]]:
    """The checked nodes of all layers; nothing in them is imported or called. DataError: the file is damaged."""
    try:
        nodes = json.loads(path.read_text(encoding="utf-8"))["layers"]
        assert isinstance(nodes, list) and all(isinstance(node, dict) and "_target_" in node for node in nodes)
    except (OSError, ValueError, LookupError, TypeError, AssertionError, RecursionError) as error:
        why = " ".join(str(error).split())[:100] or "no list of nodes"
        raise DataError(f"{path}: not the layers of a converted model ({why}); copy the run directory again") from error
    for number, node in enumerate(nodes):
        kind = str(node["_target_"])
        if not kind.startswith("attnlab.attention."):
            raise DataError(f"{path}: {kind} is no mechanism of attnlab")
        if "${" in json.dumps(node) or "_partial_" in node:
            raise DataError(f"{path}: layer {number}: has an interpolation or _partial_; expected plain values")
        try:
            check_nodes({"attention": node})
        except ConfigError as error:
            raise DataError(f"{path}: layer {number}: {error}") from error
    return nodes


def read_about(path: Path) -> dict[str, Any] | None:
    """The record's section `conversion`, without the training; None if a valid file lacks it."""
    about = json.loads(path.read_text(encoding="utf-8")).get("about")
    return about if isinstance(about, dict) else None


def remove_stored(path: Path, cache_dir: Path) -> None:
    """Remove the finished layers of a run's file `path` from the cache, after the run has saved its weights."""
    name = json.loads(path.read_text(encoding="utf-8")).get("stored")
    if isinstance(name, str) and re.fullmatch("[0-9a-f]+", name):
        shutil.rmtree(cache_dir / STORED / name, ignore_errors=True)  # another run may be removing it too


def with_layers(decoder: Decoder, path: Path) -> Decoder:
    """Replace a decoder's attention by the mechanisms of a conversion.json, with random weights.

    DataError: the file is damaged, or of another model.
    """
    nodes = read_layers(path)
    if len(nodes) != (count := len(decoder.blocks)):
        raise DataError(f"{path}: has {counted(len(nodes), 'layer')}, and the model {count}: it is of another run")
    try:
        return replaced(decoder, nodes)
    except ConfigError as error:
        raise DataError(f"{path}: {error}") from error


def replaced(decoder: Decoder, nodes: Sequence[Mapping[str, Any]]) -> Decoder:
    """Replace the attention of each layer of a decoder by that of a node, with random weights, in place."""
    for block, node in zip(decoder.blocks, nodes, strict=True):
        block.attention = attention_of(node)
    return decoder

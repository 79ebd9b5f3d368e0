"""Check what is built: that each class exists and belongs there, and that each key is declared and its value fits."""

from collections.abc import Mapping
from typing import Any

from attnlab.config.compose import declared, require
from attnlab.config.nearest import nearest
from attnlab.config.schema import siblings, signature
from attnlab.config.settings import OPEN, SCHEMAS, owner
from attnlab.config.targets import check_targets
from attnlab.errors import ConfigError


def check_nodes(plain: Mapping[str, Any]) -> None:
    """Check every node of a configuration, or of a part of it.

    Args:
        plain: nested mappings, lists and values, from the root: `{"attention": {...}}`.

    Raises:
        ConfigError: names the key and what is expected.
    """
    check_targets(plain)
    _check_nodes(plain, "")


def _check_nodes(node: object, path: str) -> None:
    """Check that every `_target_` exists, and that every key of a node is declared and its value fits."""
    if isinstance(node, list):
        for i, item in enumerate(node):
            _check_nodes(item, f"{path}.{i}")
    if not isinstance(node, dict):
        return
    if owner(node, path):
        _check_node(node, path)
    for key, child in node.items():
        _check_nodes(child, f"{path}.{key}" if path else str(key))


def _check_node(node: dict[str, object], path: str) -> None:
    target = owner(node, path)
    try:
        found = signature(target)
    except LookupError as error:
        hint = nearest(target, siblings(target))
        raise ConfigError(f"{path}._target_={target}: no such class{hint}") from error
    is_open = SCHEMAS.get(path) in OPEN or (found is not None and found.open)
    for key, value in node.items():
        if found is None or key in ("_target_", "_partial_"):
            continue
        here = f"{path}.{key}" if path else key
        if key not in found.parameters and not is_open:
            hint = nearest(key, found.parameters)
            raise ConfigError(f"{here}: {target.rpartition('.')[2]} has no parameter {key!r}{hint}")
        if not (isinstance(value, dict) and "_target_" in value):
            for annotation in declared(node, path, key):
                require(here, annotation, value)

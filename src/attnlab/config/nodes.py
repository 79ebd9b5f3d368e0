"""Check what is built: that each class exists and belongs there, and that each key is declared and its value fits."""

from collections.abc import Mapping
from typing import Any

from attnlab.config.annotation import fits, literals, surely_fits, words
from attnlab.config.nearest import matches, nearest
from attnlab.config.rules import FOREIGN
from attnlab.config.schema import siblings, signature
from attnlab.config.settings import OPEN, SCHEMAS, owner
from attnlab.config.targets import annotated, check_targets, place_of
from attnlab.errors import ConfigError


def parameters(target: str) -> Mapping[str, Any]:
    """A target's parameters; none if there is no such target, which another check reports."""
    try:
        schema = signature(target) if target else None
    except LookupError:
        schema = None
    return schema.parameters if schema else {}


def declared(node: Any, path: str, name: str) -> list[Any]:
    """The annotations of a node's key: of its class or schema, and of another library's argument in `rules.FOREIGN`."""
    key = f"{path}.{name}" if path else name
    annotation = parameters(owner(node, path)).get(name) if isinstance(node, dict) else None
    return [*([annotation] if annotation is not None else []), *([FOREIGN[key]] if key in FOREIGN else [])]


def require(key: str, annotation: Any, value: Any) -> None:
    """Raise ConfigError if a value does not fit an annotation."""
    if not fits(annotation, value):
        close = matches(str(value), [str(literal) for literal in literals(annotation)])
        hint = f"; nearest: {close[0]}" if close else ""
        raise ConfigError(f"{key}={'null' if value is None else value}: expected {words(annotation)}{hint}")


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
    if isinstance(node, dict) and owner(node, path):
        _check_node(node, path)
    for key, child in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        _check_nodes(child, f"{path}.{key}" if path else str(key))


def _check_node(node: dict[str, object], path: str) -> None:
    target = owner(node, path)
    try:
        schema = signature(target)
    except LookupError as error:
        raise ConfigError(f"{path}._target_={target}: no such class{nearest(target, siblings(target))}") from error
    if schema is None:
        return
    is_open = SCHEMAS.get(path) in OPEN or schema.open
    for key in (key for key in node if key not in ("_target_", "_partial_")):
        value, here = node[key], f"{path}.{key}" if path else key
        if key not in schema.parameters and not is_open:
            hint = nearest(key, schema.parameters)
            raise ConfigError(f"{here}: {target.rpartition('.')[2]} has no parameter {key!r}{hint}")
        if isinstance(value, dict) and "_target_" in value:
            continue
        annotations = declared(node, path, key)
        for annotation in annotations:
            require(here, annotation, value)
        if annotations and isinstance(value, int | float | str) and not any(surely_fits(a, value) for a in annotations):
            place = place_of(here) or annotated(target, key)
            if place and (place_of(here) or all(base.startswith("attnlab.") for base in place.bases)):
                raise ConfigError(f"{here}={value}: expected {place}")

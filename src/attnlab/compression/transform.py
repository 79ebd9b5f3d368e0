"""Compression of a model in place, and conversion of a compressed model into a dense one.

Finished units are stored under a digest of the weights that they read and of the method's settings: an interrupted
compression continues after the last finished unit, and a repeated one computes nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.compression.keep import with_budget
from attnlab.compression.methods.base import Change, Method, Place, Unit, Watch
from attnlab.compression.modules.base import Replacement, build, describe
from attnlab.compression.modules.linear import Fused
from attnlab.errors import ConfigError
from attnlab.pretrained import Layer, Projection, family_of, replace
from attnlab.run.cache import read_tensors, stored, write_tensors
from attnlab.run.console import progress

log = logging.getLogger(__name__)

VERSION = 3  # increase it when the same weights and settings give other factors
ROUNDING = 1e-6  # relative error above which a dense form is not exact


def compress(model: nn.Module, method: Method, store: Path | None = None) -> list[dict[str, Any]]:
    """Compress a model in place, in its dtype.

    Args:
        store: cache folder of finished units (:mod:`attnlab.run.cache`); None: nothing is stored.

    Returns:
        A report for each unit: path, the method's report (ranks, relative errors, history of errors), seconds, and
        `stored` if it was read from the store.

    Raises:
        ConfigError: as :meth:`Method.units`; the model is then unchanged.
    """
    layers = family_of(model).layers(model)
    units = with_budget(method, model, layers).units(model, layers)
    reports: list[dict[str, Any]] = []
    placed: dict[str, Replacement] = {}
    with progress("compressing", len(units)) as advance:
        for unit in units:

            def watch(what: str, done: int, most: int, path: str = unit.path) -> None:
                advance(0, what=f"compressing {path}, {what} {done} of {most}")

            change = _computed(unit, watch) if store is None else _stored(model, unit, store, watch)
            placed |= _apply(model, layers, change)
            report = change.report
            reports.append({"path": unit.path, **report})
            advance(1)
            numbers = {key: value for key, value in report.items() if isinstance(value, int | float)}
            log.info("%s: %s", unit.path, ", ".join(f"{key} {value:.4g}" for key, value in numbers.items()))
    _bind(model, placed)
    return reports


def outline(model: nn.Module, method: Method) -> None:
    """Replace modules as `compress` does, with any weights, for counting; also on the meta device."""
    layers = family_of(model).layers(model)
    placed: dict[str, Replacement] = {}
    for unit in with_budget(method, model, layers).units(model, layers):
        placed |= _apply(model, layers, unit.outline())
    _bind(model, placed)


def install(model: nn.Module, modules: Mapping[str, Replacement]) -> None:
    """Put modules at their paths, and bind them to each other."""
    for path, module in modules.items():
        replace(model, path, module)
    _bind(model, modules)


def replacements(model: nn.Module) -> dict[str, Replacement]:
    """The outermost compressed modules of a model, by path."""
    placed: dict[str, Replacement] = {}
    for path, module in model.named_modules():
        if isinstance(module, Replacement) and not any(path.startswith(f"{outer}.") for outer in placed):
            placed[path] = module
    return placed


def densify(model: nn.Module, dense: nn.Module, *, exact: bool = True) -> nn.Module:
    """Overwrite a model of the original architecture with weights equivalent to the compressed ones.

    Args:
        exact: False: use the nearest weights if none are exact, and log a warning with the error.

    Raises:
        ConfigError: with `exact`, a head whose effective query-key matrix has a higher rank than a dense head is wide
            (a free fusion, CP SlimAtt); or `dense` is of another architecture.
    """
    layers = family_of(dense).layers(dense)
    places = {projection.path: projection for layer in layers for projection in layer.projections.values()}
    attentions = {layer.attention: layer for layer in layers}
    placed = replacements(model)
    for path, module in placed.items():
        matrices, error = module.dense()
        if error > ROUNDING and exact:
            raise ConfigError(
                f"{path}: its heads mix to a higher rank than a dense head has (relative error {error:.2g}); "
                "exact=False uses the nearest weights"
            )
        if error > ROUNDING:
            log.warning("%s: not exact, relative error %.2g", path, error)
        for name, (weight, bias) in matrices.items():
            place = attentions[path].projections[name] if name else dataclasses.replace(places[path], rows=None)
            place.write(dense, weight, bias)
    inside = tuple(f"{path}." for path in placed)
    rest = {key: value for key, value in model.state_dict().items() if not key.startswith(inside)}
    if unknown := rest.keys() - dense.state_dict().keys():
        raise ConfigError(f"{type(dense).__name__} has no {min(unknown)}: it is of another architecture")
    dense.load_state_dict(rest, strict=False)
    return dense


def _apply(model: nn.Module, layers: list[Layer], change: Change) -> dict[str, Replacement]:
    """Apply a unit's change, and return the new modules by path."""
    placed = dict(change.modules)
    by_layer = {layer.path: layer.projections for layer in layers}
    fused: dict[str, dict[Place, Replacement]] = {}
    for place, new in change.projections.items():
        projection = by_layer[place[0]][place[1]]
        if isinstance(new, Tensor):
            projection.write(model, new)
        elif projection.rows is None:
            placed[projection.path] = new
        else:
            fused.setdefault(projection.path, {})[place] = new
    for path, parts in fused.items():
        members = {
            (layer.path, name): projection
            for layer in layers
            for name, projection in layer.projections.items()
            if projection.path == path
        }
        placed[path] = Fused(
            [parts.get(place) or _slice(model, projection) for place, projection in members.items()],
            [list(projection.rows or ()) for projection in members.values()],
        )
    for path, module in placed.items():
        like, training = _like(model, path)
        if not like.is_meta:
            module.to(like.device, like.dtype)
        replace(model, path, module.train(training))
    return placed


def _slice(model: nn.Module, projection: Projection) -> nn.Linear:
    """The linear layer of a projection that stays dense in a fused module."""
    bias, weight = projection.read_bias(model), projection.read(model)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device=weight.device)
    linear.to(weight.dtype).load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))
    return linear


def _like(model: nn.Module, path: str) -> tuple[Tensor, bool]:
    """The first parameter and the training mode of the module at a path, or of the nearest parent with parameters."""
    while True:
        try:
            module = model.get_submodule(path)
            return next(module.parameters()), module.training
        except (AttributeError, StopIteration):
            path = path.rpartition(".")[0]


def _bind(model: nn.Module, modules: Mapping[str, Replacement]) -> None:
    for path, module in modules.items():
        module.bind(model, path)
    if modules and hasattr(model, "save_pretrained"):
        vars(model)["save_pretrained"] = partial(_save_pretrained, model)


def _save_pretrained(model: Any, *arguments: Any, **options: Any) -> None:
    """`save_pretrained` with a ConfigError for a compressed model, whose folder transformers could not load."""
    if placed := replacements(model):
        raise ConfigError(
            f"{next(iter(placed))} is compressed: a folder of save_pretrained could not be loaded; use "
            "attnlab.compression.save for the factors, mode=export (or densify) for plain dense weights"
        )
    type(model).save_pretrained(model, *arguments, **options)


# --- the store of finished units --------------------------------------------------------------------------------


def _key(model: nn.Module, unit: Unit) -> str:
    """The digest of a unit's settings and paths, and of the weights and plain values of the modules that it reads."""
    settings: list[Any] = [VERSION, unit.path, list(unit.reads), dict(unit.settings)]
    key = hashlib.sha256()
    for path in unit.reads:
        module = model.get_submodule(path)
        plain = {name: value for name, value in vars(module).items() if isinstance(value, int | float)}
        settings.append(sorted((plain | {"training": False}).items()))
        for name, value in sorted(module.state_dict().items()):
            key.update(f"{name} {tuple(value.shape)} {value.dtype}\n".encode())
            key.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    key.update(json.dumps(settings, sort_keys=True).encode())
    return key.hexdigest()[:32]


def _computed(unit: Unit, watch: Watch) -> Change:
    """Compute a unit's change, with the seconds in its report."""
    began = time.perf_counter()
    change = unit.fit(watch)
    return dataclasses.replace(change, report={**change.report, "seconds": round(time.perf_counter() - began, 3)})


def _stored(model: nn.Module, unit: Unit, store: Path, watch: Watch) -> Change:
    """Read a unit's change from the store, as its report then says, or compute it and store it in the model's dtype."""
    computed: list[Change] = []

    def write(folder: Path) -> None:
        computed.append(_computed(unit, watch))
        _write(folder, computed[0], next(model.get_submodule(unit.reads[0]).parameters()).dtype)

    change = stored(store / _key(model, unit), _read, write)
    return change if computed else dataclasses.replace(change, report={**change.report, "stored": True})


def _read(folder: Path) -> Change:
    """Read a change as `_write` stores it."""
    tensors, about = read_tensors(folder)
    modules: dict[str, Replacement] = {}
    projections: dict[Place, Replacement | Tensor] = {}
    for i, (path, name, layout) in enumerate(about["parts"]):
        weights = {key.removeprefix(f"{i}."): value for key, value in tensors.items() if key.startswith(f"{i}.")}
        if layout is None:
            projections[path, name] = weights["weight"]
            continue
        module = build(layout)
        for value in weights.values():
            module.to(value.dtype)
        module.load_state_dict(weights)
        if name is None:
            modules[path] = module
        else:
            projections[path, name] = module
    return Change(modules, projections, about["report"])


def _write(folder: Path, change: Change, dtype: torch.dtype) -> None:
    tensors: dict[str, Tensor] = {}
    parts: list[tuple[str, str | None, dict[str, Any] | None]] = []
    of_modules = [(path, None, new) for path, new in change.modules.items()]
    for path, name, new in [*of_modules, *((*place, new) for place, new in change.projections.items())]:
        weights = {"weight": new} if isinstance(new, Tensor) else new.state_dict()
        tensors |= {f"{len(parts)}.{key}": value.to(dtype) for key, value in weights.items()}
        parts.append((path, name, None if isinstance(new, Tensor) else describe(new)))
    write_tensors(folder, tensors, {"parts": parts, "report": dict(change.report)})

"""Compressing a timm vision transformer in place, layer by layer.

What is decomposed is stored under the content of its weights and the method's settings: an interrupted compression
goes on from the layers that are finished, and the same one twice computes nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from timm.layers import Mlp
from torch import Tensor, nn

from attnlab.compression.methods.base import Method, Sizes
from attnlab.compression.modules.attention import FactoredAttention, LowRankLinear, SlimAttention, from_layout
from attnlab.errors import ConfigError
from attnlab.pretrained.timm import read_heads, refuse
from attnlab.runs.files import write_bytes

log = logging.getLogger(__name__)

VERSION = 1  # to be raised when the same weights and settings give other factors


def compress(model: nn.Module, method: Method, store: Path | None = None) -> list[dict[str, Any]]:
    """Replace every attention layer, and with an `mlp_rank` both matrices of every MLP; in the weights' own type.

    Returns a report for each layer: its path, ranks, relative errors of its query-key and value-output tensors, error
    history, seconds. `store`: a folder for finished layers; None: nothing is stored.
    ConfigError: nothing to compress, a layer whose weights do not say what it computes, a rank out of bounds; then the
    model is as it was.
    """
    check(model, method)
    layers = dict(attention_layers(model)) if method.compresses_attention else {}
    reports: list[dict[str, Any]] = []
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("compressing", total=len(layers))
        for path, layer in layers.items():

            def watch(what: str, done: int, most: int, path: str = path) -> None:
                bar.update(task, description=f"{path}: {what} {done} of {most}")

            module, report = _stored(layer, path, method, store, watch)
            replace(model, path, module.train(layer.training))
            reports.append({"path": path, **report})
            bar.advance(task)
            log.info(
                "%s: ranks %s, error %.4f, %.1f s", path, report["ranks"], report.get("qk_error", 0), report["seconds"]
            )
    if method.mlp_rank is not None:
        reports += [_compress_mlp(model, path, mlp, method) for path, mlp in mlps(model)]
    return reports


def outline(model: nn.Module, method: Method) -> None:
    """Give a model the modules that `compress` would, without their weights: for counting. ConfigErrors as there."""
    check(model, method)
    for path, layer in attention_layers(model) if method.compresses_attention else ():
        if isinstance(layer, SlimAttention):
            heads = layer.num_heads
            sizes = Sizes(layer.qkv.in_features, heads, layer.rank // heads, layer.proj.out_features, layer.scale)
            replace(model, path, method.outline(sizes))
            continue
        replace(model, path, method.outline(sizes_of(layer)))
    if method.mlp_rank is not None:
        for path, mlp in mlps(model):
            for name in ("fc1", "fc2"):
                linear = getattr(mlp, name)
                rank = method.mlp_shape(linear.in_features, linear.out_features, f"{path}.{name}")
                bias = linear.bias is not None
                setattr(mlp, name, LowRankLinear(linear.in_features, rank, linear.out_features, bias=bias))


def check(model: nn.Module, method: Method) -> None:
    """ConfigError: what would keep `compress` from finishing."""
    layers = dict(attention_layers(model)) if method.compresses_attention else {}
    if not layers and method.compresses_attention:
        raise ConfigError(f"{type(model).__name__} has no attention with a qkv projection: nothing to compress")
    for path, layer in layers.items():
        if isinstance(layer, FactoredAttention):
            raise ConfigError(f"{path} is compressed already; start from an uncompressed model")
        if isinstance(layer, SlimAttention):
            continue
        refuse(layer, path)
        method.ranks(sizes_of(layer), path)
    if method.mlp_rank is not None:
        for path, mlp in mlps(model):
            for name in ("fc1", "fc2"):
                linear = getattr(mlp, name)
                method.mlp_shape(linear.in_features, linear.out_features, f"{path}.{name}")


def attention_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module `attn` of a block, or with a qkv projection, by its path."""
    for path, module in list(model.named_modules()):
        if path.rpartition(".")[2] == "attn" or hasattr(module, "qkv"):
            yield path, module


def mlps(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every plain MLP. ConfigError: one that is compressed, or gated."""
    found = [(path, module) for path, module in model.named_modules() if path.rpartition(".")[2] == "mlp"]
    for path, module in found:
        plain = type(module) is Mlp and isinstance(module.norm, nn.Identity)
        if not plain or not all(isinstance(fc, nn.Linear) for fc in (module.fc1, module.fc2)):
            raise ConfigError(f"{path}: {type(module).__name__} is not a plain MLP; leave compress.mlp_rank out")
        yield path, module
    if not found:
        raise ConfigError(f"{type(model).__name__} has no MLP; leave compress.mlp_rank out")


def sizes_of(layer: Any) -> Sizes:
    return Sizes(
        layer.qkv.in_features,
        layer.num_heads,
        layer.head_dim,
        layer.proj.out_features,
        layer.scale,
        layer.attn_drop.p,
        layer.proj_drop.p,
    )


def replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def _stored(
    layer: nn.Module, path: str, method: Method, store: Path | None, watch: Any
) -> tuple[FactoredAttention | SlimAttention, dict[str, Any]]:
    """A layer's fit, from the store if it is there."""
    file = store / f"{_key(layer, method)}.safetensors" if store else None
    weight: Tensor = next(layer.parameters())
    if file and file.is_file():
        try:
            with safe_open(file, "pt") as content:
                about = json.loads(content.metadata()["about"])
                module = from_layout(about["layout"]).to(weight.device, weight.dtype)
                module.load_state_dict({name: content.get_tensor(name) for name in content.keys()})  # noqa: SIM118
            assert isinstance(module, FactoredAttention | SlimAttention)
            return module, {**about["report"], "stored": True}
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            log.warning("%s: damaged (%s); decomposing %s again", file, " ".join(str(error).split()), path)
    began = time.perf_counter()
    fit = (
        method.refit(layer)
        if isinstance(layer, SlimAttention)
        else method.fit(read_heads(layer, path), sizes_of(layer), watch)
    )
    module = fit.module.to(weight.device, weight.dtype)
    report = {**fit.report, "seconds": round(time.perf_counter() - began, 3)}
    if file:
        about = {"layout": module.layout(), "report": report}
        tensors = {name: value.detach().cpu().contiguous() for name, value in module.state_dict().items()}
        write_bytes(file, save(tensors, metadata={"about": json.dumps(about)}))
    return module, report


def _key(layer: nn.Module, method: Method) -> str:
    settings = json.dumps([VERSION, method.settings(), str(next(layer.parameters()).dtype)], sort_keys=True)
    key = hashlib.sha256(settings.encode())
    key.update(json.dumps(sorted((k, v) for k, v in vars(layer).items() if isinstance(v, int | float))).encode())
    for name, value in sorted(layer.state_dict().items()):
        key.update(f"{name} {tuple(value.shape)}\n".encode())
        key.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return key.hexdigest()[:32]


def _compress_mlp(model: nn.Module, path: str, mlp: nn.Module, method: Method) -> dict[str, Any]:
    began, errors = time.perf_counter(), {}
    for name in ("fc1", "fc2"):
        linear = getattr(mlp, name)
        pair, errors[f"{name}_error"] = method.fit_linear(linear, f"{path}.{name}")
        setattr(mlp, name, pair.to(linear.weight.device, linear.weight.dtype).train(linear.training))
    return {"path": path, "ranks": method.mlp_rank, **errors, "seconds": round(time.perf_counter() - began, 3)}

"""Vision transformers of timm, which is imported with the first one: other families do without."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import attnlab.torchvision_schemas  # noqa: F401  (before timm)

from annotated_types import Ge
from torch import nn

from attnlab.config.bounds import Layers, Rate, Size
from attnlab.errors import ConfigError, DataError, nearest
from attnlab.pretrained import hub
from attnlab.pretrained import weights as files
from attnlab.pretrained.base import Family, Layer, Projection

SIZES = ("img_size", "patch_size", "embed_dim", "depth", "num_heads", "num_classes")
BETWEEN = {
    "q_norm": "a norm of queries",
    "k_norm": "a norm of keys",
    "norm": "a norm of head outputs",
    "gate": "a gate on head outputs",
}


class Timm(Family):
    """Models with timm's `Attention` and `Mlp`: one `qkv` projection, rows q | k | v, each by head.

    A layer is a module with an `attn` or an `mlp`. Other attention is listed with the reason for its refusal.
    """

    name = "timm"
    options = frozenset(SIZES) | {"drop_path_rate"}

    def matches(self, model: nn.Module) -> bool:
        return type(model).__module__.startswith("timm.")

    def layers(self, model: nn.Module) -> list[Layer]:
        by_path: dict[str, dict[str, Any]] = {}
        for path, module in model.named_modules():
            parent, _, name = path.rpartition(".")
            if name == "attn" or hasattr(module, "qkv"):
                part = _attention(path, module)
            elif name == "mlp":
                part = _mlp(path, module)
            else:
                continue
            layer = by_path.setdefault(parent, {"projections": {}, "refusals": {}})
            for key in ("projections", "refusals"):
                layer[key] |= part.pop(key, {})
            layer |= part
        return [Layer(path, **layer) for path, layer in by_path.items()]

    def tokens(self, model: nn.Module) -> int | None:
        """Patches of an image and prefix tokens, as the class token."""
        patches = getattr(getattr(model, "patch_embed", None), "num_patches", None)
        return None if patches is None else int(patches) + int(getattr(model, "num_prefix_tokens", 0))

    def create(self, name: str, options: dict[str, Any]) -> nn.Module:
        import timm

        if not timm.is_model(name.partition(".")[0]):
            near = nearest(name, timm.list_models(["vit_*", "deit*"]))
            raise ConfigError(f"task.model.name={name}: timm has no such model{near}")
        try:
            model: nn.Module = timm.create_model(name, pretrained=False, **options)
        except (TypeError, AssertionError, ValueError, ZeroDivisionError) as error:
            raise ConfigError(
                f"task.model: {name} refuses its sizes: {files.first_line(error)}; task=imagenet is made for timm's "
                "VisionTransformer models (vit_*, deit*), whose attention has one qkv projection"
            ) from error
        return model

    def load(self, model: nn.Module, source: str) -> None:
        """Load pretrained weights from a local file or folder, or from the hub.

        DataError: missing or damaged weights, or those of another architecture.
        """
        if path := files.find(source):
            files.fill(model, path, files.read(path))
            return
        import timm

        try:
            published = timm.get_pretrained_cfg(source, allow_unregistered=False)
        except RuntimeError as error:
            reason = files.first_line(error)
            raise DataError(f"model={source}: neither a local file nor weights that timm knows ({reason})") from error
        if published is None or not published.hf_hub_id:
            raise DataError(f"model={source}: neither a local file nor weights of timm's hub; give a file")
        path = hub.file(published.hf_hub_id, source)
        try:
            loaded = timm.create_model(source, pretrained=True, pretrained_cfg_overlay={"file": str(path)})
        except Exception as error:  # of timm, torch or safetensors
            raise DataError(f"model={source}: timm cannot load {path}: {files.first_line(error)}") from error
        files.fill(model, Path(source), dict(loaded.state_dict()))


@dataclass(frozen=True)
class VisionTransformer:
    """A timm model by name; sizes that are None are those of the name.

    Args:
        name: timm's name, "deit_small_patch16_224".
        weights: a weight file, a run's directory, a compressed model's folder, or a name of timm's hub; None:
            random weights.
        drop_path_rate: rate of stochastic depth in the last block; it rises linearly from 0 in the first.
    """

    name: str
    weights: str | None = None
    img_size: Size | None = None
    patch_size: Size | None = None
    embed_dim: Size | None = None
    depth: Layers | None = None
    num_heads: Size | None = None
    num_classes: Annotated[int, Ge(2)] | None = None
    drop_path_rate: Rate = 0.0

    def options(self, num_classes: int | None = None) -> dict[str, Any]:
        """The keyword arguments of timm.create_model; `num_classes`: of the data."""
        sizes = {name: value for name in SIZES if (value := getattr(self, name)) is not None}
        if num_classes is not None and sizes.setdefault("num_classes", num_classes) != num_classes:
            raise ConfigError(f"task.model.num_classes={self.num_classes}: the data has {num_classes} classes")
        return sizes | {"drop_path_rate": self.drop_path_rate}

    def create(self, num_classes: int | None = None) -> nn.Module:
        """The model with random weights. ConfigError: timm has no such model, or refuses the sizes."""
        return Timm().create(self.name, self.options(num_classes))


def _attention(path: str, module: nn.Module) -> dict[str, Any]:
    """The fields of a Layer that describe an attention module."""
    from timm.layers.attention import Attention

    kind = type(module).__name__
    if type(module) is not Attention:
        reason = (
            f"{path}: {kind} is not timm's plain attention (another projection, rotary or relative positions, windows, "
            "...): its weights alone do not determine its output"
        )
        return {"attention": path, "refusals": {"attention": reason}}
    width, dim = module.attn_dim, module.qkv.in_features
    bias, out_bias = (getattr(linear, "bias", None) is not None for linear in (module.qkv, module.proj))
    heads = module.num_heads
    projections = {
        name: Projection(f"{path}.qkv", (width, dim), "out", heads, range(i * width, (i + 1) * width), bias=bias)
        for i, name in enumerate("qkv")
    }
    shape = (module.proj.out_features, width)
    projections["o"] = Projection(f"{path}.proj", shape, "in", heads, bias=out_bias)
    refusals = {}
    if not all(isinstance(linear, nn.Linear) for linear in (module.qkv, module.proj)):
        refusals["attention"] = f"{path} is compressed already; start from an uncompressed model"
    between = [
        f"{path}: {kind} has {what} ({part}): its weights do not multiply, so low rank is inexact"
        for part, what in BETWEEN.items()
        if not isinstance(getattr(module, part, None) or nn.Identity(), nn.Identity)
    ]
    if between:
        refusals["products"] = between[0]
    return {
        "attention": path,
        "projections": projections,
        "scale": module.scale,
        "dropout": (module.attn_drop.p, module.proj_drop.p),
        "refusals": refusals,
    }


def _mlp(path: str, module: nn.Module) -> dict[str, Any]:
    """The fields of a Layer that describe an MLP."""
    from timm.layers import Mlp

    plain = type(module) is Mlp and isinstance(module.norm, nn.Identity)
    matrices = {name: getattr(module, name) for name in ("fc1", "fc2")} if plain else {}
    if not plain or not all(isinstance(linear, nn.Linear) for linear in matrices.values()):
        reason = f"{path}: {type(module).__name__} is not a plain MLP; leave compress.mlp_rank out"
        return {"mlp": path, "refusals": {"mlp": reason}}
    projections = {
        name: Projection(f"{path}.{name}", (linear.out_features, linear.in_features), bias=linear.bias is not None)
        for name, linear in matrices.items()
    }
    return {"mlp": path, "projections": projections}

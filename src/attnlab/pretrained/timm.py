"""Vision transformers of timm, which is imported with the first one: other families do without."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import attnlab.torchvision_schemas  # noqa: F401  (before timm)

from annotated_types import Ge
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from attnlab.config.bounds import Layers, Rate, Size
from attnlab.errors import ConfigError, DataError, nearest
from attnlab.pretrained import hub
from attnlab.pretrained import weights as files
from attnlab.pretrained.base import Family, Layer, Projection

log = logging.getLogger(__name__)

IMAGES = ("mean", "std", "interpolation")  # of pretrained_cfg and of task.data
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
        patches = getattr(model, "patch_embed", None)
        for side, patch in zip(getattr(patches, "img_size", ()), getattr(patches, "patch_size", ()), strict=False):
            if side % patch:
                raise ConfigError(
                    f"task.data.image_size={side}: expected a multiple of {name}'s patches of {patch} pixels"
                )
        return model

    def load(self, model: nn.Module, source: str) -> dict[str, Any]:
        """Load pretrained weights from a local file or folder, or from the hub.

        Returns:
            What a record says: `resampled` of a position table of another image size, and `head` if the weights have
            no classifier, whose random one the model then keeps.

        DataError: missing or damaged weights, or those of another architecture.
        """
        if path := weight_file(source) or files.find(source):
            weights, config = files.read(path), _config(path.parent) or {}
            if (pool := config.get("global_pool")) not in (None, own := getattr(model, "global_pool", None)):
                raise DataError(f"model={source}: its config.json has global_pool={pool}, and this model {own}")
            about = _resampled(model, weights, source) | _headless(model, weights, source)
            files.fill(model, path, weights)
            return about
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
        weights = dict(loaded.state_dict())
        about = _resampled(model, weights, source) | _headless(model, weights, source)
        files.fill(model, Path(source), weights)
        return about


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


def weight_file(source: str) -> Path | None:
    """The file of weights in a folder of timm, which has a config.json with `architecture`; None: something else."""
    path = Path(source).expanduser()
    if _config(path) is None:
        return None
    if weights := next((path / name for name in hub.WEIGHTS if (path / name).is_file()), None):
        return weights
    raise DataError(f"model={source}: no weights in {path}; expected one of {', '.join(hub.WEIGHTS)}")


def completed(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """The configuration with the architecture of `model=` and what its pretrained_cfg says of images.

    `model=` is a folder of timm, a name of timm, or with `task.model.name` on the command line a file of weights. Any
    other configuration is returned as it is, and a key of the command line stays.

    Args:
        overrides: the keys of the command line.

    Raises:
        ConfigError: an unknown architecture, or an argument of it that `task.model` does not have.
        DataError: the config.json cannot be read.
    """
    import timm

    source = str(cfg.model)
    config, path = _config(Path(source).expanduser()), Path(source).expanduser()
    name = config["architecture"] if config else source if not path.exists() else cfg.task.model.name
    base = name.partition(".")[0]
    of_file = path.is_file() and "task.model.name" in overrides
    if not (config or of_file or timm.is_model(base) and base != cfg.task.model.name and not path.exists()):
        return cfg
    if not timm.is_model(base):
        near = nearest(name, timm.list_models(["vit_*", "deit*"]))
        raise ConfigError(f"task.model.name={name}: timm has no such model{near}")
    about = timm.get_pretrained_cfg(name if timm.is_model_pretrained(name) else base)
    known = (about.to_dict() if about else {}) | dict((config or {}).get("pretrained_cfg") or {})
    arguments = dict((config or {}).get("model_args") or {})
    usual = {"in_chans": 3, "global_pool": (config or {}).get("global_pool")}  # which timm adds
    if wrong := sorted(key for key in arguments.keys() - {*SIZES, "drop_path_rate"}
                       if key not in usual or arguments[key] != usual[key]):  # fmt: skip
        raise ConfigError(f"model={source}: its model_args have {wrong[0]}, which task.model does not have")
    sizes = {key: arguments.get(key) for key in SIZES if key not in ("img_size", "num_classes")}
    values = {f"task.model.{key}": value for key, value in {"name": base, **sizes}.items()}
    images = {key: known.get(key) for key in IMAGES} | {"image_size": (known.get("input_size") or [None])[-1]}
    values |= {f"task.data.{key}": list(x) if isinstance(x, tuple) else x for key, x in images.items() if x}
    cfg = cfg.copy()
    for key, value in values.items():
        if key not in overrides:
            OmegaConf.update(cfg, key, value)
    return cfg


def _config(path: Path) -> dict[str, Any] | None:
    """The config.json of a folder of timm; None: another path. DataError: it cannot be read."""
    file = path / hub.CONFIG
    if not file.is_file():
        return None
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file}: cannot be read as JSON ({files.first_line(error)})") from error
    if not isinstance(config, dict) or not isinstance(config.get("architecture"), str):
        return None
    for key in ("pretrained_cfg", "model_args"):
        if not isinstance(config.get(key) or {}, dict):
            raise DataError(f"{file}: {key}: expected an object, got {config[key]!r:.40}")
    size = (config.get("pretrained_cfg") or {}).get("input_size")
    if size is not None and not (isinstance(size, list) and len(size) == 3 and size[1] == size[2]):
        raise DataError(f"{file}: input_size: expected channels, height and the same width, got {size!r:.40}")
    return config


def _resampled(model: Any, weights: dict[str, Tensor], source: str) -> dict[str, Any]:
    """Resample the position table in `weights` to the model's grid, as timm does, if it is for another image size."""
    from timm.layers import resample_abs_pos_embed

    table, own = weights.get("pos_embed"), getattr(model, "pos_embed", None)
    if table is None or own is None or table.dim() != 3 or table.shape[1] == own.shape[1]:
        return {}
    first = 0 if getattr(model, "no_embed_class", False) else int(model.num_prefix_tokens)
    side, grid = round(max(0, table.shape[1] - first) ** 0.5), list(model.patch_embed.grid_size)
    if side < 1 or side**2 + first != table.shape[1] or not table.is_floating_point():
        raise DataError(f"model={source}: pos_embed of {table.shape[1]} positions is no table of a square image")
    weights["pos_embed"] = resample_abs_pos_embed(table, grid, num_prefix_tokens=first)
    words = "the position table of %d x %d patches is resampled to %d x %d, as timm does (bicubic)"
    log.info(f"model=%s: {words}", source, side, side, *grid)
    return {"resampled": {"positions": [side, side], "to": grid}}


def _headless(model: nn.Module, weights: dict[str, Tensor], source: str) -> dict[str, Any]:
    """Add the model's own classifier to `weights` if they have none."""
    head = {name: value for name, value in model.state_dict().items() if name.startswith("head.")}
    if not head or any(name.startswith("head") for name in weights):
        return {}
    weights |= head
    log.warning(
        "model=%s: no classifier: a new one has random weights, for %d classes", source, len(head["head.weight"])
    )
    return {"head": "random"}


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

"""Any vision transformer of timm, with pretrained weights from a file, a run, a compressed folder or timm's hub."""

import logging
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before timm)

import timm
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from attnlab.config.nearest import nearest
from attnlab.errors import ConfigError, DataError

log = logging.getLogger(__name__)

WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model")  # where published checkpoints keep their weights


@dataclass(frozen=True)
class VisionTransformer:
    """A timm model by name; sizes that are None are those that the name stands for.

    checkpoint: a file, a run's directory, a compressed model's folder, or a name of timm's hub; None: random weights.
    """

    name: str
    checkpoint: str | None = None
    img_size: int | None = None
    patch_size: int | None = None
    embed_dim: int | None = None
    depth: int | None = None
    num_heads: int | None = None
    num_classes: int | None = None
    drop_path_rate: float = 0.0

    def options(self, num_classes: int | None = None) -> dict[str, Any]:
        """What timm.create_model is given."""
        sizes = ("img_size", "patch_size", "embed_dim", "depth", "num_heads", "num_classes")
        found = {name: value for name in sizes if (value := getattr(self, name)) is not None}
        if num_classes is not None and found.setdefault("num_classes", num_classes) != num_classes:
            raise ConfigError(f"task.model.num_classes={self.num_classes}: the data has {num_classes} classes")
        return found | {"drop_path_rate": self.drop_path_rate}

    def create(self, num_classes: int | None = None) -> nn.Module:
        """With random weights. ConfigError: timm has no such model, or refuses the sizes."""
        if not timm.is_model(self.name.partition(".")[0]):
            near = nearest(self.name, timm.list_models(["vit_*", "deit*"]))
            raise ConfigError(f"task.model.name={self.name}: timm has no such model{near}")
        try:
            model: nn.Module = timm.create_model(self.name, pretrained=False, **self.options(num_classes))
        except (TypeError, AssertionError, ValueError, ZeroDivisionError) as error:
            raise ConfigError(
                f"task.model: {self.name} refuses its sizes: {_first(error)}; task=imagenet is made for timm's "
                "VisionTransformer models (vit_*, deit*), whose attention has one qkv projection"
            ) from error
        return model


def load_pretrained(model: nn.Module, source: str) -> None:
    """Fill a model from a local file (.safetensors, or .pth read without unpickling code), or from timm's hub.

    DataError: no such file, not weights, of another architecture, or the hub cannot be reached.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        path = path / "checkpoints" / "averaged.safetensors"
        if not path.is_file():
            raise DataError(f"{source}: neither a finished run nor a compressed model's folder nor a checkpoint file")
    if path.is_file():
        fill(model, path, read(path))
    elif path.suffix in (".safetensors", ".pth", ".pt", ".bin", ".ckpt") or path.is_absolute() or "/" in source:
        raise DataError(f"{path}: no such checkpoint file; give a .safetensors or .pth file, or a name of timm's hub")
    else:
        _from_hub(model, source)


def read(path: Path) -> dict[str, Tensor]:
    """Weights by name. DataError: damaged, or more than tensors and plain values."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever pickle's machine stumbles over in foreign bytes
        if type(error).__name__ == "UnpicklingError":
            raise DataError(f"{path}: damaged, or it holds more than tensors and plain values") from error
        reason = f"damaged, cut short or foreign ({_first(error)})"
        raise DataError(f"{path}: not a readable checkpoint: {reason}") from error
    for key in WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise DataError(f"{path}: not a checkpoint: expected weights by name")
    return {name.removeprefix("module.").removeprefix("model."): value for name, value in content.items()}


def fill(model: nn.Module, path: Path, weights: dict[str, Tensor]) -> None:
    """Every weight, exactly. DataError names the first that is missing, of another shape, or unknown."""
    own = model.state_dict()
    kind = type(model).__name__
    for name, value in own.items():
        if name not in weights:
            raise DataError(f"{path}: the checkpoint lacks {name}; it is of another architecture than task.model.name")
        if weights[name].shape != value.shape:
            was, now = tuple(weights[name].shape), tuple(value.shape)
            raise DataError(
                f"{path}: {name} has shape {was}, this {kind}'s is {now}: another architecture or class count"
            )
        if not torch.isfinite(weights[name]).all():
            raise DataError(f"{path}: {name} has values that are not numbers or not finite; it cannot be used")
    if extra := sorted(set(weights) - set(own)):
        raise DataError(
            f"{path}: the checkpoint has {extra[0]}, which this {kind} lacks; it is of another architecture"
        )
    model.load_state_dict(weights)
    log.info("weights from %s", path)


def _from_hub(model: nn.Module, tag: str) -> None:
    try:
        theirs = timm.create_model(tag, pretrained=True)
    except Exception as error:  # timm, huggingface_hub and the network each have classes of their own
        raise DataError(
            f"task.model.checkpoint={tag}: neither a local file nor to be had from timm's hub ({_first(error)}); "
            "download it where there is a network, and give the file"
        ) from error
    fill(model, Path(tag), dict(theirs.state_dict()))


def _first(error: BaseException) -> str:
    return shorten((str(error).splitlines() or [""])[0] or type(error).__name__, 160)

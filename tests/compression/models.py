"""Small vision transformers with random weights and biases."""

from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before timm)

import timm
import torch
from torch import nn

from attnlab.compression import Method, compress
from attnlab.pretrained import Layer, family_of
from tests.pretrained.tiny import fill

OPTIONS: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
OPTIONS["num_classes"] = 5
NAMES = ["vit_tiny_patch16_224", "deit_small_patch16_224", "deit3_small_patch16_224"]


def vit(name: str = NAMES[0], **options: Any) -> nn.Module:
    """Three heads of width 8, with all parameters random."""
    return fill(timm.create_model(name, **{**OPTIONS, **options}), 0.15)


def compressed(method: Method, **options: Any) -> nn.Module:
    """The same after a method."""
    model = vit(**options)
    compress(model, method)
    return model


def layers(model: nn.Module) -> list[Layer]:
    return family_of(model).layers(model)


def images(count: int = 2) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1))

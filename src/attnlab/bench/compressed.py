"""A pretrained architecture with random weights, dense and compressed: what the workloads of compression measure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from omegaconf import DictConfig
from torch import nn

from attnlab.bench.memory import free_bytes
from attnlab.compression import Method, outline
from attnlab.compression.counting import rate
from attnlab.compression.modules.base import Replacement
from attnlab.config.build import instantiate
from attnlab.errors import ConfigError
from attnlab.pretrained import ATTENTION, Layer, Projection, family_of

STD = 0.02  # of random weights: of the size of trained ones


@dataclass(frozen=True)
class Compared:
    """The task's model as it is, or with the modules of the method of `compress=`; weights follow from the seed.

    Args:
        name: which of both.
        cfg: the fixed configuration, with `compress`.
    """

    name: Literal["compressed", "dense"]
    cfg: DictConfig

    def outline(self) -> tuple[nn.Module, list[Layer]]:
        """The whole model on the meta device, and its layers as they are before compression."""
        with torch.device("meta"):
            model: nn.Module = instantiate(self.cfg.task.model, path="task.model").create()
            layers = family_of(model).layers(model)
            if self.name == "compressed":
                outline(model, method_of(self.cfg))
        return model, layers

    def layer(self) -> Layer:
        """The first layer with compressed attention projections. ConfigError: there is none."""
        model, layers = Compared("compressed", self.cfg).outline()
        for layer in layers:
            found = [projection for name, projection in layer.projections.items() if name in ATTENTION]
            if any(isinstance(model.get_submodule(projection.path), Replacement) for projection in found):
                return layer
        raise ConfigError(f"compress={self.cfg.choices.compress} puts no module in place of an attention projection")

    def attention(self, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """The model on the meta device, but for that layer's attention module, which has random weights."""
        model, layer = self.outline()[0], self.layer()
        assert layer.attention is not None
        filled(model.get_submodule(layer.attention), self.cfg.seed, dtype, device)
        return model

    def whole(self, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """The whole model with random weights. LookupError: it and the one it is compared with do not fit in memory."""
        count = sum(parameter.numel() for parameter in Compared("dense", self.cfg).outline()[0].parameters())
        needed, free = 2 * count * max(4, dtype.itemsize), free_bytes(device)  # it is made in float32
        if needed > 0.9 * free:
            size, room = (f"{one / 2**30:.1f} GiB" for one in (needed, free))
            kind = str(dtype).removeprefix("torch.")
            raise LookupError(f"two models of {count:,} parameters in {kind} take {size}, and {room} are free")
        torch.manual_seed(self.cfg.seed)
        with device:
            model: nn.Module = instantiate(self.cfg.task.model, path="task.model").create()
            if self.name == "compressed":
                outline(model, method_of(self.cfg))
        for module in model.modules():
            if isinstance(module, Replacement):
                for parameter in module.parameters():
                    nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)  # so that logits depend on each factor
        return model.to(dtype).eval()


def method_of(cfg: DictConfig) -> Method:
    """The method that `compress` names.

    Args:
        cfg: the fixed configuration.

    Raises:
        ConfigError: it names none.
    """
    if cfg.choices.compress == "none":
        raise ConfigError("mode=bench of a pretrained model compares it with a compressed one: give compress=<method>")
    method: Method = instantiate(cfg.compress, path="compress")
    return method


@torch.no_grad()
def filled(module: nn.Module, seed: int, dtype: torch.dtype, device: torch.device) -> None:
    """Give a module on the meta device memory and random weights, in place.

    Args:
        module: on the meta device.
        seed: of the weights.
        dtype: of the weights.
        device: where they lie.
    """
    torch.manual_seed(seed)
    module.to_empty(device=device)
    for parameter in module.parameters():
        parameter.normal_(std=STD)
    module.to(dtype).eval()


def projections(model: nn.Module, layer: Layer) -> Iterator[tuple[nn.Module, Projection]]:
    """The modules of a layer's attention projections, each once, with the projection that it computes, or the first.

    Args:
        model: dense or compressed.
        layer: as it was before compression.
    """
    seen = set()
    for name in ATTENTION:
        projection = layer.projections[name]
        if projection.path not in seen:
            seen.add(projection.path)
            yield model.get_submodule(projection.path), projection


def remaining(cfg: DictConfig) -> dict[str, float]:
    """The compression rate, and what is left of the multiply-adds of a token in the compressed matrices.

    Args:
        cfg: the fixed configuration, with `compress`.
    """
    found = rate(Compared("dense", cfg).outline()[0], Compared("compressed", cfg).outline()[0])
    left = 100 * found["multiply_adds_factorised"] / found["multiply_adds_dense"]
    return {"rate": round(found["rate"], 4), "multiply_adds_percent": round(left, 2)}

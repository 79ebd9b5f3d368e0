"""A pretrained language model with random weights, dense and compressed: the projections of a layer, and all of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from omegaconf import DictConfig
from torch import nn
from torch.nn import functional as F

from attnlab.bench.memory import free_bytes
from attnlab.bench.settings import Settings, Shape
from attnlab.bench.workloads.base import Workload
from attnlab.compression import Method, densify, outline
from attnlab.compression.counting import rate
from attnlab.compression.modules.base import Replacement
from attnlab.config.build import instantiate
from attnlab.errors import ConfigError
from attnlab.pretrained import ATTENTION, Layer, Projection, family_of

STD = 0.02  # of random weights: of the size of trained ones
EXACT = 1e-10  # relative difference in float64 above which no ratio is reported


@dataclass(frozen=True)
class Compared:
    """The task's model as it is, or with the modules of the method of `compress=`; weights follow from the seed.

    Args:
        name: compressed or dense.
        cfg: the configuration, with `compress`.
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
            paths = [projection.path for name, projection in layer.projections.items() if name in ATTENTION]
            if any(isinstance(model.get_submodule(path), Replacement) for path in paths):
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
    """The method of `compress=`. ConfigError: there is none."""
    if cfg.choices.compress == "none":
        raise ConfigError("mode=bench of a pretrained model compares it with a compressed one: give compress=<method>")
    method: Method = instantiate(cfg.compress, path="compress")
    return method


@torch.no_grad()
def filled(module: nn.Module, seed: int, dtype: torch.dtype, device: torch.device) -> None:
    """Give a module on the meta device memory and random weights, in place."""
    torch.manual_seed(seed)
    module.to_empty(device=device)
    for parameter in module.parameters():
        parameter.normal_(std=STD)
    module.to(dtype).eval()


def projections(model: nn.Module, layer: Layer) -> Iterator[tuple[nn.Module, Projection]]:
    """The modules of a layer's attention projections, each once, with the first projection that it computes."""
    seen = set()
    for name in ATTENTION:
        projection = layer.projections[name]
        if projection.path not in seen:
            seen.add(projection.path)
            yield model.get_submodule(projection.path), projection


def remaining(cfg: DictConfig) -> dict[str, float]:
    """The compression rate, and the percentage of a token's multiply-adds that is left in the compressed matrices."""
    counts = rate(Compared("dense", cfg).outline()[0], Compared("compressed", cfg).outline()[0])
    left = 100 * counts["multiply_adds_factorised"] / counts["multiply_adds_dense"]
    return {"rate": round(counts["rate"], 4), "multiply_adds_percent": round(left, 2)}


class ComparedWorkload(Workload):
    """The compressed model beside the dense one, on `batch` texts of `text` tokens.

    Arguments are those of `Workload`.
    """

    checked = ("output",)
    what: str

    @classmethod
    def lineup(cls, cfg: DictConfig, settings: Settings) -> list[Compared]:
        """ConfigError: `compress` names no method."""
        method_of(cfg)
        return [Compared("compressed", cfg), Compared("dense", cfg)]

    @classmethod
    def shapes(cls, cfg: DictConfig, settings: Settings) -> list[Shape]:
        return [Shape(cls.what, settings.batch, 1, 0, text) for text in settings.texts]

    @classmethod
    def describe(cls, shape: Shape) -> dict[str, Any]:
        return {"tokens": shape.text}

    @classmethod
    def check(cls, variant: Compared, settings: Settings, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        if variant.name == "dense":
            return {}
        return {"output": cls.error(variant, device), "tolerance": EXACT}

    @classmethod
    @abstractmethod
    def error(cls, variant: Compared, device: torch.device) -> float:
        """Relative error of the compressed modules against the matrices that they stand for, in float64."""

    @classmethod
    def facts(cls, variants: Sequence[Any], shape: Shape, checks: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """The compression rate, and what is left of the multiply-adds."""
        return dict(remaining(variants[0].cfg))


class Projections(ComparedWorkload):
    """q, k and v of the same input, and o of another one.

    Arguments are those of `Workload`.
    """

    about = "q, k, v and o of the first compressed layer, without attention between them, no gradients, random weights"
    what = "projections"

    def __init__(self, variant: Compared, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        model, layer = variant.attention(dtype, device), variant.layer()
        inputs = {
            axis: torch.randn(shape.batch, shape.text, width, generator=generator).to(device, dtype)
            for axis, width in (("out", layer.projections["q"].shape[1]), ("in", layer.projections["o"].shape[1]))
        }
        self.work = [(module, inputs[place.axis or "out"]) for module, place in projections(model, layer)]

    @classmethod
    def lineup(cls, cfg: DictConfig, settings: Settings) -> list[Compared]:
        """ConfigError: `compress` names no method that puts modules in place of attention projections."""
        variants = super().lineup(cfg, settings)
        variants[0].layer()
        return variants

    @classmethod
    @torch.no_grad()
    def error(cls, variant: Compared, device: torch.device) -> float:
        largest = 0.0
        for module, x in cls(variant, Shape("projections", 1, 1, 0, 3), torch.float64, device).work:
            if isinstance(module, Replacement):
                matrix, bias = module.dense()[0][""]
                want = F.linear(x, matrix, bias)
                largest = max(largest, float((module(x) - want).norm() / want.norm()))
        return largest

    @classmethod
    def facts(cls, variants: Sequence[Any], shape: Shape, checks: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Also the path of the layer."""
        return {"layer": variants[0].layer().path, **super().facts(variants, shape, checks)}

    @torch.inference_mode()
    def run(self) -> None:
        for module, x in self.work:
            module(x)


class CompressedModel(ComparedWorkload):
    """Logits of all positions.

    Arguments are those of `Workload`.
    """

    about = "one forward pass of the whole model, every position's logits, no cache, no gradients, random weights"
    what = "whole"

    def __init__(self, variant: Compared, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.model = variant.whole(dtype, device)
        config: Any = self.model.config
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(config.vocab_size, (shape.batch, shape.text), generator=generator).to(device)

    @classmethod
    def error(cls, variant: Compared, device: torch.device) -> float:
        model = variant.whole(torch.float64, device)
        dense = densify(model, Compared("dense", variant.cfg).whole(torch.float64, device), exact=False)
        tokens = torch.arange(4, device=device)[None]
        with torch.inference_mode():
            got, want = (m(input_ids=tokens).logits for m in (model, dense))
        return float((got - want).norm() / want.norm())

    @torch.inference_mode()
    def run(self) -> None:
        self.model(input_ids=self.tokens)

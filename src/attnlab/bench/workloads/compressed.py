"""A dense and a compressed language model with random weights: projections, full model, and decompositions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from omegaconf import DictConfig
from torch import nn
from torch.nn import functional as F

from attnlab.bench.memory import free_bytes
from attnlab.bench.settings import Settings, Shape
from attnlab.bench.variants import Variant
from attnlab.bench.workloads import Workload
from attnlab.compression import Method, densify, outline
from attnlab.compression.counting import rate
from attnlab.compression.decompositions.tucker import tucker
from attnlab.compression.methods.tensorllm import Sizes, TensorLLM
from attnlab.compression.modules.base import Replacement
from attnlab.config.build import instantiate
from attnlab.errors import ConfigError
from attnlab.pretrained import ATTENTION, Layer, Projection, family_of

STD = 0.02  # standard deviation of random weights, similar to trained ones
EXACT = 1e-10  # relative difference in float64 above which no ratio is reported
SAME = 1e-3  # tolerated excess of HOOI's relative error over TensorLy's, due to local minima


@dataclass(frozen=True)
class Compared(Variant):
    """The task's model, dense or with the modules of `compress=`, with weights from the seed."""

    name: Literal["compressed", "dense"]

    def outline(self) -> tuple[nn.Module, list[Layer]]:
        """The model on the meta device, and its layers before compression."""
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
        """The model on the meta device, except for the attention module of `layer`, which has random weights."""
        model, layer = self.outline()[0], self.layer()
        assert layer.attention is not None
        module = model.get_submodule(layer.attention).to_empty(device=device)
        torch.manual_seed(self.cfg.seed)
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=STD)
        module.to(dtype).eval()
        return model

    def filled(self, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """The model with random weights. LookupError: dense and compressed model do not fit in memory together."""
        count = sum(parameter.numel() for parameter in Compared("dense", self.cfg).outline()[0].parameters())
        needed, free = 2 * count * max(4, dtype.itemsize), free_bytes(device)  # created in float32
        if needed > 0.9 * free:
            size, room = (f"{count / 2**30:.1f} GiB" for count in (needed, free))
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
                    nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)  # each factor affects the logits
        return model.to(dtype).eval()


def method_of(cfg: DictConfig) -> Method:
    """The method of `compress=`. ConfigError: there is none."""
    if cfg.choices.compress == "none":
        raise ConfigError("mode=bench of a pretrained model compares it with a compressed one: give compress=<method>")
    method: Method = instantiate(cfg.compress, path="compress")
    return method


def projections(model: nn.Module, layer: Layer) -> Iterator[tuple[nn.Module, Projection]]:
    """The distinct modules of a layer's attention projections, each with the first projection that it computes."""
    seen = set()
    for name in ATTENTION:
        projection = layer.projections[name]
        if projection.path not in seen:
            seen.add(projection.path)
            yield model.get_submodule(projection.path), projection


class ComparedWorkload(Workload):
    """Base of workloads that compare compressed and dense model on `batch` texts of `text` tokens."""

    checked = ("output",)
    keys = {"tokens": "text"}

    @classmethod
    def lineup(cls, cfg: DictConfig, settings: Settings) -> list[Compared]:
        return [Compared("compressed", cfg), Compared("dense", cfg)]

    @classmethod
    def check(cls, variant: Compared, settings: Settings, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        if variant.name == "dense":
            return {}
        return {"output": cls.error(variant, device), "tolerance": EXACT}

    @classmethod
    @abstractmethod
    def error(cls, variant: Compared, device: torch.device) -> float:
        """Relative error of the compressed modules against their dense matrices, in float64."""

    @classmethod
    def facts(cls, variants: Sequence[Any], shape: Shape, checks: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Compression rate, and remaining percentage of a token's multiply-adds in matrices."""
        cfg = variants[0].cfg
        counts = rate(Compared("dense", cfg).outline()[0], Compared("compressed", cfg).outline()[0])
        left = 100 * counts["multiply_adds_factorised"] / counts["multiply_adds_dense"]
        return {"rate": round(counts["rate"], 4), "multiply_adds_percent": round(left, 2)}


class Projections(ComparedWorkload):
    """Projections q, k and v of one input, and o of another."""

    what = "projections"
    about = "q, k, v and o of the first compressed layer, without attention between them, no gradients, random weights"

    def __init__(self, variant: Compared, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        model, layer = variant.attention(dtype, device), variant.layer()
        inputs = {
            axis: torch.randn(shape.batch, shape.text, width, generator=generator).to(device, dtype)
            for axis, width in (("out", layer.projections["q"].shape[1]), ("in", layer.projections["o"].shape[1]))
        }
        self.work = [(module, inputs[place.axis or "out"]) for module, place in projections(model, layer)]

    @classmethod
    @torch.no_grad()
    def error(cls, variant: Compared, device: torch.device) -> float:
        errors = []
        for module, x in cls(variant, Shape("projections", 1, 1, 0, 3), torch.float64, device).work:
            if isinstance(module, Replacement):
                matrix, bias = module.dense()[0][""]
                want = F.linear(x, matrix, bias)
                errors.append((module(x) - want).norm() / want.norm())
        return float(torch.stack(errors).max())  # propagates NaN

    @classmethod
    def facts(cls, variants: Sequence[Any], shape: Shape, checks: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Includes the path of the layer."""
        return {"layer": variants[0].layer().path, **super().facts(variants, shape, checks)}

    @torch.inference_mode()
    def run(self) -> None:
        for module, x in self.work:
            module(x)


class CompressedModel(ComparedWorkload):
    """Logits of all positions."""

    what = "whole"
    about = "one forward pass of the whole model, every position's logits, no cache, no gradients, random weights"

    def __init__(self, variant: Compared, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.model = variant.filled(dtype, device)
        config: Any = self.model.config
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(config.vocab_size, (shape.batch, shape.text), generator=generator).to(device)

    @classmethod
    def error(cls, variant: Compared, device: torch.device) -> float:
        model = variant.filled(torch.float64, device)
        dense = densify(model, Compared("dense", variant.cfg).filled(torch.float64, device), exact=False)
        tokens = torch.arange(4, device=device)[None]
        with torch.inference_mode():
            got, want = (m(input_ids=tokens).logits for m in (model, dense))
        return float((got - want).norm() / want.norm())

    @torch.inference_mode()
    def run(self) -> None:
        self.model(input_ids=self.tokens)


@dataclass(frozen=True)
class Solver(Variant):
    """`hooi` of attnlab, or `partial_tucker` of `tensorly` with the settings of TensorLLM's released code."""

    name: Literal["hooi", "tensorly"]

    def method(self) -> tuple[TensorLLM, Sizes]:
        """The method and the sizes of the first layer. ConfigError: `compress` is another method."""
        method = method_of(self.cfg)
        if not isinstance(method, TensorLLM):
            raise ConfigError("bench.what=decomposition measures partial Tucker: give compress=tensorllm")
        return method, method.sizes(Compared("compressed", self.cfg).layer())


class Decomposition(Workload):
    """Decomposition of random tensors with the sizes of one layer; `text` and `batch` are ignored.

    LookupError: TensorLy is not installed, or does not support common factors for different numbers of heads.
    """

    what = "decomposition"
    about = "partial Tucker of noise of one layer's size, the method's ranks, sweeps and tolerance, float32 input"
    checked = ("error",)
    error: Callable[[], float]

    def __init__(self, variant: Solver, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        method, sizes = variant.method()
        generator = torch.Generator().manual_seed(0)  # the same noise in every process
        sides = [(len(stack.names), stack.heads, sizes.dim, sizes.width) for stack in sizes.stacks]
        blocks = [torch.randn(side, generator=generator).to(device, dtype) for side in sides]
        ranks, sweeps, tolerance = [stack.rank for stack in sizes.stacks], method.sweeps, method.tolerance
        if variant.name == "hooi":
            self.error = lambda: tucker(blocks, sizes.ranks, ranks, sweeps=sweeps, tolerance=tolerance).error
            return
        if len(blocks) > 1:
            raise LookupError("TensorLy cannot decompose heads of different numbers with common factors")
        try:
            import tensorly
            from tensorly.decomposition import partial_tucker
        except ImportError as error:
            raise LookupError("TensorLy is not installed: pip install tensorly") from error
        tensorly.set_backend("pytorch", local_threadsafe=True)
        rank = [ranks[0] or len(blocks[0]), *sizes.ranks]
        options = {"rank": rank, "modes": [0, 2, 3], "n_iter_max": sweeps, "tol": tolerance, "init": "svd"}
        self.error = lambda: float(partial_tucker(blocks[0], **options)[1][-1])

    @classmethod
    def lineup(cls, cfg: DictConfig, settings: Settings) -> list[Solver]:
        """`hooi`, and `tensorly` if `bench.references` contains it, which takes minutes for a large layer."""
        return [Solver("hooi", cfg), *([Solver("tensorly", cfg)] if "tensorly" in settings.references else [])]

    @classmethod
    def shapes(cls, cfg: DictConfig, settings: Settings) -> list[Shape]:
        return [Shape("decomposition", 1, 1, 0, 1)]

    @classmethod
    def check(cls, variant: Solver, settings: Settings, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """Excess of the relative error of `hooi` over TensorLy's, after one decomposition each; at least 0."""
        if variant.name == "tensorly" or "tensorly" not in settings.references:
            return {}
        (shape,) = cls.shapes(variant.cfg, settings)
        hooi, tensorly = (cls(solver, shape, dtype, device).error() for solver in cls.lineup(variant.cfg, settings))
        return {"error": max(hooi - tensorly, 0.0), "ours": hooi, "tensorly": tensorly, "tolerance": SAME}

    @classmethod
    def facts(cls, variants: Sequence[Any], shape: Shape, checks: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Sizes of the tensors, and ranks."""
        _, sizes = variants[0].method()
        tensors = [[sizes.dim, sizes.width, len(stack.names), stack.heads] for stack in sizes.stacks]
        return {"tensors": tensors, "ranks": [*sizes.ranks, *{stack.rank for stack in sizes.stacks}]}

    def run(self) -> None:
        self.error()

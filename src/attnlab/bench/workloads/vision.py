"""A compressed attention layer of a vision transformer, compared with the dense layer and with a loop over heads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import attnlab.torchvision_schemas  # noqa: F401  (before timm)

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn import functional as F

from attnlab.bench.settings import Settings, Shape
from attnlab.bench.variants import Variant
from attnlab.bench.workloads import Workload
from attnlab.compression.methods.query_key import QueryKeyMethod, Sizes
from attnlab.compression.modules.attention import CompressedAttention, FactoredAttention
from attnlab.config.build import instantiate
from attnlab.errors import ConfigError
from attnlab.models.build import without_memory
from attnlab.pretrained import Layer, family_of

EXACT = 1e-10  # relative difference in float64 above which no ratio is reported


@dataclass(frozen=True)
class LayerVariant(Variant):
    """A form of the first attention layer of the task's model, with random weights from the seed.

    Args:
        name: compressed; dense: uncompressed; loop: compressed, computed head by head.
    """

    name: Literal["compressed", "dense", "loop"]

    def module(self, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """`compressed` and `loop` share their weights."""
        torch.manual_seed(self.cfg.seed)
        model, layer, compressed = outlined(self.cfg)
        if self.name == "dense":
            return model.get_submodule(layer.attention or "").to(device, dtype).eval()
        with torch.no_grad():
            for parameter in compressed.parameters():
                parameter.normal_(std=0.02)  # similar to trained weights
        compressed = compressed.to(device, dtype).eval()
        if self.name == "loop":
            assert isinstance(compressed, FactoredAttention)
            return PerHead(compressed)
        return compressed


class VisionLayer(Workload):
    """One forward pass of `batch` images, without gradients."""

    what = "forward"
    about = "one attention layer, no gradients, random weights; uneven ranks where heads share a total"
    checked = ("output",)
    keys = {"tokens": "text"}

    def __init__(self, variant: LayerVariant, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.module = variant.module(dtype, device)
        generator = torch.Generator().manual_seed(0)
        with without_memory():
            dim = Sizes.of(outlined(variant.cfg)[1]).dim
        self.x = torch.randn(shape.batch, shape.text, dim, generator=generator).to(device, dtype)

    @classmethod
    def lineup(cls, cfg: DictConfig, settings: Settings) -> list[LayerVariant]:
        """ConfigError: `compress` does not compress attention."""
        with without_memory():
            factored = isinstance(outlined(cfg)[2], FactoredAttention)
        loop = [LayerVariant("loop", cfg)] if factored else []
        return [LayerVariant("compressed", cfg), LayerVariant("dense", cfg), *loop]

    @classmethod
    def shapes(cls, cfg: DictConfig, settings: Settings) -> list[Shape]:
        with without_memory():
            model: Any = outlined(cfg)[0]
        tokens = cfg.task.data.image_size**2 // model.patch_embed.patch_size[0] ** 2 + model.num_prefix_tokens
        return [Shape("forward", settings.batches[0], 1, 0, tokens)]

    @classmethod
    @torch.no_grad()
    def check(
        cls, variant: LayerVariant, settings: Settings, dtype: torch.dtype, device: torch.device
    ) -> dict[str, Any]:
        """Error of the loop against the layer, in float64. Compressed and dense layer are different functions."""
        if variant.name != "loop":
            return {}
        loop = cls(variant, cls.shapes(variant.cfg, settings)[0], torch.float64, device)
        layer = LayerVariant("compressed", variant.cfg).module(torch.float64, device)
        want = layer(loop.x[:2])
        return {"output": float((loop.module(loop.x[:2]) - want).norm() / want.norm()), "tolerance": EXACT}

    @classmethod
    def facts(cls, variants: Sequence[Any], shape: Shape, checks: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Ranks, and the remaining percentage of the dense layer's multiply-adds."""
        cfg = variants[0].cfg
        with without_memory():
            _, layer, compressed = outlined(cfg)
        share = compressed.multiply_adds(shape.text) / layer.attention_multiply_adds(shape.text)
        return {
            "ranks": compressed.ranks if isinstance(compressed, FactoredAttention) else compressed.rank,
            "multiply_adds_percent": round(100 * share, 2),
            "loop_difference": checks.get("loop", {"output": 0.0})["output"],
        }

    @torch.inference_mode()
    def run(self) -> None:
        self.module(self.x)


class PerHead(nn.Module):
    """The same function head by head: projections, product and softmax. A fusion mixes logits of heads."""

    def __init__(self, layer: FactoredAttention) -> None:
        super().__init__()
        query, key, value = layer.qkv.weight.split([layer.rank, layer.rank, layer.value_rank])
        self.query, self.key = query.split(layer.ranks), key.split(layer.ranks)
        self.query_bias = layer.query_bias.split(layer.ranks)
        self.value, self.output = value.split(layer.value_ranks), layer.proj.weight.split(layer.value_ranks, -1)
        self.bias, self.fusion, self.scale = layer.proj.bias, layer.fusion, layer.scale

    def forward(self, x: Tensor) -> Tensor:
        sides = zip(self.query, self.query_bias, self.key, strict=True)
        logits = [F.linear(x, q, b) @ F.linear(x, k).mT * self.scale for q, b, k in sides]
        if self.fusion is not None:
            logits = [sum((w * a for w, a in zip(row, logits, strict=True)), x.new_zeros(())) for row in self.fusion]
        y: Tensor = self.bias
        for a, v, o in zip(logits, self.value, self.output, strict=True):
            y = y + F.linear(a.softmax(-1) @ F.linear(x, v), o)
        return y


def outlined(cfg: DictConfig) -> tuple[nn.Module, Layer, CompressedAttention]:
    """The task's model with any number of classes, its first layer with attention, and the compressed attention.

    If heads share a total rank, their ranks decrease linearly from five thirds of their mean to a third.

    ConfigError: `compress` does not compress attention.
    """
    method = instantiate(cfg.compress, path="compress") if cfg.choices.compress != "none" else None
    if not isinstance(method, QueryKeyMethod):
        raise ConfigError(
            f"mode=bench of task={cfg.choices.task} measures compressed attention: give compress= a method that "
            "compresses it, for instance compress=irratt"
        )
    spec = instantiate(cfg.task.model, path="task.model")
    model = spec.create(None if spec.num_classes is not None else 2)
    layer = next(layer for layer in family_of(model).layers(model) if layer.attention)
    sizes = Sizes.of(layer)
    compressed = method.outline(sizes)
    if isinstance(compressed, FactoredAttention) and not method.per_head:
        ranks, fused = uneven(compressed.rank, sizes.heads), compressed.fusion is not None
        compressed = FactoredAttention(sizes.dim, ranks, compressed.value_ranks, sizes.scale, fused=fused, **sizes.rest)
    return model, layer, compressed


def uneven(total: int, heads: int) -> list[int]:
    """Decreasing ranks of `heads` heads with the sum `total`, from about five thirds of their mean to a third."""
    shares = [5 - 4 * h / max(1, heads - 1) for h in range(heads)]
    ranks = [1 + int((total - heads) * share / sum(shares)) for share in shares]
    for i in range(total - sum(ranks)):
        ranks[i] += 1
    return ranks

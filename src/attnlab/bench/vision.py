"""Time of one compressed attention layer against timm's dense one, and against a loop over its heads."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlab.bench.settings import Settings, rounded, summary
from attnlab.bench.workloads import timed
from attnlab.compression.methods.query_key import QueryKeyMethod, Sizes
from attnlab.compression.modules.attention import CompressedAttention, FactoredAttention
from attnlab.pretrained import Layer

EXACT = 1e-10  # relative difference in float64, above which no ratio is reported


class PerHead(nn.Module):
    """The same function, head after head: each its own projections, product, softmax. A fusion mixes in between."""

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
            logits = [
                sum((w * one for w, one in zip(row, logits, strict=True)), x.new_zeros(())) for row in self.fusion
            ]
        y: Tensor = self.bias
        for one, v, o in zip(logits, self.value, self.output, strict=True):
            y = y + F.linear(one.softmax(-1) @ F.linear(x, v), o)
        return y


class _Forward:
    """One forward pass without gradients."""

    attentions: list[Any] = []

    def __init__(self, layer: nn.Module, x: Tensor) -> None:
        self.layer, self.x = layer, x

    def prepare(self) -> None:
        """Nothing is left from the round before."""

    @torch.inference_mode()
    def run(self) -> None:
        self.layer(self.x)

    def cache_bytes(self) -> None:
        return None


def layers(model: nn.Module, layer: Layer, method: QueryKeyMethod) -> dict[str, nn.Module]:
    """The compressed layer with random weights first, then what it is measured against.

    Heads of methods that share a total rank are given ranks that rise evenly from a third of the mean to five thirds.
    """
    sizes = Sizes.of(layer)
    ours: nn.Module = method.outline(sizes)
    if isinstance(ours, FactoredAttention) and not method.per_head:
        ranks = uneven(ours.rank, sizes.heads)
        fused = ours.fusion is not None
        ours = FactoredAttention(sizes.dim, ranks, ours.value_ranks, sizes.scale, fused=fused, **sizes.rest)
    found = {"compressed": ours, "dense": model.get_submodule(layer.attention or "")}
    return found | ({"loop": PerHead(ours)} if isinstance(ours, FactoredAttention) else {})


def uneven(total: int, heads: int) -> list[int]:
    """Falling ranks of a sum, from about five thirds of their mean to a third."""
    shares = [5 - 4 * h / max(1, heads - 1) for h in range(heads)]
    ranks = [1 + int((total - heads) * share / sum(shares)) for share in shares]
    for i in range(total - sum(ranks)):
        ranks[i] += 1
    return ranks


def measure(
    model: nn.Module,
    layer: Layer,
    method: QueryKeyMethod,
    tokens: int,
    settings: Settings,
    device: torch.device,
    advance: Callable[[], None],
) -> dict[str, Any]:
    """A row as mode=bench has them: medians over rounds in which the variants take turns, ratios pair by pair."""
    found = {name: module.eval().to(device) for name, module in layers(model, layer, method).items()}
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(settings.batch, tokens, Sizes.of(layer).dim, generator=generator)
    exact = difference(found, x[:2].to(device))
    dtype = getattr(torch, settings.dtype)
    works = {}
    for name, module in found.items():
        module = PerHead(found["compressed"].to(dtype)) if name == "loop" else module.to(dtype)  # type: ignore[arg-type]
        works[name] = _Forward(module, x.to(device, dtype))
    times: dict[str, list[dict[str, float]]] = {name: [] for name in works}
    for number in range(settings.warmup + settings.rounds):
        for name in list(works)[:: -1 if number % 2 else 1]:
            once = timed(works[name], device)
            if number >= settings.warmup:
                times[name].append(once)
            advance()
    variants: dict[str, dict[str, Any]] = {}
    for name, runs in times.items():
        variants[name] = {key: summary([run[key] for run in runs]) for key in runs[0] if key != "prepare_seconds"}
        variants[name]["tokens_per_second"] = rounded(settings.batch * tokens / variants[name]["seconds"]["median"])
        variants[name]["peak_memory_mib"] = "not run"
    ratios = []
    for other in list(times)[1:]:
        pair: dict[str, Any] = {"of": "compressed", "against": other}
        if other == "loop" and exact > EXACT:
            ratios.append(pair | {"not run": f"the loop was not found equal: relative difference {exact:.2g}"})
            continue
        for key in ("seconds", "cpu_seconds"):
            if key in times[other][0]:
                turns = zip(times[other], times["compressed"], strict=True)
                pair[key] = summary([theirs[key] / mine[key] for theirs, mine in turns])
        ratios.append(pair)
    ours = found["compressed"]
    assert isinstance(ours, CompressedAttention)
    return {
        "what": "forward",
        "batch": settings.batch,
        "tokens": tokens,
        "ranks": ours.ranks if isinstance(ours, FactoredAttention) else ours.rank,
        "multiply_adds_percent": round(100 * ours.multiply_adds(tokens) / layer.attention_multiply_adds(tokens), 2),
        "loop_difference": exact,
        "variants": variants,
        "ratios": ratios,
    }


@torch.no_grad()
def difference(found: dict[str, nn.Module], x: Tensor) -> float:
    """Relative norm of what the loop's output differs by, in float64; 0 where there is no loop."""
    if "loop" not in found:
        return 0.0
    ours = found["compressed"].double()
    assert isinstance(ours, FactoredAttention)
    for parameter in ours.parameters():
        parameter.normal_(std=0.02)  # of the size of trained ones
    y = ours(x.double())
    return float((PerHead(ours)(x.double()) - y).norm() / y.norm())

"""Multiply-adds and parameters, in the convention of IrrAtt's table 1.

Matrix products of linear layers, convolutions and attention, and five per element of a LayerNorm; no biases, softmax,
GELU or residual sums. A rank counts as it is, not as what kernels fill it up to.
"""

from __future__ import annotations

from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before timm)

import torch
from timm.layers.attention import Attention
from torch import Tensor, nn

from attnlab.compression.modules.attention import FactoredAttention, SlimAttention

PER_NORM = 5  # per element of a LayerNorm: the convention of fvcore, which gives the widely quoted totals


def attention_multiply_adds(layer: nn.Module, tokens: int) -> int:
    """Of one attention layer with its projections: N tokens, H heads, F features.

    Dense: 4 N F D H + 2 H N^2 D. Factored: 2 N F (R + P) + N^2 (R + P), and H^2 N^2 with a fusion. CP: 2 N F (R + P) +
    N^2 (H R + P). R, P: sums of query-key and value-output ranks over heads.
    """
    if isinstance(layer, Attention):
        rank = value_rank = layer.attn_dim
        products = rank
    elif isinstance(layer, SlimAttention):
        rank, value_rank = layer.rank, layer.value_rank
        products = layer.num_heads * rank
    elif isinstance(layer, FactoredAttention):
        rank, value_rank = layer.rank, layer.value_rank
        products = rank + (layer.num_heads**2 if layer.fusion is not None else 0)
    else:
        raise TypeError(f"no rule to count {type(layer).__name__}")
    inputs, outputs = layer.qkv.in_features, layer.proj.out_features
    projections = tokens * (inputs * (2 * rank + value_rank) + value_rank * outputs)
    return projections + tokens**2 * (products + value_rank)


def multiply_adds(model: nn.Module, size: tuple[int, int, int] = (3, 224, 224)) -> dict[str, int]:
    """`total` of one image, and `attention`'s part in it. The model may be on the meta device."""
    counts = {"attention": 0, "rest": 0}
    inside = {id(m) for a in model.modules() if _is_attention(a) for m in a.modules() if m is not a}

    def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if _is_attention(module):
            counts["attention"] += attention_multiply_adds(module, inputs[0].shape[1])
        elif isinstance(module, nn.Linear):
            counts["rest"] += output.numel() * module.in_features
        elif isinstance(module, nn.Conv2d):
            counts["rest"] += output.numel() * module.weight[0].numel()
        elif isinstance(module, nn.LayerNorm):
            counts["rest"] += PER_NORM * output.numel()

    hooks = [m.register_forward_hook(hook) for m in model.modules() if id(m) not in inside]
    training = model.training
    weight = next(model.parameters())
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, *size, device=weight.device, dtype=weight.dtype))
    finally:
        model.train(training)
        for handle in hooks:
            handle.remove()
    return {"total": counts["attention"] + counts["rest"], "attention": counts["attention"]}


def parameters(model: nn.Module) -> dict[str, int]:
    """Total, in attention layers, and trained."""
    inside = [p for m in model.modules() if _is_attention(m) for p in m.parameters()]
    return {
        "total": sum(p.numel() for p in model.parameters()),
        "attention": sum(p.numel() for p in inside),
        "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }


def ratios(dense: nn.Module, compressed: nn.Module, size: tuple[int, int, int]) -> dict[str, Any]:
    """What remains of a model, in percent: the three columns of table 1, and the numbers behind them."""
    was, now = multiply_adds(dense, size), multiply_adds(compressed, size)
    had, has = parameters(dense)["total"], parameters(compressed)["total"]
    return {
        "attention_percent": 100 * now["attention"] / was["attention"],
        "multiply_adds_percent": 100 * now["total"] / was["total"],
        "parameters_percent": 100 * has / had,
        "multiply_adds": now["total"],
        "multiply_adds_dense": was["total"],
        "attention_multiply_adds": now["attention"],
        "attention_multiply_adds_dense": was["attention"],
        "parameters": has,
        "parameters_dense": had,
    }


def _is_attention(module: nn.Module) -> bool:
    return isinstance(module, Attention | FactoredAttention | SlimAttention)

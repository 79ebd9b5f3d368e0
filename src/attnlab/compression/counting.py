"""Multiply-adds, in the convention of IrrAtt's table 1, and what remains of a compressed model.

Matrix products of linear layers, convolutions and attention, and five per element of a LayerNorm; no biases, softmax,
GELU or residual sums. A rank counts as it is, not as the width to which kernels fill it up.

An attention layer of N tokens, H heads, F features, head width D: dense 4 N F D H + 2 H N^2 D; factored 2 N F (R + P) +
N^2 (R + P), with a fusion H^2 N^2 more; CP SlimAtt 2 N F (R + P) + N^2 (H R + P). R, P: sums of the query-key and
value-output ranks over the heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attnlab.compression.modules.base import Replacement
from attnlab.compression.modules.linear import Fused
from attnlab.compression.transform import replacements
from attnlab.models.build import count_parameters
from attnlab.pretrained import Family, family_of

PER_NORM = 5  # per element of a LayerNorm: the convention of fvcore, which gives the widely quoted totals


def attention_modules(model: nn.Module, family: Family | None = None) -> dict[str, nn.Module]:
    """The attention modules of a model, dense or compressed, by path."""
    layers = (family or family_of(model)).layers(model)
    return {path: model.get_submodule(path) for layer in layers if (path := layer.attention) is not None}


def multiply_adds(
    model: nn.Module, size: tuple[int, ...] = (3, 224, 224), *, family: Family | None = None
) -> dict[str, int]:
    """`total` for one input, and the part of `attention` in it.

    Args:
        model: may be on the meta device. Runs once, without gradients, in eval mode.
    """
    layers = {layer.attention: layer for layer in (family or family_of(model)).layers(model)}
    attentions = {
        id(module): layers[path]
        for path, module in attention_modules(model, family).items()
        if isinstance(module, Replacement) or "q" in layers[path].projections
    }
    within = {id(part) for module in model.modules() if id(module) in attentions for part in module.modules()}
    replaced = [module for module in model.modules() if isinstance(module, Replacement)]
    inside = {id(part) for module in replaced for part in module.modules() if part is not module}
    counts = {"attention": 0, "rest": 0}

    def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        count = 0
        if isinstance(module, Replacement):
            count = module.multiply_adds(inputs[0].shape[:-1].numel())
        elif id(module) in attentions:
            count = attentions[id(module)].products(inputs[0].shape[1])
        elif isinstance(module, nn.Linear):
            count = output.numel() * module.in_features
        elif isinstance(module, nn.Conv2d):
            count = output.numel() * module.weight[0].numel()
        elif isinstance(module, nn.LayerNorm):
            count = PER_NORM * output.numel()
        counts["attention" if id(module) in within else "rest"] += count

    hooks = [module.register_forward_hook(hook) for module in model.modules() if id(module) not in inside]
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


def parameters(model: nn.Module, family: Family | None = None) -> dict[str, int]:
    """Total, in attention modules, and trained."""
    return count_parameters(model, attention_modules(model, family).values())


def ratios(dense: nn.Module, compressed: nn.Module, size: tuple[int, ...]) -> dict[str, Any]:
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


def rate(dense: nn.Module, compressed: nn.Module, *, family: Family | None = None) -> dict[str, float]:
    """How much smaller the matrices are that compression replaced: TensorLLM's compression rate, and what it means.

    Args:
        dense: the model before; both may be on the meta device.

    Returns:
        `parameters` of the factors and `parameters_dense` of the matrices that they replace, both without biases; where
        nothing is replaced (a method that writes dense matrices) both are those of all known matrices. `rate`:
        parameters_dense / parameters. `multiply_adds_factorised` and `multiply_adds_dense`: of one token, the same
        matrices, without the products of attention. `model_saving_percent`: of all parameters of the model.
    """
    sizes: dict[str, int] = {}
    for layer in (family or family_of(dense)).layers(dense):
        for projection in layer.projections.values():
            out, width = projection.shape
            for path in {projection.path, layer.attention or projection.path}:
                inside = path == projection.path or projection.path.startswith(f"{path}.")
                sizes[path] = sizes.get(path, 0) + (out * width if inside else 0)
    placed = replacements(compressed)
    stay = {  # matrices that stay dense beside others of their module
        path: sum(p.weight.numel() for p in module.parts if isinstance(p, nn.Linear))
        if isinstance(module, Fused)
        else 0
        for path, module in placed.items()
    }
    parameters_dense = sum(sizes.get(path, 0) - stay[path] for path in placed)
    has = sum(
        value.numel()
        for path, module in placed.items()
        for name, value in module.named_parameters()
        if not name.endswith("bias")
    ) - sum(stay.values())
    # of a N + b N^2 multiply-adds for N tokens, a
    adds = sum((4 * m.multiply_adds(1) - m.multiply_adds(2)) // 2 - stay[path] for path, m in placed.items())
    if not placed:
        owners = {p.path for layer in (family or family_of(dense)).layers(dense) for p in layer.projections.values()}
        parameters_dense = has = adds = sum(sizes[path] for path in owners)
    totals = [sum(p.numel() for p in model.parameters()) for model in (dense, compressed)]
    return {
        "parameters": has,
        "parameters_dense": parameters_dense,
        "rate": parameters_dense / has if has else 1.0,
        "multiply_adds_dense": parameters_dense,
        "multiply_adds_factorised": adds,
        "model_saving_percent": 100 * (1 - totals[1] / totals[0]),
    }

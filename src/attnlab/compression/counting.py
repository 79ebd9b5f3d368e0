"""Multiply-adds in the convention of IrrAtt's table 1, and the size of a compressed model relative to the dense one.

Counted are matrix products of linear layers, convolutions and attention, and five per element of a LayerNorm; not
counted are biases, softmax, GELU and residual sums. A rank counts unpadded, without the zeros that kernels add.

An attention layer of N tokens, H heads, F features, head width D: dense 4 N F D H + 2 H N^2 D; factored 2 N F (R + P) +
N^2 (R + P), with a fusion H^2 N^2 more; CP SlimAtt 2 N F (R + P) + N^2 (H R + P). R, P: sums of the query-key and
value-output ranks over the heads.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.compression.modules.base import Replacement
from attnlab.compression.modules.linear import Fused
from attnlab.compression.transform import replacements
from attnlab.models.build import count_parameters
from attnlab.pretrained import family_of

PER_NORM = 5  # per element of a LayerNorm: the convention of fvcore, which gives the widely quoted totals


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The attention modules of a model, dense or compressed, by path."""
    paths = (layer.attention for layer in family_of(model).layers(model))
    return {path: model.get_submodule(path) for path in paths if path is not None}


def multiply_adds(model: nn.Module, size: tuple[int, ...] = (3, 224, 224)) -> dict[str, int]:
    """Multiply-adds for one input: `total`, and the part in `attention`.

    Args:
        model: runs once, without gradients, in eval mode; may be on the meta device.
    """
    layers = {layer.attention: layer for layer in family_of(model).layers(model)}
    attentions = {
        id(module): layers[path]
        for path, module in attention_modules(model).items()
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


def parameters(model: nn.Module) -> dict[str, int]:
    """Parameters: total, in attention modules, and trained."""
    return count_parameters(model, attention_modules(model).values())


def ratios(dense: nn.Module, compressed: nn.Module, size: tuple[int, ...]) -> dict[str, Any]:
    """Remaining share of a model in percent: the three columns of table 1, and the absolute numbers."""
    before, after = multiply_adds(dense, size), multiply_adds(compressed, size)
    count_before, count_after = parameters(dense)["total"], parameters(compressed)["total"]
    return {
        "attention_percent": 100 * after["attention"] / before["attention"],
        "multiply_adds_percent": 100 * after["total"] / before["total"],
        "parameters_percent": 100 * count_after / count_before,
        "multiply_adds": after["total"],
        "multiply_adds_dense": before["total"],
        "attention_multiply_adds": after["attention"],
        "attention_multiply_adds_dense": before["attention"],
        "parameters": count_after,
        "parameters_dense": count_before,
    }


def rate(dense: nn.Module, compressed: nn.Module) -> dict[str, float]:
    """TensorLLM's compression rate of the replaced matrices, and what follows from it.

    Args:
        dense: the model before compression; both may be on the meta device.

    Returns:
        `parameters` of the factors and `parameters_dense` of the matrices that they replace, both without biases. If
        a method writes dense matrices and replaces none, both count all known matrices. `rate`: parameters_dense /
        parameters. `multiply_adds_factorised` and `multiply_adds_dense`: of one token in these matrices, without the
        products of attention. `model_saving_percent`: of all parameters of the model.
    """
    sizes: dict[str, int] = {}  # by path of an attention module and of the modules of its projections
    paths: set[str] = set()
    for layer in family_of(dense).layers(dense):
        for projection in layer.projections.values():
            paths.add(projection.path)
            for path in {projection.path, layer.attention or projection.path}:
                inside = path == projection.path or projection.path.startswith(f"{path}.")
                sizes[path] = sizes.get(path, 0) + math.prod(projection.shape) * inside
    placed = replacements(compressed)
    unchanged = {  # parameters of matrices that stay dense in a fused module
        path: sum(p.weight.numel() for p in module.parts if isinstance(p, nn.Linear))
        for path, module in placed.items()
        if isinstance(module, Fused)
    }
    still_dense = sum(unchanged.values())
    parameters_dense = sum(sizes.get(path, 0) for path in placed) - still_dense
    named = [named for module in placed.values() for named in module.named_parameters()]
    remaining = sum(value.numel() for name, value in named if not name.endswith("bias")) - still_dense
    # the linear part a of a N + b N^2 multiply-adds for N tokens
    adds = sum((4 * m.multiply_adds(1) - m.multiply_adds(2)) // 2 for m in placed.values()) - still_dense
    if not placed:
        parameters_dense = remaining = adds = sum(sizes[path] for path in paths)
    totals = [sum(p.numel() for p in model.parameters()) for model in (dense, compressed)]
    return {
        "parameters": remaining,
        "parameters_dense": parameters_dense,
        "rate": parameters_dense / remaining if remaining else 1.0,
        "multiply_adds_dense": parameters_dense,
        "multiply_adds_factorised": adds,
        "model_saving_percent": 100 * (1 - totals[1] / totals[0]),
    }

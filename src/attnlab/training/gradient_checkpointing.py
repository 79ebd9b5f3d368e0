"""Gradient checkpointing: a layer keeps its input alone, and is computed again in the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import is_grad_enabled, nn
from torch.utils.checkpoint import checkpoint

from attnlab.errors import ConfigError
from attnlab.training.batch_norm import batch_norms


def checkpoint_layers(model: nn.Module) -> None:
    """Compute each layer of a model again in the backward pass. Losses and gradients stay the same.

    Layers are the members of each `nn.ModuleList` named `layers`; models of timm have a switch. ConfigError: the model
    has BatchNorm, or no layers.
    """
    if norms := batch_norms(model):
        raise ConfigError(
            f"hardware.gradient_checkpointing=true: the model has BatchNorm ({next(iter(norms))}), whose statistics "
            "would count each batch twice"
        )
    if callable(switch := getattr(model, "set_grad_checkpointing", None)):
        switch(True)
        return
    stacks = [getattr(module, "layers", None) for module in model.modules()]
    layers = list(dict.fromkeys(layer for stack in stacks if isinstance(stack, nn.ModuleList) for layer in stack))
    if not layers:
        name = type(model).__name__
        raise ConfigError(f"hardware.gradient_checkpointing=true: {name} has no layers to compute again")
    for layer in layers:
        layer.forward = functools.partial(_again, layer, layer.forward)


def _again(layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if layer.training and is_grad_enabled():
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    return forward(*args, **kwargs)

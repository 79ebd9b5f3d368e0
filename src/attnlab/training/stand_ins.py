"""Layers that repeat in a stack are run once to know their memory; the others of their kind only hold as much.

A deep model has the same layer many times. Of three or more of one kind in a stack the first two are run; what the
second needs is measured, forward and backward, and each further one allocates just that, with the parameters'
gradients. What lies around the layers is run as it is.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

LEAST = 3  # layers of a kind; of fewer each is run
PLAIN = (bool, int, float, str, type(None))


class Counting(Protocol):
    """What knows how many bytes are alive, and the most so far."""

    live: int
    peak: int


@dataclass(frozen=True)
class Cost:
    """Bytes of one layer.

    Args:
        forward: the most in the forward pass, above what is there when it begins.
        kept: from there to the backward pass, without input and output.
        keeps_input: whether the input is kept, too.
        backward: the most in the backward pass, above what is there when it begins.
        shape: of the output.
        dtype: of the output.
    """

    forward: int
    kept: int
    keeps_input: bool
    backward: int
    shape: torch.Size
    dtype: torch.dtype


class StandIns:
    """In place of the layers of a model that repeat.

    Args:
        model: changed in place; of use for one training step on tensors without storage.
        alive: counts all tensors.

    Attributes:
        twins: layer that is not run -> the layer of its kind that is measured.
    """

    def __init__(self, model: nn.Module, alive: Counting) -> None:
        self.twins, self._alive = dict(_repeated(model)), alive
        self._costs: dict[tuple[Any, ...], Cost | None] = {}
        for twin in dict.fromkeys(self.twins.values()):
            twin.forward = functools.partial(self._measured, twin, twin.forward)
        for layer, twin in self.twins.items():
            layer.forward = functools.partial(self._instead, layer, twin, layer.forward)

    def parameters(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """The parameters of layers that are not run, each with that of the measured layer."""
        for layer, twin in self.twins.items():
            yield from zip(layer.parameters(), twin.parameters(), strict=True)

    def _measured(self, twin: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        key = _key(twin, args, kwargs)
        if key not in self._costs and _trains(args):
            self._costs[key] = self._cost(twin, forward, *args, **kwargs)
        return forward(*args, **kwargs)

    def _instead(
        self, layer: nn.Module, twin: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        cost = self._costs.get(_key(twin, args, kwargs)) if _trains(args) else None
        return forward(*args, **kwargs) if cost is None else _StandIn.apply(args[0], layer, cost)

    def _cost(
        self, twin: nn.Module, forward: Callable[..., Any], first: Tensor, *args: Any, **kwargs: Any
    ) -> Cost | None:
        """What a layer needs, by a step of it alone; None: it gives something else than one tensor."""
        alive, peak = self._alive, self._alive.peak
        leaf = first.detach().requires_grad_()
        before = alive.live
        given = leaf.clone()
        entry = alive.peak = alive.live
        out = forward(given, *args, **kwargs)
        if not isinstance(out, Tensor):
            alive.peak = peak
            return None
        highest, held = alive.peak - entry, alive.live
        own = given.untyped_storage().nbytes()
        del given
        keeps_input = alive.live == held
        kept = held - entry - out.untyped_storage().nbytes()
        gradient = torch.empty_like(out)
        trained = [parameter for parameter in twin.parameters() if parameter.requires_grad]
        start = alive.peak = alive.live
        with torch.autocast(out.device.type, enabled=False):
            torch.autograd.grad(out, [leaf, *trained], gradient, allow_unused=True)
        backward = alive.peak - start
        alive.peak = peak
        assert held - before >= own
        return Cost(highest, max(0, kept), keeps_input, backward, out.shape, out.dtype)


class _StandIn(torch.autograd.Function):
    """Allocates what a layer would."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module, cost: Cost) -> Tensor:
        _room(cost.forward, x)
        ctx.held = [_room(cost.kept, x), x.detach() if cost.keeps_input else None]
        ctx.layer, ctx.cost, ctx.shape, ctx.dtype = layer, cost, x.shape, x.dtype
        return x.new_empty(cost.shape, dtype=cost.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        _room(ctx.cost.backward, gradient)
        ctx.held.clear()
        for parameter in ctx.layer.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
        return gradient.new_empty(ctx.shape, dtype=ctx.dtype), None, None


def _room(size: int, like: Tensor) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=like.device)


def _trains(args: tuple[Any, ...]) -> bool:
    """Whether a layer that is called so has a backward pass."""
    return bool(args) and isinstance(args[0], Tensor) and args[0].requires_grad and torch.is_grad_enabled()


def _key(twin: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The layer that is measured, and the shapes that it is called with."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    return twin, *((tuple(x.shape), x.dtype, x.requires_grad) for x in tensors)


def _repeated(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Each layer that need not be run, with the second of its kind in the same stack."""
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    inside: set[nn.Module] = set()
    for stack in model.modules():
        if stack in inside or not isinstance(stack, nn.ModuleList | nn.Sequential):
            continue
        kinds: dict[Any, list[nn.Module]] = {}
        for layer in stack:
            own = list(layer.parameters())
            if own and all(owners[id(p)] == 1 for p in own):
                kinds.setdefault(_kind(layer), []).append(layer)
        for layers in kinds.values():
            if len(layers) >= LEAST:
                inside.update(module for layer in layers for module in layer.modules())
                yield from ((layer, layers[1]) for layer in layers[2:])


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """Equal for layers that compute the same: classes, settings and the shapes of the parameters."""
    modules = [
        (name, type(module), tuple((key, value) for key, value in vars(module).items() if isinstance(value, PLAIN)))
        for name, module in layer.named_modules()
    ]
    shapes = [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in layer.named_parameters()]
    return tuple(modules), tuple(shapes)

"""Comparison of a variant with a reference that has the same weights, without which no ratio is reported."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attnlab.attention import Attention, MTLAWindow
from attnlab.attention.ops import naive
from attnlab.attention.ops.backends import Backend, choose
from attnlab.attention.ops.native import product
from attnlab.attention.sliding_window import Windowed
from attnlab.bench.settings import rounded
from attnlab.bench.variants import AttentionVariant, LayerSteps
from attnlab.decoding.beam import Compiler, Steps

# Relative to a tensor's norm. A wrong formula differs by 1e-2 or more, which bfloat16 does not resolve.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 1e-2}
Reference = Callable[[Attention], Any]  # a mechanism -> the same function, called with a text and a prefix or None
TEXT, PREFIX, STEPS, BEAM = 67, 29, 9, 3  # not multiples of a stride; more than one tile of a kernel
FEW = 35  # length of a text for a formula, whose time is quadratic


class Formula(nn.Module):
    """Naive form of a mechanism, row by row, as the reference if there is no published algorithm."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor, prefix: Tensor | None = None) -> Tensor:
        """(B, T, d) and prefixes (B, S, d) or None -> (B, T, d)."""
        prefixes = [None] * len(x) if prefix is None else prefix
        return torch.stack([naive.attend(self.attention, *row) for row in zip(x, prefixes, strict=True)])


def check(variant: AttentionVariant, publish: Reference, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Relative errors of a variant in this dtype against its reference in float64.

    Products of float32 matrices are exact, without TF32. For a hybrid stack, the largest errors of all mechanisms. In
    half precision the errors in float32 are returned if they are above their tolerance; else the tolerance is 1.5 times
    the error of the reference in half precision, within once and twice that of the dtype: gradients of a sharp softmax
    are rounded that much in any implementation.

    Args:
        publish: returns the published algorithm with the weights of a mechanism, or another reference, or raises
            LookupError.

    Returns:
        The errors `output`, `gradient` and `steps` (cached steps with reordered beams), and the `tolerance`.
    """
    products = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # the rounding of TF32 or bfloat16 would hide a wrong formula
    try:
        for kind in (torch.float32, dtype) if dtype.itemsize < 4 else (dtype,):
            layers = [_check_layer(layer, publish, kind, device) for layer in variant.layers()]
            result = {name: float(np.max([errors[name] for errors in layers])) for name in layers[0]}
            if not all(error <= result["tolerance"] for error in result.values()):
                break
    finally:
        torch.set_float32_matmul_precision(products)
    return result


def _wide_window(mechanism: Attention) -> int:
    """Length from which FlexAttention computes a wide window on this device; 0: it does not."""
    if not isinstance(mechanism, Windowed):
        return 0
    weight, window = next(mechanism.parameters()), mechanism.window
    taken = choose("window", weight.detach(), window=window, block=mechanism.block, noted=False)
    return window + TEXT if taken is Backend.FLEX else 0


def _check_layer(
    variant: AttentionVariant, publish: Reference, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    mechanism = variant.mechanism(dtype, device)
    generator = torch.Generator().manual_seed(variant.cfg.seed)
    _sharpen(mechanism, generator)
    reference = publish(copy.deepcopy(mechanism).double())
    tested = publish(mechanism) if variant.published else mechanism

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, mechanism.d_model, generator=generator).to(device, dtype)

    errors: dict[str, list[float]] = {"output": [], "gradient": [], "steps": []}
    tolerance = most = TOLERANCE[dtype]
    merged = mechanism.raw + mechanism.stride if isinstance(mechanism, MTLAWindow) else 0  # length at which it merges
    longest = max(merged, FEW if isinstance(reference, Formula) else TEXT)
    longest = max(longest, _wide_window(mechanism))
    text = min(longest, mechanism.max_positions or longest)
    for size in (0, max(merged, PREFIX)) if mechanism.reads_prefix else (0,):
        x, prefix, grad = random(2, text), random(2, size), random(2, text)
        got, want = _passes(tested, x, prefix, grad), _passes(reference, x, prefix, grad)
        errors["output"].append(_error(got[:1], want[:1]))
        errors["gradient"].append(_error(got[1:], want[1:]))
        if dtype.itemsize < 4:
            rounding = _error(_passes(publish(copy.deepcopy(mechanism)), x, prefix, grad), want)
            tolerance = min(max(tolerance, 1.5 * rounding), 2 * most)
        x, order = random(2 * BEAM, STEPS), torch.stack([_moves(generator) for _ in range(STEPS)]).to(device)
        compiled = variant.compiler(device)
        errors["steps"] += _steps(tested, reference, x, prefix, order, variant.copied, compiled)
    return {name: rounded(float(np.max(values)), 2) for name, values in errors.items()} | {
        "tolerance": rounded(tolerance, 2)
    }


@torch.no_grad()
def _sharpen(attention: Attention, generator: torch.Generator) -> None:
    """Scale weights, so that the softmax is not uniform, and perturb biases and norms."""
    for parameter in attention.parameters():
        if parameter.dim() > 1:
            parameter.mul_(2.0)
        else:
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator).to(parameter))


def _passes(attention: nn.Module, x: Tensor, prefix: Tensor, grad: Tensor) -> list[Tensor]:
    """Output, then the gradients of inputs and weights."""
    dtype = next(attention.parameters()).dtype
    inputs = [t.detach().to(dtype).requires_grad_() for t in ((x, prefix) if prefix.shape[1] else (x,))]
    attention.zero_grad()
    out = attention(*inputs)
    out.backward(grad.to(dtype))
    return [out, *(t.grad for t in (*inputs, *attention.parameters()) if t.grad is not None)]


@torch.no_grad()
def _steps(
    tested: Attention,
    reference: nn.Module,
    x: Tensor,
    prefix: Tensor,
    order: Tensor,
    copied: bool,
    compiled: Compiler | None,
) -> list[float]:
    """Errors of cached steps with reordered rows, for two sentences, against the parallel form, and of a product."""
    rows, size = len(x), prefix.shape[1]
    copies = prefix.repeat_interleave(BEAM, 0)
    cache = tested.new_cache(rows, STEPS, size, prefix_batch=rows if copied else 2)
    if size:
        tested.read_prefix(copies if copied else prefix, None, cache)
    steps = Steps(LayerSteps(tested), [cache], STEPS, graphs=False, compiled=compiled)
    history, errors = x[:, :0].double(), []
    for t in range(STEPS):
        new = x[:, t : t + 1]
        history = torch.cat((history, new.double()), 1)
        want = reference(history, copies.double() if size else None)[:, -1:]
        errors.append(_error([steps(new)], [want]))
        cache.reorder(order[t])
        history = history[order[t]]
    few, weight = x[:, 0], x[:, 1].contiguous()  # a model's other layers compute such products
    return [*errors, _error([product(few, weight)], [few.double() @ weight.double().mT])]


def _moves(generator: torch.Generator) -> Tensor:
    """For each row, a random row of the same sentence that it continues, (2 BEAM,)."""
    return torch.cat([first + torch.randint(0, BEAM, (BEAM,), generator=generator) for first in (0, BEAM)])


def _error(got: list[Tensor], want: list[Tensor]) -> float:
    """Largest norm of a difference, relative to the norm of its tensor or a thousandth of the largest norm."""
    wide = [t.detach().double() for t in want]
    norms = torch.stack([t.norm() for t in wide])
    differences = torch.stack([(g.detach() - w).norm() for g, w in zip(got, wide, strict=True)])
    return float((differences / norms.clamp(min=norms.max() / 1000)).max())  # propagates NaN

"""What torch's fused kernels for CUDA refuse; torch is asked, which knows the device, the libraries and what is off."""

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.nn.attention import SDPBackend

Function = TypeVar("Function", bound=Callable[..., Any])
ROWS = 128  # positions of the attention that torch is asked about
ASKED = {
    SDPBackend.FLASH_ATTENTION: "can_use_flash_attention",
    SDPBackend.EFFICIENT_ATTENTION: "can_use_efficient_attention",
    SDPBackend.CUDNN_ATTENTION: "can_use_cudnn_attention",
}


def constant(function: Function) -> Function:
    """As `torch.compiler.assume_constant_result`, which imports the whole compiler to set this.

    Args:
        function: whose result is a constant of a traced program.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant
def stock(device: torch.device, dtype: torch.dtype, width: int, value_dim: int, dropout: float) -> int:
    """The number of the `SDPBackend` that SDPA takes for causal attention with a gradient."""
    q, value = _example(device, dtype, width, value_dim)
    return int(torch._fused_sdp_choice(q, q, value, None, dropout, True))


@constant
def refusal(
    kernel: SDPBackend, device: torch.device, dtype: torch.dtype, width: int, value_dim: int, dropout: float
) -> str | None:
    """Why a kernel cannot compute causal attention of these widths; None: it can.

    Keys are columns of one tensor, after the values, and are loaded 16 bytes at a time.

    Args:
        value_dim: width of values; those of the flash kernel are made as wide as keys.
    """
    step = 16 // dtype.itemsize
    if width % step or value_dim % step:
        return f"keys are {width} wide and values {value_dim}, expected multiples of {step} in {dtype}"
    flash = kernel is SDPBackend.FLASH_ATTENTION
    q, value = _example(device, dtype, width, width if flash else value_dim)
    parameters = torch.backends.cuda.SDPAParams(q, q, value, None, dropout, True, False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if getattr(torch.backends.cuda, ASKED[kernel])(parameters, True):
            return None
    reasons = "; ".join(str(one.message).partition(" (Triggered")[0] for one in caught)
    return f"torch refuses keys {width} wide and values {value_dim}: {reasons or 'without a reason'}"


def _example(device: torch.device, dtype: torch.dtype, width: int, value_dim: int) -> list[torch.Tensor]:
    return [torch.empty(1, 1, ROWS, n, device=device, dtype=dtype, requires_grad=True) for n in (width, value_dim)]

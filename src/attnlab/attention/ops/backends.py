"""The one place that chooses what computes an attention, by operation, device, dtype, mask and dropout.

Operations, and the backends that each has:

    dense    every query against the same keys, one mask       SDPA
             (`dense_attention` here)
    merged   causal with a stride, over any number of pasts    FUSED_CPU, FUSED_CUDA, PLAIN
             (`partial_softmax.merged_attention` and its relatives)
    step     one new position against a cache                  TRITON, SDPA, PLAIN
             (`decode.attend_cached`)

    SDPA        `torch.nn.functional.scaled_dot_product_attention`, which itself takes the device's fastest kernel
    FUSED_CPU   torch's flash kernel for CPUs, called for parts of a softmax that are merged afterwards (`sdpa.Kernel`)
    FUSED_CUDA  torch's memory-efficient kernel for CUDA, in the same way
    PLAIN       matrix products and one softmax: any device, dtype and dropout, and all transforms of torch.func
    TRITON      a kernel of `kernels`: CUDA, half precision or float32, no gradient

A further backend (FlexAttention) is a member of `Backend`, an entry in `BACKENDS`, a condition in `_refusal` and in
`choose`, and a branch where its operation is computed. Each backend is held to the naive form of every mechanism,
forward and, where it has one, backward. Tests and benchmarks ask for one with `prefer`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from .kernels import DTYPES, usable
from .tables import transformed

Operation = Literal["dense", "merged", "step"]


class Backend(Enum):
    """See the top of this file."""

    SDPA = auto()
    FUSED_CPU = auto()
    FUSED_CUDA = auto()
    PLAIN = auto()
    TRITON = auto()


BACKENDS: dict[Operation, tuple[Backend, ...]] = {
    "dense": (Backend.SDPA,),
    "merged": (Backend.FUSED_CPU, Backend.FUSED_CUDA, Backend.PLAIN),
    "step": (Backend.TRITON, Backend.SDPA, Backend.PLAIN),
}
_preferred: Backend | None = None


@contextmanager
def prefer(backend: Backend) -> Iterator[None]:
    """Within the context this backend computes every operation that has it; the others are computed as otherwise.

    For tests and benchmarks, of one thread: what is asked for holds for the whole process. `choose` raises ValueError
    where the backend cannot compute what is asked of it.

    Args:
        backend: for instance `Backend.TRITON`.
    """
    global _preferred
    before, _preferred = _preferred, backend
    try:
        yield
    finally:
        _preferred = before


def choose(operation: Operation, q: Tensor, *, dropout: float = 0.0, masked: bool = False) -> Backend:
    """The backend for queries `q`.

    Args:
        operation: what is computed.
        q: queries, or another tensor of the same device and dtype.
        dropout: of attention weights.
        masked: for a step: whether one softmax kernel cannot do it (a prefix, a mask, or values narrower than keys).

    Raises:
        ValueError: a backend is preferred that cannot compute this.
    """
    if _preferred is not None and _preferred in BACKENDS[operation]:
        if reason := _refusal(_preferred, q, dropout, masked):
            raise ValueError(f"backend {_preferred.name} cannot compute operation {operation}: {reason}")
        return _preferred
    if operation == "dense":
        return Backend.SDPA
    if operation == "step":
        if q.is_cuda and _refusal(Backend.TRITON, q, dropout, masked) is None:
            return Backend.TRITON
        return Backend.PLAIN if masked else Backend.SDPA
    if transformed():  # the fused kernels' backward is ours, which torch.func cannot transform
        return Backend.PLAIN
    if q.is_cuda and q.dtype != torch.float64:
        return Backend.FUSED_CUDA
    if q.device.type == "cpu" and dropout == 0.0:
        return Backend.FUSED_CPU
    return Backend.PLAIN


def _refusal(backend: Backend, q: Tensor, dropout: float, masked: bool) -> str | None:
    """Why a backend cannot compute an operation that has it; None: it can."""
    if backend in (Backend.PLAIN, Backend.SDPA):
        return "it has no prefix, no mask, and values as wide as keys" if backend is Backend.SDPA and masked else None
    if transformed() and not (backend is Backend.TRITON and torch.compiler.is_compiling()):  # dynamo's own
        return "transforms of torch.func cannot go through a fused kernel"
    device = "cpu" if backend is Backend.FUSED_CPU else "cuda"
    if backend is not Backend.TRITON:
        if q.device.type != device:
            return f"the tensors are on {q.device}, expected {device}"
        if backend is Backend.FUSED_CPU and dropout:
            return f"dropout is {dropout}, expected 0"
        return "the dtype is float64" if backend is Backend.FUSED_CUDA and q.dtype == torch.float64 else None
    if q.dtype not in DTYPES:
        return f"the dtype is {q.dtype}, expected {', '.join(str(dtype) for dtype in DTYPES)}"
    if dropout or torch.is_grad_enabled() and q.requires_grad:
        return "it has neither dropout nor a gradient"
    if not usable(q.device):
        return (
            f"no Triton kernel runs on {q.device}: expected a CUDA device of compute capability 8.0 or later and "
            "triton (pip install 'attnlab[gpu]'), or TRITON_INTERPRET=1 and the CPU"
        )
    return None


def dense_attention(
    q: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """softmax(q k^T scale) v.

    Args:
        q: (B, H, T, D).
        key, value: (B, G, K, .); G divides H.
        mask: bool, true where a query sees a key; broadcasts to (B, H, T, K).
        causal: T = K, and query i sees the keys j <= i; then without a mask.
        dropout: of attention weights.
        scale: None: 1 / sqrt(D).

    Returns:
        (B, H, T, Dv).
    """
    assert choose("dense", q, dropout=dropout) is Backend.SDPA
    width, missing = value.shape[-1], key.shape[-1] - value.shape[-1]
    if q.device.type == "cpu" and q.shape[2] > 1 and not dropout and 0 < missing <= width:
        value = F.pad(value, (0, missing))  # the fused kernel of CPUs has values as wide as keys
    out = F.scaled_dot_product_attention(
        q, key, value, mask, dropout, causal, scale=scale, enable_gqa=key.shape[1] < q.shape[1]
    )
    return out[..., :width]

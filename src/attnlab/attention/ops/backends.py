"""The one place that chooses what computes an attention, by operation, device, dtype, mask and dropout.

Operations, and the backends that each has:

    dense    every query against the same keys, one mask       SDPA
             (`dense_attention` here)
    merged   causal with a stride, over any number of pasts    FUSED_CPU, FUSED_CUDA, PLAIN
             (`partial_softmax.merged_attention` and its relatives)
    step     one new position against a cache                  SDPA, PLAIN
             (`decode.attend_cached`)

    SDPA        `torch.nn.functional.scaled_dot_product_attention`, which itself takes the device's fastest kernel
    FUSED_CPU   torch's flash kernel for CPUs, called for parts of a softmax that are merged afterwards (`sdpa.Kernel`)
    FUSED_CUDA  torch's memory-efficient kernel for CUDA, in the same way
    PLAIN       matrix products and one softmax: any device, dtype and dropout, and all transforms of torch.func

A further backend (Triton, FlexAttention) is a member of `Backend`, a condition in `choose`, and a branch where its
operation is computed. Each backend is held to the naive form of every mechanism, forward and backward.
"""

from enum import Enum, auto
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from .tables import transformed

Operation = Literal["dense", "merged", "step"]


class Backend(Enum):
    """See the top of this file."""

    SDPA = auto()
    FUSED_CPU = auto()
    FUSED_CUDA = auto()
    PLAIN = auto()


def choose(operation: Operation, q: Tensor, *, dropout: float = 0.0, masked: bool = False) -> Backend:
    """The backend for queries `q`.

    Args:
        operation: what is computed.
        q: queries, or another tensor of the same device and dtype.
        dropout: of attention weights.
        masked: for a step: whether one softmax kernel cannot do it (a prefix, a mask, or values narrower than keys).
    """
    if operation == "dense":
        return Backend.SDPA
    if operation == "step":
        return Backend.PLAIN if masked else Backend.SDPA
    if transformed():  # the fused kernels' backward is ours, which torch.func cannot transform
        return Backend.PLAIN
    if q.is_cuda and q.dtype != torch.float64:
        return Backend.FUSED_CUDA
    if q.device.type == "cpu" and dropout == 0.0:
        return Backend.FUSED_CPU
    return Backend.PLAIN


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

"""Merged attention of a text on a CPU in float32, forward and backward, by `merged.cpp`.

Query i sees the keys j <= i with (j + 1) mod s = 0, and key i. Keys and values come packed, [value | key].
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from .library import NUMBER, POINTER, REAL, library, matrix_product

TENSORS = "q packed out lse grad dq dpacked"
SIZES = "texts steps heads width value_width stride threads"


class View(ctypes.Structure):
    """`View` of merged.cpp: a tensor (B, T, H, .) or (B, T, H)."""

    _fields_ = [("values", POINTER), *((name, ctypes.c_ssize_t) for name in ("text", "row", "head"))]


class Merged(ctypes.Structure):
    """`Merged` of merged.cpp."""

    _fields_ = [
        *((name, View) for name in TENSORS.split()),
        *((name, NUMBER) for name in SIZES.split()),
        ("scale", REAL),
        ("gemm", POINTER),
    ]


def merged_forward(q: Tensor, packed: Tensor, out: Tensor, lse: Tensor, scale: float, stride: int) -> None:
    """Fill `out` and `lse`.

    Args:
        q: queries, (B, T, H, D).
        packed: (B, T, H, Dv + D).
        out: (B, T, H, Dv).
        lse: log-sum-exps of the logits, (B, T, H).
        stride: s, which divides T.
    """
    _call("merged_forward", scale, stride, q=_rows(q), packed=_rows(packed), out=out, lse=lse)


def merged_backward(
    grad: Tensor, q: Tensor, packed: Tensor, out: Tensor, lse: Tensor, dq: Tensor, dpacked: Tensor, scale: float,
    stride: int,
) -> None:  # fmt: skip
    """Fill `dq` and `dpacked`, which have the shapes of `q` and `packed`.

    Args:
        grad: gradient of the output, (B, T, H, Dv).
        out, lse: output and log-sum-exps of the softmax over these keys and any others.
        Others are those of :func:`merged_forward`.
    """
    inputs = {"q": _rows(q), "packed": _rows(packed), "grad": _rows(grad), "out": _rows(out)}
    _call("merged_backward", scale, stride, **inputs, lse=lse, dq=dq, dpacked=dpacked)


def _rows(x: Tensor) -> Tensor:
    """x with contiguous rows, as BLAS reads them. `contiguous` would leave the stride of a single row as it is."""
    whole = x.stride(-1) == 1 and x.stride(1) >= x.shape[-1] and not x.is_neg()
    return x if whole else x.resolve_neg().clone(memory_format=torch.contiguous_format)


def _call(function: str, scale: float, stride: int, **tensors: Tensor) -> None:
    (*sizes, width), value_width = tensors["q"].shape, tensors["out"].shape[-1]
    last = {"q": width, "dq": width, "out": value_width, "grad": value_width}
    for name, x in tensors.items():
        shape = [*sizes] if name == "lse" else [*sizes, last.get(name, value_width + width)]
        if x.dtype != torch.float32 or list(x.shape) != shape:
            raise ValueError(f"{name}: expected float32 {shape}, not {x.dtype} {list(x.shape)}")
    views: dict[str, Any] = {name: View(x.data_ptr(), *x.stride()[:3]) for name, x in tensors.items()}
    counts = dict(zip(SIZES.split(), (*sizes, width, value_width, stride, torch.get_num_threads()), strict=True))
    getattr(library(), function)(ctypes.byref(Merged(**views, **counts, scale=scale, gemm=matrix_product())))

"""Choice of the backend of an attention operation, by device, dtype, mask and dropout.

Operations and their backends:

    dense    every query against the same keys, one mask       SDPA
             (`dense_attention` here)
    window   the newest positions of a text, and a prefix      SDPA, FLEX
             (`sliding_window`)
    merged   causal with a stride, over any number of pasts    NATIVE, FUSED_CPU, CUDNN_CUDA, FLASH_CUDA, FUSED_CUDA,
             (`partial_softmax.merged_attention` and others)    PLAIN
    step     one new position against a cache                  TRITON, SDPA, PLAIN
             (`decode.attend_cached`)

    SDPA        `torch.nn.functional.scaled_dot_product_attention`, which selects the fastest kernel of the device
    NATIVE      the C++ of this folder (`library`), in float32 on a CPU: in `merged` the text, while torch's flash
                kernel computes the pasts. A `step` of few rows without codes is recorded as NATIVE too, unless
                `prefer` names a backend of `step`
    FUSED_CPU   torch's flash kernel for CPUs, called for parts of a softmax that are merged afterwards (`sdpa.Kernel`)
    CUDNN_CUDA  cuDNN's kernel, in the same way: half precision, values of any width
    FLASH_CUDA  torch's flash kernel for CUDA, in the same way: half precision, values padded to the width of keys
    FUSED_CUDA  torch's memory-efficient kernel for CUDA, in the same way: also float32, and parts with a mask
    FLEX        FlexAttention (`flex`), compiled: skips blocks of keys that no query of a block sees
    PLAIN       matrix products and one softmax: any device, dtype and dropout, and all transforms of torch.func
    TRITON      a kernel of `kernels`: CUDA, half precision or float32, no gradient, not in compiled code

On CUDA, `merged` uses the class of kernel that torch selects in SDPA for causal attention of the same device, dtype and
widths. MHA, which is dense, therefore never competes with a faster class of kernel, and a switch such as
`torch.nn.attention.sdpa_kernel` applies to both.

FLEX computes wide windows on CUDA, where its block mask skips keys that the blocks of `dense` compute and mask
(`flex.window_saves`). It is not used for MTLA, whose slots form s dense causal triangles of T / s queries and slots.

FlashAttention 4 is not a dependency: `activate_flash_attention_impl("FA4")` of `torch.nn.attention` replaces the
operators that FLASH_CUDA calls, which is recorded as "FLASH_CUDA FA4".

Training on CUDA uses two more kernels of `kernels` where it can: `own`, which lets one call compute all places of a
chunk of MTLA, and `rotary`. They are no backends: they take the place of small operations around one.

To add a backend, add a member of `Backend`, an entry in `BACKENDS`, a condition in `refusal` and in `choose`, and a
branch where its operation is computed. Tests compare each backend with the naive form of every mechanism, forward and,
if it has one, backward. Tests and benchmarks select one with `prefer`; `used` lists the ones in use.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from functools import lru_cache, wraps
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import _get_current_dispatch_mode

from .flex import refusal as flex_refusal
from .flex import window_saves
from .kernels import DTYPES, usable
from .library import library, matrix_product

Operation = Literal["dense", "window", "merged", "step"]
Function = TypeVar("Function", bound=Callable[..., Any])
P = ParamSpec("P")
Tables = TypeVar("Tables", bound=Tensor | tuple[Tensor, ...])
HALF = (torch.float16, torch.bfloat16)


class Backend(Enum):
    """The backends that the docstring of this module lists."""

    SDPA = auto()
    NATIVE = auto()
    FUSED_CPU = auto()
    CUDNN_CUDA = auto()
    FLASH_CUDA = auto()
    FUSED_CUDA = auto()
    FLEX = auto()
    PLAIN = auto()
    TRITON = auto()


BACKENDS: dict[Operation, tuple[Backend, ...]] = {
    "dense": (Backend.SDPA,),
    "window": (Backend.SDPA, Backend.FLEX),
    "merged": (
        Backend.NATIVE, Backend.FUSED_CPU, Backend.CUDNN_CUDA, Backend.FLASH_CUDA, Backend.FUSED_CUDA, Backend.PLAIN,
    ),
    "step": (Backend.TRITON, Backend.SDPA, Backend.PLAIN),
}  # fmt: skip
ROWS = 128  # positions of the example by which torch selects a kernel
STOCK = {  # kernels of SDPA
    SDPBackend.MATH: "matrix products",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient",
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
}
_preferred: Backend | None = None
_used: set[tuple[str, str]] = set()


def constant(function: Function) -> Function:
    """As `torch.compiler.assume_constant_result`, without importing the compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@contextmanager
def prefer(backend: Backend) -> Iterator[None]:
    """Within the context, use this backend for every operation that has it.

    For single-threaded tests and benchmarks: the preference is global. `choose` raises ValueError for inputs that the
    backend does not support.
    """
    global _preferred
    before, _preferred = _preferred, backend
    try:
        yield
    finally:
        _preferred = before


@contextmanager
def noting() -> Iterator[set[tuple[str, str]]]:
    """Collect the choices made within the context, as pairs of an operation and the name of its backend.

    Compiled code is noted when it is traced, not when it is called. Single-threaded, like `prefer`.
    """
    global _used
    before, _used = _used, set()
    try:
        yield _used
    finally:
        before |= _used
        _used = before


def used(pairs: set[tuple[str, str]] | None = None) -> dict[str, list[str]]:
    """Names of the backends in use, by operation.

    Args:
        pairs: result of `noting`; None: all choices of this process.
    """
    chosen: dict[str, list[str]] = {}
    for operation, name in sorted(_used if pairs is None else pairs):
        chosen.setdefault(operation, []).append(name)
    return chosen


def forget() -> None:
    """Clear `used`, for another run in the same process."""
    _used.clear()


def step_preferred() -> bool:
    """Whether `prefer` names a backend of `step`."""
    return _preferred in BACKENDS["step"]


@constant
def note(operation: str, name: str) -> None:
    """Record a choice. In compiled code this happens once, when it is traced."""
    if name == Backend.FLASH_CUDA.name:
        implementation = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
        name = f"{name} {implementation}" if implementation else name
    _used.add((operation, name))


def choose(
    operation: Operation,
    q: Tensor,
    *,
    dropout: float = 0.0,
    masked: bool = False,
    value_dim: int | None = None,
    window: int = 0,
    block: int = 0,
    noted: bool = True,
) -> Backend:
    """The backend for queries `q`.

    Args:
        q: queries, or another tensor of the same device and dtype, and, for `merged` if noted, the same last axis.
        masked: for `step`: whether there is a prefix, a mask, or values narrower than keys, which SDPA lacks.
        block: for `window`: number of queries in a block of dense attention.
        noted: whether to record the choice for `used`.

    Raises:
        ValueError: the preferred backend does not support these inputs.
    """
    chosen = _chosen(operation, q, dropout, masked, q.shape[-1] if value_dim is None else value_dim, (window, block))
    if noted and operation != "dense":  # `dense_attention` records the kernel that SDPA selects
        note(operation, chosen.name)
    return chosen


def _chosen(
    operation: Operation, q: Tensor, dropout: float, masked: bool, value_dim: int, window: tuple[int, int]
) -> Backend:
    if _preferred is not None and _preferred in BACKENDS[operation]:
        if reason := refusal(_preferred, q, dropout, masked, value_dim):
            raise ValueError(f"backend {_preferred.name} cannot compute operation {operation}: {reason}")
        return _preferred
    if operation == "dense":
        return Backend.SDPA
    if operation == "window":
        skips = q.is_cuda and window_saves(*window) and refusal(Backend.FLEX, q, dropout, masked) is None
        return Backend.FLEX if skips else Backend.SDPA
    if operation == "step":
        if q.is_cuda and refusal(Backend.TRITON, q, dropout, masked) is None:
            return Backend.TRITON
        return Backend.PLAIN if masked else Backend.SDPA
    if transformed() and not torch.compiler.is_compiling():  # torch.func cannot transform a custom backward
        return Backend.PLAIN
    if q.is_cuda and q.dtype != torch.float64:
        return _like_sdpa(q, value_dim, dropout)
    if q.device.type == "cpu" and dropout == 0.0 and q.shape[-1] > 2:  # of heads 2 wide, the kernel reads other memory
        native = _preferred is not Backend.TRITON and refusal(Backend.NATIVE, q, dropout, masked) is None
        return Backend.NATIVE if native else Backend.FUSED_CPU
    return Backend.PLAIN


def _like_sdpa(q: Tensor, value_dim: int, dropout: float) -> Backend:
    """The class of kernel that SDPA selects on CUDA for causal attention of these widths.

    cuDNN supports values of any width. The flash kernel needs values as wide as keys, which `sdpa.Kernel` provides.
    Keys begin after Dv columns, and all kernels load 16 bytes at a time: PLAIN computes unaligned widths.
    """
    width = q.shape[-1]
    aligned = all(n * q.dtype.itemsize % 16 == 0 for n in (width, value_dim))
    taken = stock(q.device, q.dtype, width, value_dim, dropout)
    if q.dtype in HALF and aligned:
        if taken == SDPBackend.CUDNN_ATTENTION.value:
            return Backend.CUDNN_CUDA
        if stock(q.device, q.dtype, width, width, dropout) == SDPBackend.FLASH_ATTENTION.value:
            return Backend.FLASH_CUDA
    return Backend.FUSED_CUDA if aligned and taken == SDPBackend.EFFICIENT_ATTENTION.value else Backend.PLAIN


def refusal(backend: Backend, q: Tensor, dropout: float, masked: bool, value_dim: int | None = None) -> str | None:
    """Reason why a backend does not support queries `q`; None: it does."""
    if backend in (Backend.PLAIN, Backend.SDPA):
        return "it has no prefix, no mask, and values as wide as keys" if backend is Backend.SDPA and masked else None
    if transformed() and not torch.compiler.is_compiling():  # dynamo always traces under a transform
        return "transforms of torch.func cannot go through a fused kernel"
    if backend in (Backend.NATIVE, Backend.FUSED_CPU, Backend.FLEX) and dropout:
        return f"dropout is {dropout}, expected 0"
    if backend is Backend.FLEX:
        return flex_refusal(q, value_dim)
    device = "cpu" if backend in (Backend.NATIVE, Backend.FUSED_CPU) else "cuda"
    if backend is not Backend.TRITON:
        if q.device.type != device:
            return f"the tensors are on {q.device}, expected {device}"
        if backend in (Backend.CUDNN_CUDA, Backend.FLASH_CUDA) and q.dtype not in HALF:
            return f"the dtype is {q.dtype}, expected torch.float16 or torch.bfloat16"
        if backend is Backend.NATIVE:
            return _native_refusal(q)
        double = backend is Backend.FUSED_CUDA and q.dtype == torch.float64
        return "the dtype is torch.float64, expected float32 or half precision" if double else None
    if torch.compiler.is_compiling():
        return "torch.compile does not see into it"
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


def _native_refusal(q: Tensor) -> str | None:
    if captured() or torch._C._is_tracing():
        return "torch.compile and tracing do not see into it"
    if q.dtype != torch.float32 or type(q) not in (Tensor, torch.nn.Parameter):
        return f"expected a tensor of torch.float32, not {type(q).__name__} of {q.dtype}"
    return None if matrix_product() and library() else "there is no C++ compiler, or torch does not export its BLAS"


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
        causal: T = K, and query i sees the keys j <= i. It excludes `mask`.
        scale: factor of the logits; None: 1 / sqrt(D).

    Returns:
        (B, H, T, Dv).
    """
    assert choose("dense", q, dropout=dropout) is Backend.SDPA
    grouped = key.shape[1] < q.shape[1]
    width, missing = value.shape[-1], key.shape[-1] - value.shape[-1]
    if q.device.type == "cpu" and q.shape[2] > 1 and not dropout and 0 < missing <= width:
        value = F.pad(value, (0, missing))  # the fused CPU kernel needs values as wide as keys
    if captured():
        note("dense", "SDPA")  # traced tensors do not determine a kernel
    else:
        kernel = torch._fused_sdp_choice(q, key, value, mask, dropout, causal, scale=scale, enable_gqa=grouped)
        note("dense", f"SDPA {STOCK.get(SDPBackend(kernel), 'overridden')}")
    out = F.scaled_dot_product_attention(q, key, value, mask, dropout, causal, scale=scale, enable_gqa=grouped)
    return out[..., :width]


@constant
def stock(device: torch.device, dtype: torch.dtype, width: int, value_dim: int, dropout: float) -> int:
    """Number of the `SDPBackend` that SDPA selects for causal attention with a gradient."""
    q, value = _example(device, dtype, width, value_dim)
    return int(torch._fused_sdp_choice(q, q, value, None, dropout, True))


def _example(device: torch.device, dtype: torch.dtype, width: int, value_dim: int) -> list[torch.Tensor]:
    return [torch.empty(1, 1, ROWS, n, device=device, dtype=dtype, requires_grad=True) for n in (width, value_dim)]


# --- what computes, and constant tables ---------------------------------------------------------------------------


def memoized(make: Callable[P, Tables], size: int = 64) -> Callable[P, Tables]:
    """`functools.lru_cache` for a function that returns tensors.

    Tables are computed outside autograd and inference mode, so that any later caller can use them. They are computed
    anew while a program is captured (torch.compile, torch.export) or a mode replaces tensors (FakeTensorMode, make_fx,
    torch.func), because tensors created there belong to that mode.
    """

    @lru_cache(size)
    def cached(*args: P.args, **kwargs: P.kwargs) -> Tables:
        with torch.inference_mode(False), torch.no_grad():
            return make(*args, **kwargs)

    @wraps(make)
    def table(*args: P.args, **kwargs: P.kwargs) -> Tables:
        if captured():
            return make(*args, **kwargs)
        return cached(*args, **kwargs)  # type: ignore[arg-type]  # a TypeVar may be unhashable

    return table


def transformed() -> bool:
    """Whether a transform of torch.func (grad, vmap, ...) is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def kernels_run(x: Tensor) -> bool:
    """Whether Triton kernels take the place of small operations on `x`: on CUDA, or where `prefer` selects TRITON."""
    wanted = x.is_cuda or _preferred is Backend.TRITON
    return wanted and x.dtype in DTYPES and not captured() and usable(x.device)


def captured() -> bool:
    """Whether operations are captured, transformed or replaced: their tensors may have no values."""
    return torch.compiler.is_compiling() or transformed() or _get_current_dispatch_mode() is not None

"""Parts of a decoding step on a CPU, in C++: products of few rows, RMS norms and the gated feed-forward.

The weights are read where they are: nothing is copied. Without a compiler torch computes the same (`library`).
"""

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from ctypes import byref
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.nn import functional as F

from .backends import captured, note, step_preferred
from .library import NUMBER, POINTER, REAL, library

ROWS = 64  # torch's products of more rows are faster
ROUNDED = (torch.int8, torch.bfloat16)
NORMS: list[type] = [nn.Identity, nn.RMSNorm, nn.LayerNorm]
NAME = "attnlab::native"  # of the calls in a profile
Operand = tuple[Tensor, Tensor | None, Tensor | None]  # weight, scales of one that is rounded, bias


class Weights(ctypes.Structure):
    """`Weights` of native.cpp."""

    _fields_ = [("values", POINTER), ("scales", POINTER), ("bias", POINTER), ("bits", NUMBER)]

    @classmethod
    def of(cls, read: "Operand", pointer: Callable[[Tensor | None], int | None]) -> "Weights":
        return cls(*map(pointer, read), 8 * read[0].itemsize)


class Prefix(ctypes.Structure):
    """`Prefix` of native.cpp."""

    _fields_ = [("lengths", POINTER), *((name, NUMBER) for name in ("size", "capacity", "beam", "stride"))]


def _structure(weights: str, pointers: str, numbers: str, reals: str) -> type[ctypes.Structure]:
    kinds = (Weights, weights), (POINTER, pointers), (Prefix, "prefix"), (NUMBER, numbers), (REAL, reals)
    fields = [(name, kind) for kind, names in kinds for name in names.split()]
    return type("Layer", (ctypes.Structure,), {"_fields_": fields})


LAYERS = {  # the structures of native.cpp that its functions read
    "heads_step": _structure(
        "query key value out",
        "cos sin keys values prefix_keys prefix_values",
        "rows d heads groups width capacity",
        "scale",
    ),
    "factors_step": _structure(
        "factors out",
        "cos sin norm key_head key_token value_head value_token "
        "prefix_key_head prefix_key_token prefix_value_head prefix_value_token",
        "rows d heads width rank q_rank capacity",
        "scale eps",
    ),
    "latents_step": _structure(
        "query down out gate",
        "cos sin norm norm_bias up_key up_value gate_slots slots prefix_slots",
        "rows d heads width r turned gate_width capacity norm_kind",
        "scale eps",
    ),
}


def takes(x: Tensor) -> ctypes.CDLL | None:
    """The library if it computes with the rows x (..., d): few of float32, without gradients, autocast and tracing."""
    if captured() or torch.is_grad_enabled() or not _plain(x, torch.float32):
        return None
    if not 0 < x.numel() <= ROWS * x.shape[-1] or torch.is_autocast_enabled("cpu"):
        return None
    if torch._C._is_tracing() or step_preferred():
        return None
    return library()


def _plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether the memory of a tensor is its values."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.dtype is dtype and tensor.is_cpu and not tensor.is_neg()


def _readable(tensor: Tensor | None, *shape: int, dtype: torch.dtype = torch.float32) -> bool:
    """Whether the library can read a tensor, or None, where it is."""
    return tensor is None or (_plain(tensor, dtype) and tensor.is_contiguous() and tensor.shape == shape)


def _own(module: Any, kind: Any) -> bool:
    """Whether a call of the module computes what the class says and nothing else."""
    if type(module) is not kind or "forward" in vars(module) or nn.modules.module._has_any_global_hook():
        return False
    return not (module._forward_hooks or module._forward_pre_hooks)


def operand(module: Any, n: int | None, k: int) -> Operand | None:
    """The weights (n, k) of a linear layer that the library multiplies; None: it does not. n None: any number."""
    coded = _own(module, RoundedLinear)
    if not coded and not (_own(module, nn.Linear) and module._parameters.keys() == {"weight", "bias"}):
        return None
    rows = module._parameters  # an attribute of a module takes longer
    weight, scales, bias = module._buffers["codes"] if coded else rows["weight"], rows.get("scales"), rows["bias"]
    n, dtype = len(weight) if n is None else n, weight.dtype if coded and weight.dtype in ROUNDED else torch.float32
    taken = _readable(weight, n, k, dtype=dtype) and _readable(scales, n) and _readable(bias, n)
    return (weight, scales, bias) if taken else None


def norm_kind(norm: Any, width: int) -> int | None:
    """The index in NORMS of a norm of the last axis; None: the library does not compute it."""
    if type(norm) not in NORMS or not _own(norm, type(norm)):
        return None
    kind = NORMS.index(type(norm))
    taken = (
        not kind or norm.normalized_shape == (width,) and all(_readable(x, width) for x in norm._parameters.values())
    )
    return kind if taken else None


def linear(module: nn.Module, x: Tensor) -> Tensor:
    """`module(x)`."""
    loaded = takes(x)
    read = None if loaded is None else operand(module, None, x.shape[-1])
    return module(x) if loaded is None or read is None else _linear(loaded, x, *read)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """`F.linear(x, weight)`."""
    if (loaded := takes(x)) is None or not _readable(weight, len(weight), x.shape[-1]):
        return F.linear(x, weight)
    return _linear(loaded, x, weight, None, None)


def _linear(loaded: ctypes.CDLL, x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None) -> Tensor:
    (n, k), x = weight.shape, x.contiguous()
    out = x.new_empty(*x.shape[:-1], n)
    read = Weights.of((weight, scales, bias), _at)
    with _noted():
        loaded.linear(x.numel() // k, n, k, torch.get_num_threads(), x.data_ptr(), byref(read), out.data_ptr())
    return out


def normed(module: Any, x: Tensor) -> Tensor:
    """`module(x)`, which is a norm of the last axis."""
    if (loaded := takes(x)) is None or norm_kind(module, x.shape[-1]) != 1:
        return module(x)
    x = x.contiguous()
    out, d = torch.empty_like(x), x.shape[-1]
    loaded.rms_norm(x.numel() // d, d, x.data_ptr(), _at(module.weight), eps_of(module), out.data_ptr())
    return out


def feed_forward(x: Tensor, more: Tensor, norm: Any, gate: Any, up: Any, down: Any) -> Tensor | None:
    """z + down(silu(gate(norm(z))) * up(norm(z))) with z = x + more; None: the library does not compute it.

    Args:
        x, more: (..., d).
        gate, up, down: linear layers without biases.
    """
    d, loaded = x.shape[-1], takes(x)
    if loaded is None or not _plain(more, torch.float32) or more.shape != x.shape or norm_kind(norm, d) != 1:
        return None
    if (first := operand(gate, None, d)) is None:
        return None
    f = len(first[0])
    read = [first, operand(up, f, d), operand(down, d, f)]
    if any(one is None or one[2] is not None for one in read):
        return None
    x, more = x.contiguous(), more.contiguous()
    out, weights = torch.empty_like(x), [byref(Weights.of(one, _at)) for one in read if one]
    with _noted():
        loaded.feed_forward(
            x.numel() // d, d, f, torch.get_num_threads(), x.data_ptr(), more.data_ptr(), _at(norm.weight),
            eps_of(norm), *weights, out.data_ptr(),
        )  # fmt: skip
    return out


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def eps_of(norm: nn.Module) -> float:
    """The constant of a norm in float32; 0 of a module without one."""
    eps: float | None = getattr(norm, "eps", 0.0)
    return torch.finfo(torch.float32).eps if eps is None else eps


def _noted(operation: str = "products of few rows") -> AbstractContextManager[Any]:
    """Record the choice, and the call if a profiler runs."""
    note(operation, "NATIVE")
    return record_function(NAME) if torch.autograd._profiler_enabled() else nullcontext()


class Layer:
    """A step of an attention layer by the library, which keeps pointers to its weights and to the buffers of a cache.

    Args:
        function: of the library.
        module: the attention layer.
        fields: the fields of its structure: numbers, tensors, linear layers with n and k; None: no such part.

    TypeError: the library does not compute with one of the tensors or linear layers.
    """

    def __init__(self, function: str, module: nn.Module, **fields: Any) -> None:
        self.run, self.kept = getattr(library(), function), list[Tensor]()
        self.fields = LAYERS[function](**{name: self._field(value) for name, value in fields.items()})
        self.parts = list(module._modules.items())
        tables = [table for _, part in self.parts if part for table in (part._parameters, part._buffers)]
        self.tensors = [(t, name, x, x.data_ptr()) for t in tables for name, x in t.items() if x is not None]
        self.module = module

    def _field(self, value: Any) -> Any:
        if isinstance(value, tuple):
            if (read := operand(*value)) is None:
                raise TypeError(f"{value[0]}: it is no linear layer in float32")
            return Weights.of(read, self._pointer)
        if isinstance(value, Tensor) and not _readable(value, *value.shape):
            raise TypeError(f"a tensor of {value.dtype}: expected contiguous float32")
        return self._pointer(value) if isinstance(value, Tensor) else value

    def _pointer(self, tensor: Tensor | None) -> int | None:
        if tensor is not None:
            self.kept.append(tensor.detach())  # the memory stays, whatever becomes of the parameter
        return _at(tensor)

    def stands(self) -> bool:
        """Whether the module has the same parts in the same memory, and no hooks. Weights may change in place."""
        modules = self.module._modules
        for name, part in self.parts:
            if modules.get(name) is not part or part and (part._forward_hooks or part._forward_pre_hooks):
                return False
        return all(table.get(name) is x and x.data_ptr() == at for table, name, x, at in self.tensors)

    def __call__(self, x: Tensor, *numbers: int) -> Tensor:
        """x (B, 1, d) -> (B, 1, d); `numbers`: position, slot, whether it opens the slot, and slots to read."""
        x = x.contiguous()
        out = torch.empty_like(x)
        with _noted("step"):
            self.run(byref(self.fields), torch.get_num_threads(), x.data_ptr(), *numbers, out.data_ptr())
        return out


class RoundedLinear(nn.Linear):
    """A linear layer for inference whose weights are rounded to 8 bits or to bfloat16, with a scale for each output.

    Args:
        weight: (n, k) in float32.
        bias: (n,) or None.
        dtype: torch.int8 or torch.bfloat16.
    """

    codes: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype = torch.int8) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        weight, scales = weight.detach(), weight.new_ones(len(weight))
        if dtype is torch.int8:
            scales = weight.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / 127
            weight = (weight / scales[:, None]).round()
        self.register_buffer("codes", weight.to(dtype).contiguous())
        self.scales = nn.Parameter(scales, requires_grad=False)  # whose dtype and device are those of the layer
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The rounded weights, (n, k) in float32."""
        return self.codes * self.scales[:, None]

    def forward(self, x: Tensor) -> Tensor:
        if (loaded := takes(x)) is None or (read := operand(self, None, x.shape[-1])) is None:
            return F.linear(x, self.weight.to(x.dtype), self.bias)
        return _linear(loaded, x, *read)


def round_weights(model: nn.Module, dtype: torch.dtype = torch.int8) -> None:
    """Round the linear layers of a language model and its output matrix to int8 or bfloat16, in place.

    The embedding, the norms, and the matrices by which a latent cache is read keep their type.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and not (name == "up" and hasattr(parent, "up_matrices")):
                setattr(parent, name, RoundedLinear(child.weight, child.bias, dtype))
    embedding = getattr(model, "embedding", None)
    if isinstance(embedding, nn.Embedding) and getattr(model, "output", model) is None:  # tied
        model.output = RoundedLinear(embedding.weight, None, dtype)

"""Constant tables, computed once per process."""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

P = ParamSpec("P")
Tables = TypeVar("Tables", bound=Tensor | tuple[Tensor, ...])


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
        if torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None or transformed():
            return make(*args, **kwargs)
        return cached(*args, **kwargs)  # type: ignore[arg-type]  # a TypeVar may be unhashable

    return table


def transformed() -> bool:
    """Whether a transform of torch.func (grad, vmap, ...) is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None

"""Constant tables that are computed once per process."""

from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

P = ParamSpec("P")
Tables = TypeVar("Tables", bound=Tensor | tuple[Tensor, ...])


def memoized(size: int) -> Callable[[Callable[P, Tables]], Callable[P, Tables]]:
    """Decorator: keep the newest `size` tables that a function of hashable arguments computes.

    Tables are computed outside of autograd and inference mode, so that any later caller can use them. While a program
    is captured (torch.compile, torch.export) or a mode replaces tensors (FakeTensorMode, make_fx, torch.func), tables
    are computed again and not kept: they belong to that mode, and a later caller must not get them.
    """

    def decorate(make: Callable[P, Tables]) -> Callable[P, Tables]:
        tables: OrderedDict[object, Tables] = OrderedDict()

        @wraps(make)
        def table(*args: P.args, **kwargs: P.kwargs) -> Tables:
            if torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None or transformed():
                return make(*args, **kwargs)
            key = (args, tuple(kwargs.items()))
            if key not in tables:
                with torch.inference_mode(False), torch.no_grad():
                    tables[key] = make(*args, **kwargs)
                if len(tables) > size:
                    tables.popitem(last=False)
            return tables[key]

        return table

    return decorate


def transformed() -> bool:
    """Whether a transform of torch.func (grad, vmap, ...) is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None

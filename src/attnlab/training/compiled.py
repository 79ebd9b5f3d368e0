"""Methods of models compiled by torch.compile when they are first called, and the compiler's seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any, TypeVar, cast

import torch

COMPILED_STEPS = "on a CPU the steps of decoding"  # what every text task compiles besides
Function = TypeVar("Function", bound=Callable[..., Any])


class _Clock:
    """Seconds in which the compiler works."""

    def __init__(self) -> None:
        self.seconds, self._began = 0.0, 0.0
        handler = torch._dynamo.callback.callback_handler
        handler.register_start_callback(self._start)
        handler.register_end_callback(self._end)

    def _start(self, *_: Any) -> None:
        self._began = time.perf_counter()

    def _end(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self._began


_clock = cache(_Clock)  # one for the process, once something is compiled


class Compiled:
    """Methods of modules, each compiled when it is first asked for: the model may be sharded or replaced before.

    Args:
        on: False: methods stay as they are.
        dynamic: whether sizes are variables from the first call on; None: those that change become variables.
    """

    def __init__(self, on: bool, dynamic: bool | None = None) -> None:
        self.on, self.dynamic = on, dynamic
        self.methods: dict[tuple[int, str], tuple[Any, Callable[..., Any]]] = {}

    def __bool__(self) -> bool:
        """Whether anything is compiled."""
        return self.on

    def __call__(self, method: Function) -> Function:
        """The compiled form of a bound method."""
        if not self.on:
            return method
        owner: Any = method.__self__  # type: ignore[attr-defined]
        key = id(owner), method.__name__
        if key not in self.methods:  # with its owner, so that no other one gets the number
            options: dict[str, Any] = {"dynamic": self.dynamic}
            if "isolate_recompiles" in signature(torch.compile).parameters:  # older versions of torch lack it
                options["isolate_recompiles"] = True  # graphs of other models do not count against torch's limit
            self.methods[key] = owner, torch.compile(method, **options)
        return cast(Function, self.methods[key][1])

    def seconds(self) -> float:
        """For how long this process has compiled since the first call: what timings of decoding leave out; 0 if off."""
        return _clock().seconds if self.on else 0.0

    def __reduce__(self) -> tuple[type[Compiled], tuple[bool, bool | None]]:
        """Copied and pickled without what was compiled: it belongs to the other model."""
        return Compiled, (self.on, self.dynamic)

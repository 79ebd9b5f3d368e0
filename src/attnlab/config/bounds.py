"""Bounds of a signature, enforced where a class is built without a configuration."""

import functools
import inspect
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Le, Lt

from attnlab.config.annotation import File, within, words
from attnlab.config.schema import signature

Class = TypeVar("Class", bound=type)
TextFile = Annotated[str, File()]
Size = Annotated[int, Ge(1), Le(1_048_576)]  # those of attention/bounds.py, which imports torch
SizeOrZero = Annotated[int, Ge(0), Le(1_048_576)]
Rank = Annotated[int, Ge(1), Le(65536)]
Layers = Annotated[int, Ge(1), Le(1024)]
Rate = Annotated[float, Ge(0), Lt(1)]  # of dropout


def bounded(cls: Class) -> Class:
    """Class decorator: the constructor raises ValueError for an argument outside the bounds of its annotation.

    The bounds are those that the configuration's check reads, such as `Annotated[int, Ge(1)]`, and so is the message.
    """
    init = cls.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        declared = signature(f"{cls.__module__}.{cls.__qualname__}")
        try:
            arguments = inspect.signature(init).bind(self, *args, **kwargs).arguments
        except TypeError:
            arguments = {}  # the constructor raises its own error
        for name, value in arguments.items():
            annotation = declared.parameters.get(name) if declared else None
            if annotation is not None and not within(annotation, value):
                raise ValueError(f"{name}={value}: expected {words(annotation)}")
        init(self, *args, **kwargs)

    cls.__init__ = checked  # type: ignore[misc]
    return cls

"""Shared code for using a trained model on new inputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from attnlab.config.nodes import require
from attnlab.config.schema import signature
from attnlab.data.inputs import Item, chunks
from attnlab.errors import ConfigError, DataError, nearest
from attnlab.run.device import autocast, scoring_dtype

WINDOW = 64  # inputs that are read and put into batches together
Search = TypeVar("Search")
Result = dict[str, Any]


class Predictor(ABC):
    """Applies a trained model, in evaluation mode, to inputs.

    Attributes:
        limit: the largest size of a batch, padding included; a larger input is a batch alone.
    """

    limit: int = 1

    def __init__(self, module: nn.Module, precision: str) -> None:
        self.device = next(module.parameters()).device
        self.dtype = scoring_dtype(precision)

    @abstractmethod
    def read(self, value: Any) -> Any:
        """An input, prepared for the model: a text, the path of a file, or an object as in `Trained.predict`.

        DataError: it cannot be used.
        """

    @abstractmethod
    def size(self, prepared: Any) -> int:
        """The share of `limit` that a prepared input takes."""

    @abstractmethod
    def predict(self, batch: list[Any]) -> list[Result]:
        """For each prepared input of a batch a mapping with `prediction` and other values of the task."""

    def shown(self, result: Result) -> str:
        """A result in one line of text."""
        return " ".join(str(result["prediction"]).split())

    def results(self, items: Iterable[Item]) -> Iterator[tuple[Item, Result]]:
        """Each input with its result, in the order of the inputs. The prediction of a blank line is empty."""
        for chunk in chunks(iter(items), WINDOW):
            prepared = {i: self.read(item.value) for i, item in enumerate(chunk) if not item.blank}
            order = sorted(prepared, key=lambda i: -self.size(prepared[i]))
            results: dict[int, Result] = {i: {"prediction": ""} for i in range(len(chunk)) if i not in prepared}
            while order:
                taken = max(1, self.limit // max(1, self.size(prepared[order[0]])))
                batch, order = order[:taken], order[taken:]
                with torch.inference_mode(), autocast(self.device, self.dtype):
                    results |= zip(batch, self.predict([prepared[i] for i in batch]), strict=True)
            for i, item in enumerate(chunk):
                if clash := sorted(results[i].keys() & item.fields.keys()):
                    raise DataError(f"the input has a key {clash[0]!r} already, which the result needs: rename it")
                yield item, results[i]


def changed(search: Search, settings: dict[str, Any], path: str) -> Search:
    """A search with other settings; `path`: its dotted key. TypeError: no such setting. ConfigError: a wrong value."""
    known = list(search.__dataclass_fields__)  # type: ignore[attr-defined]
    if wrong := [name for name in settings if name not in known]:
        raise TypeError(f"predict() has no setting {wrong[0]!r}{nearest(wrong[0], known)}")
    declared = signature(f"{type(search).__module__}.{type(search).__qualname__}").parameters
    for name, value in settings.items():
        require(f"{path}.{name}", declared[name], value)
    try:
        return replace(search, **settings)  # type: ignore[type-var]
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error

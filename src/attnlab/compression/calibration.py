"""Gram matrices of the projections' inputs on calibration data, for weighted methods and output errors."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.compression.methods.base import Method
from attnlab.errors import ConfigError
from attnlab.pretrained import family_of


class Grams:
    """X.T X of the inputs X (tokens, width) of modules, summed in float64 on the device of the model.

    Attributes:
        mask: the tokens of the next batch that count, bool (B, T), for padding; None: all.
        tokens: number of tokens counted, by path of a module.
    """

    def __init__(self) -> None:
        self.mask: Tensor | None = None
        self.tokens: dict[str, int] = {}
        self._sums: dict[str, Tensor] = {}
        self._owner: dict[str, str] = {}  # the module that stores the sum: q, k and v share their input
        self._last: tuple[Tensor, str] | None = None  # the last input, and the first module that received it

    def add(self, path: str, x: Tensor) -> None:
        """Add an input x (B, T, width) of the module at `path`.

        ConfigError: the module shares its input with another one in some batches alone.
        """
        if self._last is None or self._last[0] is not x:
            self._last = x, path
        owner = self._last[1]
        if self._owner.setdefault(path, owner) != owner:
            raise ConfigError(
                f"compress.calibration: {path} and {self._owner[path]} share their input in some batches alone"
            )
        if owner == path:
            flat = x.detach().reshape(-1, x.shape[-1]) if self.mask is None else x.detach()[self.mask.to(x.device)]
            gram = flat.double().T @ flat.double()
            self._sums[path] = self._sums[path].add_(gram) if path in self._sums else gram
        counted = x.shape[:-1].numel() if self.mask is None else int(self.mask.sum())
        self.tokens[path] = self.tokens.get(path, 0) + counted

    def of(self, path: str, damping: float = 0.0) -> Tensor:
        """The mean Gram matrix of a module's inputs, (width, width), float64. ConfigError: there was no input.

        `damping` times the mean of the diagonal is added to the diagonal, for directions outside the calibration data.
        """
        if not self.tokens.get(path):
            raise ConfigError(f"compress.calibration: {path} received no input; the calibration data is empty")
        gram = self._sums[self._owner[path]] / self.tokens[path]
        return gram + torch.eye(len(gram)).to(gram) * (damping * gram.diagonal().mean())

    def digest(self, paths: Sequence[str]) -> str:
        """A digest of the modules' Gram matrices in float32."""
        content = hashlib.sha256()
        for path in paths:
            content.update(path.encode() + self.of(path).float().cpu().numpy().tobytes())
        return content.hexdigest()[:16]


@contextmanager
def collect(model: nn.Module, paths: Sequence[str]) -> Iterator[Grams]:
    """Collect the first arguments of the modules at `paths` in every forward pass within the block."""
    grams = Grams()

    def hook(path: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda module, inputs: grams.add(path, inputs[0])

    hooks = [model.get_submodule(path).register_forward_pre_hook(hook(path)) for path in dict.fromkeys(paths)]
    try:
        yield grams
    finally:
        for handle in hooks:
            handle.remove()
        grams.mask, grams._last = None, None


def calibrated(method: Method, model: nn.Module, feed: Callable[[Grams], None]) -> Method:
    """Return the method with the Gram matrices that it needs, if any.

    Args:
        feed: runs the model over calibration data, and sets `mask` before each padded batch.
    """
    if method.calibration is None:
        return method
    units = method.units(model, family_of(model).layers(model))
    training = model.training
    try:
        with torch.no_grad(), collect(model.eval(), [path for unit in units for path in unit.reads]) as grams:
            feed(grams)
    finally:
        model.train(training)
    with_grams = copy.copy(method)
    with_grams.grams = grams
    return with_grams

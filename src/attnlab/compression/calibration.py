"""Inputs of projections over calibration data, as Gram matrices: what weighted methods and output errors need."""

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
from attnlab.pretrained import Family, family_of


class Grams:
    """X.T X of the inputs X (tokens, width) of modules, summed in float64 on the device of the model.

    Attributes:
        mask: which tokens of the next batch count, bool (B, T), so that padding does not; None: all.
        tokens: how many counted, by path of a module.
    """

    def __init__(self) -> None:
        self.mask: Tensor | None = None
        self.tokens: dict[str, int] = {}
        self._sums: dict[str, Tensor] = {}
        self._owner: dict[str, str] = {}  # whose sum a module has: q, k and v share their input, and so its sum
        self._last: tuple[Tensor, str] | None = None  # an input, and the first module that got it

    def add(self, path: str, x: Tensor) -> None:
        """Count an input (B, T, width) of the module at `path`.

        Raises:
            ConfigError: it shares its input with another module in some batches and not in others.
        """
        if self._last is None or self._last[0] is not x:
            self._last = x, path
        owner = self._last[1]
        if self._owner.setdefault(path, owner) != owner:
            raise ConfigError(f"compress.calibration: {path} and {self._owner[path]} share their input in some batches")
        if owner == path:
            flat = x.detach().reshape(-1, x.shape[-1]) if self.mask is None else x.detach()[self.mask.to(x.device)]
            gram = flat.double().T @ flat.double()
            self._sums[path] = self._sums[path].add_(gram) if path in self._sums else gram
        counted = x.shape[:-1].numel() if self.mask is None else int(self.mask.sum())
        self.tokens[path] = self.tokens.get(path, 0) + counted

    def of(self, path: str, damping: float = 0.0) -> Tensor:
        """The Gram matrix of a module's inputs per token, (width, width), float64.

        Args:
            damping: times the mean of the diagonal, added to the diagonal: inputs that calibration has not seen count.

        Raises:
            ConfigError: there was no input.
        """
        if not self.tokens.get(path):
            raise ConfigError(f"compress.calibration: {path} has seen no input; the calibration data is empty")
        gram = self._sums[self._owner[path]] / self.tokens[path]
        return gram + torch.eye(len(gram)).to(gram) * (damping * gram.diagonal().mean())

    def digest(self, paths: Sequence[str]) -> str:
        """A digest of these Gram matrices in float32."""
        content = hashlib.sha256()
        for path in paths:
            content.update(path.encode() + self.of(path).float().cpu().numpy().tobytes())
        return content.hexdigest()[:16]


@contextmanager
def collect(model: nn.Module, paths: Sequence[str]) -> Iterator[Grams]:
    """Sum up the inputs, the first arguments, of the modules at `paths` in every forward pass of the block."""
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


def calibrated(
    method: Method, model: nn.Module, feed: Callable[[Grams], None], *, family: Family | None = None
) -> Method:
    """The method with the Gram matrices that it needs; as it is if it needs none.

    Args:
        feed: runs the model over calibration data, and sets `mask` before each padded batch.
    """
    if method.calibration is None:
        return method
    units = method.units(model, (family or family_of(model)).layers(model))
    training = model.training
    try:
        with torch.no_grad(), collect(model.eval(), [path for unit in units for path in unit.reads]) as grams:
            feed(grams)
    finally:
        model.train(training)
    with_grams = copy.copy(method)
    with_grams.grams = grams
    return with_grams

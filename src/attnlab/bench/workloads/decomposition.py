"""Partial Tucker decomposition of one layer's heads by attnlab and by TensorLy, on noise of the layer's size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from omegaconf import DictConfig
from torch import Tensor

from attnlab.bench.settings import Settings, Shape
from attnlab.bench.workloads.base import Workload
from attnlab.bench.workloads.compressed import Compared, method_of
from attnlab.compression.decompositions import tucker
from attnlab.compression.methods.head_tensor import Sizes
from attnlab.compression.methods.tensorllm import TensorLLM
from attnlab.errors import ConfigError

SAME = 1e-3  # how far the relative error may lie above TensorLy's: HOOI ends in local minima


@dataclass(frozen=True)
class Solver:
    """`hooi`: attnlab's; `tensorly`: `partial_tucker` of TensorLy, with the settings of TensorLLM's released code.

    Args:
        name: hooi or tensorly.
        cfg: the configuration, with compress=tensorllm.
    """

    name: Literal["hooi", "tensorly"]
    cfg: DictConfig

    def sizes(self) -> Sizes:
        return method(self.cfg).sizes(Compared("compressed", self.cfg).layer())

    def error(self, blocks: Sequence[Tensor], sizes: Sizes, options: TensorLLM) -> float:
        """The relative error of the decomposition of blocks (n, h, d, dv).

        Args:
            blocks: of heads, (n, h, d, dv) each.
            sizes: of the blocks, from `sizes`, which builds a model's outline.
            options: sweeps and tolerance.

        Raises:
            LookupError: TensorLy is not installed, or there are several blocks.
        """
        ranks = [stack.rank for stack in sizes.stacks]
        if self.name == "hooi":
            return tucker(blocks, sizes.ranks, ranks, sweeps=options.sweeps, tolerance=options.tolerance).error
        partial_tucker, (block,) = _tensorly(sizes), blocks
        _, errors = partial_tucker(
            block,
            rank=[ranks[0] or len(block), *sizes.ranks],
            modes=[0, 2, 3],
            n_iter_max=options.sweeps,
            tol=options.tolerance,
            init="svd",
        )
        return float(errors[-1])


def method(cfg: DictConfig) -> TensorLLM:
    """TensorLLM's method, as `compress` sets it. ConfigError: `compress` is another method."""
    tensorllm = method_of(cfg)
    if not isinstance(tensorllm, TensorLLM):
        raise ConfigError("bench.what=decomposition measures partial Tucker: give compress=tensorllm")
    return tensorllm


def noise(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Blocks of a layer's size, (n, h, d, dv) each, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(len(stack.names), stack.heads, sizes.dim, sizes.width) for stack in sizes.stacks]
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def _tensorly(sizes: Sizes) -> Any:
    """partial_tucker of TensorLy, on torch tensors. LookupError: not installed, or it has no such decomposition."""
    if len(sizes.stacks) > 1:
        raise LookupError("TensorLy cannot decompose heads of different numbers with common factors")
    try:
        import tensorly
        from tensorly.decomposition import partial_tucker
    except ImportError as error:
        raise LookupError("TensorLy is not installed: pip install tensorly") from error
    tensorly.set_backend("pytorch", local_threadsafe=True)
    return partial_tucker


class Decomposition(Workload):
    """One decomposition of one layer; `text` and `batch` have no meaning.

    Arguments are those of `Workload`.
    """

    about = "partial Tucker of noise of one layer's size, the method's ranks, sweeps and tolerance, float32 input"
    checked = ("error",)

    def __init__(self, variant: Solver, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.variant, self.sizes, self.options = variant, variant.sizes(), method(variant.cfg)
        if variant.name == "tensorly":
            _tensorly(self.sizes)
        self.blocks = noise(self.sizes, dtype, device)

    @classmethod
    def lineup(cls, cfg: DictConfig, settings: Settings) -> list[Solver]:
        """`hooi`, and TensorLy's if `bench.references` has `tensorly`, which takes minutes for a large layer.

        ConfigError: `compress=` is another method.
        """
        method(cfg)
        return [Solver("hooi", cfg), *([Solver("tensorly", cfg)] if "tensorly" in settings.references else [])]

    @classmethod
    def shapes(cls, cfg: DictConfig, settings: Settings) -> list[Shape]:
        return [Shape("decomposition", 1, 1, 0, 1)]

    @classmethod
    def describe(cls, shape: Shape) -> dict[str, Any]:
        return {}

    @classmethod
    def check(cls, variant: Solver, settings: Settings, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """How far the relative error of `hooi` lies above TensorLy's, after one decomposition each; 0: not above."""
        sizes = variant.sizes()
        if variant.name == "tensorly":
            _tensorly(sizes)
            return {}
        if "tensorly" not in settings.references or len(sizes.stacks) > 1:
            return {}
        blocks = noise(sizes, dtype, device)
        options = method(variant.cfg)
        tensorly = Solver("tensorly", variant.cfg).error(blocks, sizes, options)
        hooi = variant.error(blocks, sizes, options)
        return {"error": max(0.0, hooi - tensorly), "ours": hooi, "tensorly": tensorly, "tolerance": SAME}

    @classmethod
    def facts(cls, variants: Sequence[Any], shape: Shape, checks: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """The size of the tensor and the ranks."""
        sizes: Sizes = variants[0].sizes()
        tensors = [[sizes.dim, sizes.width, len(stack.names), stack.heads] for stack in sizes.stacks]
        return {"tensors": tensors, "ranks": [*sizes.ranks, *{stack.rank for stack in sizes.stacks}]}

    def run(self) -> None:
        self.variant.error(self.blocks, self.sizes, self.options)

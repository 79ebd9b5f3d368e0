"""The attention projections of one layer, compressed and dense."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from omegaconf import DictConfig
from torch.nn import functional as F

from attnlab.bench.compressed import Compared, method_of, projections, remaining
from attnlab.bench.settings import Settings, Shape
from attnlab.bench.workloads.base import Workload
from attnlab.compression.modules.base import Replacement

EXACT = 1e-10  # relative difference in float64 above which no ratio is reported


class Projections(Workload):
    """q, k and v of the same input, and o of another one, `batch` texts of `text` tokens.

    Arguments are those of `Workload`.
    """

    about = "q, k, v and o of the first compressed layer, without attention between them, no gradients, random weights"
    checked = ("output",)

    def __init__(self, variant: Compared, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        model, layer = variant.attention(dtype, device), variant.layer()
        inputs = {
            axis: torch.randn(shape.batch, shape.text, width, generator=generator).to(device, dtype)
            for axis, width in (("out", layer.projections["q"].shape[1]), ("in", layer.projections["o"].shape[1]))
        }
        self.work = [(module, inputs[place.axis or "out"]) for module, place in projections(model, layer)]

    @classmethod
    def lineup(cls, cfg: DictConfig, settings: Settings) -> list[Compared]:
        """ConfigError: `compress` names no method that puts modules in place of attention projections."""
        method_of(cfg)
        Compared("compressed", cfg).layer()
        return [Compared("compressed", cfg), Compared("dense", cfg)]

    @classmethod
    def shapes(cls, cfg: DictConfig, settings: Settings) -> list[Shape]:
        return [Shape("projections", settings.batch, 1, 0, text) for text in settings.texts]

    @classmethod
    def describe(cls, shape: Shape) -> dict[str, Any]:
        return {"tokens": shape.text}

    @classmethod
    @torch.no_grad()
    def check(cls, variant: Compared, settings: Settings, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """The modules against the matrices that they stand for, in float64."""
        if variant.name == "dense":
            return {}
        work = cls(variant, Shape("projections", 1, 1, 0, 3), torch.float64, device)
        worst = 0.0
        for module, x in work.work:
            if isinstance(module, Replacement):
                matrix, bias = module.dense()[0][""]
                want = F.linear(x, matrix, bias)
                worst = max(worst, float((module(x) - want).norm() / want.norm()))
        return {"output": worst, "tolerance": EXACT}

    @classmethod
    def facts(cls, variants: Sequence[Any], shape: Shape, checks: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """The layer, the compression rate, and what is left of the multiply-adds."""
        compressed: Compared = variants[0]
        return {"layer": compressed.layer().path, **remaining(compressed.cfg)}

    @torch.inference_mode()
    def run(self) -> None:
        for module, x in self.work:
            module(x)

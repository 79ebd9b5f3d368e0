"""The whole forward pass of a pretrained language model, compressed and dense."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from omegaconf import DictConfig

from attnlab.bench.compressed import Compared, method_of, remaining
from attnlab.bench.settings import Settings, Shape
from attnlab.bench.workloads.base import Workload
from attnlab.bench.workloads.projections import EXACT
from attnlab.compression import densify


class Whole(Workload):
    """Logits of `batch` texts of `text` tokens.

    Arguments are those of `Workload`.
    """

    about = "one forward pass of the whole model, every position's logits, no cache, no gradients, random weights"
    checked = ("output",)

    def __init__(self, variant: Compared, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.model = variant.whole(dtype, device)
        config: Any = self.model.config
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(config.vocab_size, (shape.batch, shape.text), generator=generator).to(device)

    @classmethod
    def lineup(cls, cfg: DictConfig, settings: Settings) -> list[Compared]:
        """ConfigError: `compress` names no method."""
        method_of(cfg)
        return [Compared("compressed", cfg), Compared("dense", cfg)]

    @classmethod
    def shapes(cls, cfg: DictConfig, settings: Settings) -> list[Shape]:
        return [Shape("whole", settings.batch, 1, 0, text) for text in settings.texts]

    @classmethod
    def describe(cls, shape: Shape) -> dict[str, Any]:
        return {"tokens": shape.text}

    @classmethod
    def check(cls, variant: Compared, settings: Settings, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """The compressed model against the dense one that its factors stand for, in float64."""
        if variant.name == "dense":
            return {}
        model = variant.whole(torch.float64, device)
        dense = densify(model, Compared("dense", variant.cfg).whole(torch.float64, device), exact=False)
        tokens = torch.arange(4, device=device)[None]
        with torch.inference_mode():
            ours, want = (one(input_ids=tokens).logits for one in (model, dense))
        return {"output": float((ours - want).norm() / want.norm()), "tolerance": EXACT}

    @classmethod
    def facts(cls, variants: Sequence[Any], shape: Shape, checks: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """The compression rate, and what is left of the multiply-adds."""
        return dict(remaining(variants[0].cfg))

    @torch.inference_mode()
    def run(self) -> None:
        self.model(input_ids=self.tokens)

"""Grouped-query attention as multi-head temporal latent attention."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Le

from attnlab.attention import MHA, MTLA, Attention, MTLAWindow, SlidingWindow
from attnlab.conversion.base import Inputs, Layer
from attnlab.conversion.budget import LayerPlan
from attnlab.conversion.mla import CHOSEN, ToMLA
from attnlab.conversion.statistics import Statistics
from attnlab.errors import ConfigError


@dataclass(frozen=True)
class ToMTLA(ToMLA):
    """MTLA from grouped-query attention: an MLA of the same settings, whose latents are then merged along time.

    With ``layers="measured"`` a layer is an MLA, or one over a short window, where that costs less.

    Gates are uniform at first, so that a slot is the mean of its latents, and training can move them. The newest and
    the first positions stay unmerged: without a window, merging ruins a model that was not trained with it.

    Args:
        stride: positions s of a slot.
        recent: number of newest positions without merging; None: a slot is the running sum of the MTLA paper.
        first: number of first positions without merging; unused if `recent` is None.
        Others are those of `ToMLA`.
    """

    stride: Annotated[int, Ge(1), Le(1024)] = 2
    recent: Annotated[int, Ge(0)] | None = 8
    first: Annotated[int, Ge(0)] = 4

    least_rank: ClassVar[int] = 2  # the sinusoid of the gates has pairs

    def refuse(self, attention: Attention) -> None:
        super().refuse(attention)
        if self.norm != "none":
            raise ConfigError(f"convert.norm={self.norm} is for convert=mla: gates would merge normed latents")
        if isinstance(attention, SlidingWindow):
            raise ConfigError(
                f"convert={self.name}: sliding windows with merging are not supported, and the original has a window "
                f"of {attention.window} positions; use convert=mla, which keeps it"
            )

    @property
    def _unmerged(self) -> ToMLA:
        return ToMLA(**{setting.name: getattr(self, setting.name) for setting in fields(ToMLA)})

    def estimated(self, attention: Attention) -> str | None:
        """The gates of layers with shared sizes have other parameters than those of layers with equal sizes."""
        shared = isinstance(attention, MHA) and self.layers == "budget" and self.looks_ahead(attention)
        return CHOSEN.replace("rope_dim", "latent_dim") if shared else super().estimated(attention)

    def node(self, attention: MHA, split: tuple[int, int]) -> dict[str, Any]:
        rope, rank = split
        node = super().node(attention, (rope, rank - rank % 2))
        window = {} if self.recent is None else {"recent": self.recent, "first": self.first}
        kind = "MTLA" if self.recent is None else "MTLAWindow"
        return node | {"_target_": f"attnlab.attention.{kind}", "stride": self.stride} | window

    def choices(self, attention: MHA, statistics: Statistics) -> list[tuple[LayerPlan, dict[str, Any], float]]:
        """Unmerged latents too: a layer with a short window needs no merging, and one that retrieves loses by it."""
        plain = self._unmerged.choices(attention, statistics)
        unmerged = [(replace(plan, merged=False), node, error) for plan, node, error in plain]
        return unmerged + ([] if isinstance(attention, SlidingWindow) else super().choices(attention, statistics))

    @torch.no_grad()
    def convert(self, attention: MHA, statistics: Statistics, inputs: Inputs, plan: LayerPlan | None = None) -> Layer:
        if plan is not None and not plan.merged:
            return self._unmerged.convert(attention, statistics, inputs, plan)
        layer = super().convert(attention, statistics, inputs, plan)
        mtla = layer.attention
        assert isinstance(mtla, MTLA)
        gates = torch.zeros(mtla.gate_slot.out_features, dtype=torch.float64)
        gates[0] = 1.0
        for linear, bias in ((mtla.gate_slot, gates), (mtla.gate_latent, torch.zeros_like(gates))):
            linear.weight.zero_()
            linear.bias.copy_(bias)
        if not isinstance(mtla, MTLAWindow):  # sigmoid(0) = 1/2 of each latent: sums of s become means
            mtla.up.weight.mul_(2.0 / self.stride)
        return layer

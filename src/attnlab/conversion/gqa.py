"""Grouped-query attention with fewer key-value heads by mean pooling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attnlab.attention import MHA
from attnlab.config.bounds import Size
from attnlab.conversion.base import Conversion, Inputs, Layer, attention_of, mha_node
from attnlab.conversion.budget import LayerPlan
from attnlab.conversion.statistics import Statistics
from attnlab.errors import ConfigError


@dataclass(frozen=True)
class ToGQA(Conversion):
    """Fewer key-value heads by mean pooling of the weights (GQA paper, section 2.1): the usual baseline.

    Args:
        groups: number of key-value heads; a divisor of the original number.
    """

    groups: Size = 1

    def planned(self, attention: MHA) -> dict[str, Any]:
        if self.groups >= attention.num_kv_heads or attention.num_kv_heads % self.groups:
            raise ConfigError(
                f"convert.groups={self.groups}: expected a divisor of the {attention.num_kv_heads} key-value heads, "
                "less than all"
            )
        return mha_node(attention) | {"num_kv_heads": self.groups}

    @torch.no_grad()
    def convert(self, attention: MHA, statistics: Statistics, inputs: Inputs, plan: LayerPlan | None = None) -> Layer:
        node = self.planned(attention)
        converted = attention_of(node, attention)
        assert isinstance(converted, MHA)
        pooled = attention.num_kv_heads // self.groups
        for name, parameter in converted.named_parameters():
            original = attention.get_parameter(name)
            if name.startswith(("key.", "value.")):
                heads = original.unflatten(0, (self.groups, pooled, attention.head_dim))
                original = heads.mean(1).flatten(0, 1)
            parameter.copy_(original)
        if attention.rope_theta is None:
            converted.frequencies = attention.frequencies.clone()
        return Layer(node, converted, {})

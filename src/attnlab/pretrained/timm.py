"""What timm's attention computes, as two tensors of head matrices: reading them, and writing them back."""

from __future__ import annotations

from dataclasses import dataclass

import attnlab.torchvision_schemas  # noqa: F401  (before timm)

import torch
from timm.layers.attention import Attention
from torch import Tensor, nn

from attnlab.compression.decompositions import Slices
from attnlab.errors import ConfigError


@dataclass(frozen=True)
class Heads:
    """An attention layer's weights by head, in float64, its biases moved to where the algebra has room for them.

    query: (H, F + 1, D), the last row its bias: the homogeneous coordinate. key: (H, F, D), without its bias, which
    adds the same number to all logits of a query. value: (H, F, D), output: (H, F', D), without the value's bias,
    which the rows of attention, summing to 1, carry into `bias` (F').
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    bias: Tensor
    scale: float

    @property
    def qk(self) -> Slices:
        """Y^QK: X' Y_h X are head h's logits, where X' has a column of ones (IrrAtt, section 2.3)."""
        return Slices(self.query, self.key)

    @property
    def vo(self) -> Slices:
        """Y^VO: what head h adds to the output, before attention weighs it."""
        return Slices(self.value, self.output)


def read_heads(attention: nn.Module, path: str) -> Heads:
    """ConfigError, naming `path`: not plain attention, or something stands between its projections and products."""
    refuse(attention, path)
    assert isinstance(attention, Attention)
    heads, width, dim = attention.num_heads, attention.head_dim, attention.qkv.in_features
    weight = attention.qkv.weight.detach().double().view(3, heads, width, dim).mT  # (3, H, F, D)
    bias = weight.new_zeros(3, heads, width)
    if attention.qkv.bias is not None:
        bias = attention.qkv.bias.detach().double().view(3, heads, width)
    output = attention.proj.weight.detach().double().view(-1, heads, width).transpose(0, 1)
    folded = torch.einsum("hod,hd->o", output, bias[2])
    if attention.proj.bias is not None:
        folded = folded + attention.proj.bias.detach().double()
    query = torch.cat([weight[0], bias[0].unsqueeze(1)], 1)
    return Heads(query, weight[1], weight[2], output, folded, attention.scale)


def refuse(attention: nn.Module, path: str) -> None:
    """ConfigError if the products of weight matrices do not say all that `attention` computes."""
    name = type(attention).__name__
    if not hasattr(attention, "qkv"):
        raise ConfigError(f"{path}: {name} has no qkv projection; only timm's plain attention can be compressed")
    between = {"q_norm": "a norm of queries", "k_norm": "a norm of keys", "norm": "a norm of head outputs"}
    for part, what in between.items():
        if not isinstance(getattr(attention, part, None) or nn.Identity(), nn.Identity):
            raise ConfigError(
                f"{path}: {name} has {what} ({part}): its weights do not multiply, so low rank is inexact"
            )
    if getattr(attention, "gate", None) is not None:
        raise ConfigError(f"{path}: {name} has a gate on head outputs: values and output weights do not multiply")
    if type(attention) is not Attention:
        raise ConfigError(
            f"{path}: {name} is not timm's plain attention (rotary or relative positions, windows, ...): "
            "what stands between its projections and products is not in its weights"
        )

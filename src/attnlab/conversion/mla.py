"""Grouped-query attention as multi-head latent attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor, nn

from attnlab.attention import MHA, MLA, Attention, SlidingWindow
from attnlab.attention.mla import NormedKeys, NormedQueries
from attnlab.config.bounds import bounded
from attnlab.conversion.base import Conversion, Inputs, Layer
from attnlab.conversion.latents import Latent, Projection, content_map, metric_of, moment_of, project
from attnlab.conversion.mixing import Mixing, Rotary, mix
from attnlab.conversion.statistics import Statistics, frequencies_of
from attnlab.errors import ConfigError

SPLITS = 16  # of a cache into rotary and content parts that are tried, at most


class Split(NamedTuple):
    """A cache of r + d_r numbers, and what it is predicted to lose.

    Args:
        mixing: with d_r rotary components.
        projection: of content keys and values.
        rank: r.
        lost: predicted squared error of the output.
    """

    mixing: Mixing
    projection: Projection
    rank: int
    lost: float


@bounded
@dataclass(frozen=True)
class ToMLA(Conversion):
    """MLA from grouped-query attention: rotary components that are shared by all heads, and a latent for the rest.

    Exact where r + d_r = 2 G D with d_r all rotary components; below, the rotary components are those that lose most
    without rotation, and the latent is the one that moves the attention's output least.

    Args:
        keep: cache of a token, as a share of the original's; sets r + d_r. Ignored where both are given.
        rope_dim: d_r, even; None: searched, with the latent, for the smallest predicted error.
        latent_dim: r; None: what `keep` leaves.
        rotary: how rotary components are chosen, see :func:`attnlab.conversion.mixing.mix`.
        latent: how the latent is chosen, see :func:`attnlab.conversion.latents.project`.
        centre: whether means of content are taken out: a constant key changes no attention weight, and a constant
            value goes into the output's bias.
    """

    keep: Annotated[float, Gt(0), Lt(1)] = 0.25
    rope_dim: Annotated[int, Ge(0)] | None = None
    latent_dim: Annotated[int, Ge(1)] | None = None
    rotary: Rotary = "score"
    latent: Latent = "output_aware"
    centre: bool = True

    def budget(self, attention: MHA) -> int:
        """r + d_r of a layer.

        Args:
            attention: the original.

        Raises:
            ConfigError: the cache would not shrink, or holds nothing.
        """
        whole = 2 * attention.num_kv_heads * attention.head_dim
        if self.rope_dim is not None and self.latent_dim is not None:
            total = self.rope_dim + self.latent_dim
        else:
            total = round(self.keep * whole)
        if total >= whole:
            raise ConfigError(
                f"convert: r + d_r = {total} numbers per token are no less than the {whole} of the original's keys and "
                "values; give a smaller convert.keep, or smaller convert.rope_dim and convert.latent_dim"
            )
        for name, value in (("rope_dim", self.rope_dim), ("latent_dim", self.latent_dim)):
            if value is not None and value > total - (name == "rope_dim"):
                raise ConfigError(
                    f"convert.{name}={value}: convert.keep={self.keep} leaves {total} numbers per token; raise keep"
                )
        return total

    def sizes(self, attention: MHA) -> tuple[int, int] | None:
        """d_r and r, where the settings tell; None: they are searched.

        Args:
            attention: the original.
        """
        total = self.budget(attention)
        if not attention.turned:
            return 0, total
        if self.rope_dim is not None:
            return self.rope_dim, total - self.rope_dim
        if self.latent_dim is not None:
            rope = (total - self.latent_dim) // 2 * 2
            return rope, total - rope
        return None

    def refuse(self, attention: Attention) -> None:
        super().refuse(attention)
        if isinstance(attention, SlidingWindow):
            raise ConfigError(f"convert={self.name}: MLA has no sliding window, which the original has")

    def node(self, attention: MHA, split: tuple[int, int]) -> dict[str, Any]:
        rope, rank = split
        normed = not isinstance(attention.query_norm, nn.Identity)
        biased = [("query", attention.query.bias), ("down", attention.key.bias if rope else None), ("out", True)]
        return {
            "_target_": "attnlab.attention.MLA",
            "d_model": attention.d_model,
            "num_heads": attention.num_heads,
            "head_dim": attention.head_dim,
            "rope_dim": rope,
            "latent_dim": rank,
            "norm": "none",
            "bias": [name for name, bias in biased if bias is not None and not (normed and name != "out")],
            "qk_norm": attention.num_kv_heads if normed else None,
            "norm_eps": attention.query_norm.eps if isinstance(attention.query_norm, nn.RMSNorm) else 1e-6,
            "dropout": attention.dropout,
            "rope_theta": None,
        }

    def planned(self, attention: MHA) -> dict[str, Any]:
        found = self.sizes(attention)
        return self.node(attention, found or (0, self.budget(attention)))

    def convert(self, attention: MHA, found: Statistics, inputs: Inputs) -> Layer:
        split = self.split(attention, found)
        rope = 2 * len(split.mixing.frequencies)
        node = self.node(attention, (rope, split.rank))
        split = split._replace(rank=node["latent_dim"])
        converted = self.build(node)
        converted = converted.to(attention.out.weight.device, attention.out.weight.dtype).train(attention.training)
        fill(converted, attention, found, split, self.centre)
        about = {"rope_dim": rope, "latent_dim": split.rank, "predicted_error": split.lost}
        return Layer(node, converted, about | {"weight_error": _weight_error(attention, found, split)})

    def build(self, node: dict[str, Any]) -> MLA:
        """The mechanism of a node, with random weights.

        Args:
            node: as :meth:`node` gives it.
        """
        return MLA(**{key: value for key, value in node.items() if key != "_target_"})

    def split(self, attention: MHA, found: Statistics) -> Split:
        """The rotary components and the latent of a layer.

        Args:
            attention: the original.
            found: its statistics.
        """
        total, given = self.budget(attention), self.sizes(attention)
        if given is not None:
            return self.of_size(attention, found, *given)
        most = min(2 * found.groups * found.pairs, total - 1) // 2
        step = max(1, -(-most // SPLITS))
        tried = [self._tried(attention, found, 2 * count, total) for count in range(0, most + 1, step)]
        best = min((one for one in tried if one is not None), key=lambda one: one.lost, default=None)
        if best is None:
            raise ConfigError(f"convert.rotary={self.rotary} fits no cache of {total} numbers; give convert.rope_dim")
        return best

    def _tried(self, attention: MHA, found: Statistics, rope: int, total: int) -> Split | None:
        try:
            return self.of_size(attention, found, rope, total - rope)
        except ConfigError:  # a method that has some widths only
            return None

    def of_size(self, attention: MHA, found: Statistics, rope: int, rank: int) -> Split:
        """A layer's split with given sizes.

        Args:
            attention: the original.
            found: its statistics.
            rope: d_r.
            rank: r; more than there are components of content is cut to them.
        """
        mixing = mix(found, frequencies_of(attention), self.rotary, rope)
        change = content_map(found, mixing)
        moment = moment_of(found, mixing, self.centre)
        weights = torch.cat((attention.key.weight, attention.value.weight)).detach().double()
        output = attention.out.weight.detach().double().unflatten(1, (found.heads, -1)).movedim(1, 0)
        metric = metric_of(found, mixing, output)
        projection = project(self.latent, moment, metric, len(mixing.content), change @ weights)
        rank = min(rank, len(moment))
        return Split(mixing, projection, rank, mixing.lost + float(projection.errors[rank]))


@torch.no_grad()
def fill(mla: MLA, attention: MHA, found: Statistics, split: Split, centre: bool) -> None:
    """Set the weights of an MLA so that it computes what the attention did, as far as its cache holds it.

    Args:
        mla: of the sizes in `split`.
        attention: the original.
        found: its statistics, for the means.
        split: the chosen components.
        centre: whether means go into the output's bias.
    """
    mixing, rank = split.mixing, split.rank
    down, up = split.projection.down[:rank], split.projection.up[:, :rank]
    heads, groups, width = found.heads, found.groups, found.width
    group, content = heads // groups, len(mixing.content)
    change = content_map(found, mixing)
    of_latent = down @ change  # [k; v] -> c, (r, 2 G D)
    of_rotary = torch.cat((mixing.turned, torch.zeros_like(mixing.turned)), 1)
    kept = torch.cat((of_latent, of_rotary))  # (r + d_r, 2 G D)

    scale = ((width + mla.rope_dim) / width) ** 0.5
    reads = scale * torch.cat((torch.eye(width, dtype=torch.float64).expand(heads, -1, -1), mixing.queries), 1)
    wide = [linear.weight.double() for linear in (attention.query, attention.key, attention.value, attention.out)]
    query, key, value, output = wide
    stacked = torch.cat((key, value))
    if isinstance(mla.query, NormedQueries) and isinstance(mla.down, NormedKeys):
        mla.query.full.weight.copy_(query)
        mla.query.turn.copy_(reads)
        mla.down.key.weight.copy_(key)
        mla.down.value.weight.copy_(value)
        mla.down.down.weight.copy_(kept)
        for own, theirs in ((mla.query.norm, attention.query_norm), (mla.down.norm, attention.key_norm)):
            assert isinstance(theirs, nn.RMSNorm)
            own.weight.copy_(theirs.weight)
        constant = torch.zeros(2 * groups * width, dtype=torch.float64)  # biases of the original: it has none
    else:
        assert isinstance(mla.query, nn.Linear) and isinstance(mla.down, nn.Linear)
        mla.query.weight.copy_((reads @ query.view(heads, width, -1)).flatten(0, 1))
        if attention.query.bias is not None:
            mla.query.bias.copy_((reads @ attention.query.bias.double().view(heads, width, 1)).flatten())
        mla.down.weight.copy_(kept @ stacked)
        constant = torch.cat([_bias(linear) for linear in (attention.key, attention.value)])
        if mla.down.bias is not None:
            mla.down.bias.zero_()
            mla.down.bias[rank:] = of_rotary @ constant

    up_values = up[content:].view(groups, width, rank)
    up_keys = torch.stack(
        [
            (mixing.content.view(content, groups, width)[:, i // group] @ mixing.stand_in[i]).mT @ up[:content]
            for i in range(heads)
        ]
    )
    mla.up.weight.copy_(torch.stack((up_values.repeat_interleave(group, 0), up_keys), 1).flatten(0, 2))
    mla.out.weight.copy_(output)
    # y^ = mu + B E^T (y - mu): c leaves out the constants, so that what they add to values is one vector
    mean = change @ found.mean if centre else torch.zeros(len(change), dtype=torch.float64)
    offset = change @ constant if not isinstance(mla.down, NormedKeys) else torch.zeros_like(mean)
    added = (mean + up @ (down @ (offset - mean)))[content:].view(groups, width).repeat_interleave(group, 0)
    mla.out.bias.copy_(output @ added.flatten() + _bias(attention.out))
    mla.frequencies = mixing.frequencies.clone()


def _weight_error(attention: MHA, found: Statistics, split: Split) -> float:
    """Squared error of the matrices that make content keys and values, over their squared size."""
    weights = torch.cat((attention.key.weight, attention.value.weight)).detach().double()
    whole = content_map(found, split.mixing) @ weights
    kept = split.projection.up[:, : split.rank] @ (split.projection.down[: split.rank] @ whole)
    return float((whole - kept).square().sum() / whole.square().sum().clamp(min=torch.finfo(whole.dtype).tiny))


def _bias(linear: nn.Linear) -> Tensor:
    if linear.bias is None:
        return torch.zeros(linear.out_features, dtype=torch.float64)
    return linear.bias.detach().double()

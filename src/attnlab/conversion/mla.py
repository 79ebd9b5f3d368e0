"""Grouped-query attention as multi-head latent attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from annotated_types import Gt, Lt
from torch import Tensor, nn

from attnlab.attention import MHA, MLA, Attention, SlidingWindow
from attnlab.attention.mla import NormedKeys, NormedQueries
from attnlab.config.bounds import Size, SizeOrZero
from attnlab.conversion.base import Conversion, Inputs, Layer, attention_of
from attnlab.conversion.budget import LayerPlan, Sharing, Survey, distribute, near, same
from attnlab.conversion.split import (
    Latent,
    Mixing,
    Projection,
    Rotary,
    check_width,
    content_map,
    metric_of,
    mix,
    moment_of,
    project,
    scores,
    widths,
)
from attnlab.conversion.statistics import Statistics, frequencies_of
from attnlab.errors import ConfigError

ROWS = 256  # inputs of each batch for the size of a constant
RIDGE = 1e-6  # of the mean diagonal of a Gram matrix
TINY = torch.finfo(torch.float64).tiny
CHOSEN = "the conversion chooses convert.rope_dim, on which parameters and multiply-adds depend"
WINDOWS = ((64, 8), (32, 16))  # that a layer is tried with: so many positions, or that part of a longer text
PARTS = 8  # sizes that a layer is tried with are so many parts of the original's cache
SPLITS = 16  # splits of a cache into rotary and content parts to compare, at most


class Split(NamedTuple):
    """A cache of r + d_r numbers, with the predicted squared error of the attention's output."""

    mixing: Mixing  # with d_r rotary components
    projection: Projection  # of content keys and values
    rank: int  # r
    lost: float


@dataclass(frozen=True)
class ToMLA(Conversion):
    """MLA from grouped-query attention: rotary components shared by all heads, and a latent for the rest.

    Exact at r + d_r = 2 G D with all rotary components; below, the rotary components are those that lose most without
    rotation, and the latent is the one with the least error of the attention's output.

    Args:
        keep: cache of a token, as a share of the original's; sets r + d_r. Unused if both are set.
        rope_dim: d_r, even; None: searched, with the latent, for the smallest predicted error.
        latent_dim: r; None: the rest of `keep`.
        layers: distribution of the cache over layers. "measured": each layer alone is tried in the original with
            several sizes, and with windows of the newest positions and the first four. The choice has the smallest sum
            of divergences of predictions in the same cache of a text as long as those of calibration, see
            :mod:`attnlab.conversion.measured`. "budget": the sizes with the smallest sum of predicted errors at the
            same sum of sizes, each error over the size of the residual stream, separately for layers with and without a
            sliding window; "equal": equal r + d_r, d_r chosen for each layer; "same": equal d_r, r and rotary
            frequencies, which formats of other libraries need. "budget" and "same" need a first pass through the
            original with an eighth of the texts, "measured" several.
        rotary: choice of rotary components, see :func:`attnlab.conversion.split.mix`.
        latent: choice of the latent, see :func:`attnlab.conversion.split.project`.
        centre: subtract the means of content: a constant key changes no attention weight, and a constant value goes
            into the output's bias.
        refit: fit the output projection to the original's output, see :func:`attnlab.conversion.layers.refit`.
        norm: of latents. "rms": the attention of DeepSeek, with RMS norms and without biases, which other programs
            compute natively; one number of the latent replaces the constants, see :func:`natively`. "none": exact at
            full rank.
    """

    keep: Annotated[float, Gt(0), Lt(1)] = 0.25
    rope_dim: SizeOrZero | None = None
    latent_dim: Size | None = None
    layers: Sharing = "measured"
    rotary: Rotary = "score"
    latent: Latent = "output_aware"
    centre: bool = True
    refit: bool = True
    norm: Literal["none", "rms"] = "none"

    least_rank: ClassVar[int] = 1  # r

    def budget(self, attention: MHA) -> int:
        """r + d_r of a layer, on average. ConfigError: the cache would not shrink, or is empty."""
        original = 2 * attention.num_kv_heads * attention.head_dim
        rope = 0 if self.rope_dim is None and not attention.turned else self.rope_dim
        both = rope is not None and self.latent_dim is not None
        total = (rope or 0) + (self.latent_dim or 0) if both else round(self.keep * original)
        if total >= original:
            raise ConfigError(
                f"convert: r + d_r = {total} numbers per token are no less than the {original} of the original's keys "
                "and values; give a smaller convert.keep, or smaller convert.rope_dim and convert.latent_dim"
            )
        rank = total - (rope or 0) if self.latent_dim is None else self.latent_dim
        if rank < self.least_rank or (self.latent_dim is not None and rank % self.least_rank):
            source = f"convert.keep={self.keep}" if self.latent_dim is None else f"convert.latent_dim={rank}"
            besides = f" beside convert.rope_dim={rope}" if rope and self.latent_dim is None else ""
            raise ConfigError(
                f"{source}: leaves a latent of {max(rank, 0)} numbers per token{besides}; expected "
                + ("at least 1" if self.least_rank == 1 else f"a multiple of {self.least_rank}")
            )
        if rank > total:
            raise ConfigError(
                f"convert.latent_dim={rank}: convert.keep={self.keep} leaves {total} numbers per token; raise keep"
            )
        return total

    def sizes(self, attention: MHA, total: int | None = None) -> tuple[int, int] | None:
        """d_r and r by the settings; None: they are searched. ConfigError: invalid for the method.

        Args:
            total: r + d_r; None: :meth:`budget`.
        """
        total = self.budget(attention) if total is None else total
        if self.rope_dim is not None:
            rope = self.rope_dim
        elif not attention.turned:
            rope = 0
        elif self.latent_dim is not None:
            rope = total - self.latent_dim
        else:
            return None
        key = f"convert.rope_dim={rope}"
        if self.rope_dim is None:
            key = f"convert.keep={self.keep} convert.latent_dim={self.latent_dim} leave rope_dim={rope}"
        check_width(self.rotary, rope, attention.num_kv_heads, attention.turned // 2, key)
        return rope, total - rope

    def node(self, attention: MHA, split: tuple[int, int]) -> dict[str, Any]:
        rope, rank = split
        normed = not isinstance(attention.query_norm, nn.Identity)
        if self.norm == "rms" and normed:
            raise ConfigError("convert.norm=rms: the original has norms of queries and keys, as DeepSeek has not")
        biased = [("query", attention.query.bias), ("down", attention.key.bias if rope else None), ("out", True)]
        window = _window(attention)
        return {
            "_target_": f"attnlab.attention.{'MLAWindow' if window else 'MLA'}",
            "d_model": attention.d_model,
            "num_heads": attention.num_heads,
            "head_dim": attention.head_dim,
            "rope_dim": rope,
            "latent_dim": rank,
            "norm": self.norm,
            "bias": []
            if self.norm == "rms"
            else [name for name, bias in biased if bias is not None and not (normed and name != "out")],
            "qk_norm": attention.num_kv_heads if normed else None,
            "norm_eps": attention.query_norm.eps if isinstance(attention.query_norm, nn.RMSNorm) else 1e-6,
            "dropout": attention.dropout,
            "rope_theta": None,
            **window,
        }

    def planned(self, attention: MHA) -> dict[str, Any]:
        sizes = self.sizes(attention)
        if sizes is None:  # three eighths of a cache are a typical share
            total = self.budget(attention)
            rope = min(self._rope_dims(attention, total), key=lambda width: abs(width - 3 * total / 8))
            return self.node(attention, (rope, total - rope))
        if sizes[1] > attention.d_model and isinstance(attention.query_norm, nn.Identity):
            raise ConfigError(
                f"convert: a latent of {sizes[1]} numbers is wider than the {attention.d_model} of the inputs, of "
                "which keys and values are linear functions; give a smaller convert.keep or convert.latent_dim"
            )
        return self.node(attention, sizes)

    def estimated(self, attention: Attention) -> str | None:
        if not isinstance(attention, MHA):
            return None
        measured = self.measured and self.looks_ahead(attention)
        return CHOSEN if measured or self.sizes(attention) is None else None

    def looks_ahead(self, attention: MHA) -> bool:
        known = self.latent_dim is not None or (self.rope_dim is not None and self.layers == "same")
        chosen = self.layers == "same" and self.rotary in ("score", "standard", "two_norm") and attention.turned > 0
        return self.layers != "equal" and (chosen or not known)

    def survey(self, attention: MHA, statistics: Statistics) -> Survey:
        sizes, full = self.sizes(attention), 2 * statistics.groups * statistics.width
        ropes = self._rope_dims(attention, full) if sizes is None else [sizes[0]]
        errors = torch.full((len(ropes), full + 1), torch.inf, dtype=torch.float64)
        for row, rope in zip(errors, ropes, strict=True):
            tried = self.of_size(attention, statistics, rope, self.least_rank)
            row[rope:] = tried.mixing.lost + tried.projection.errors
            row[: rope + self.least_rank] = torch.inf
        return Survey(torch.tensor(ropes), errors, scores(statistics, self.rotary, frequencies_of(attention)))

    def planned_layers(self, attentions: Sequence[Attention]) -> list[dict[str, Any]]:
        planned = super().planned_layers(attentions)
        shapes = {(a.num_kv_heads, a.head_dim, a.turned) for a in attentions if isinstance(a, MHA)}
        if self.layers == "same" and len(shapes) > 1:
            raise ConfigError(
                "convert.layers=same: the layers of the original differ in key-value heads, their width or rotation"
            )
        return planned

    def plans(self, attentions: Sequence[MHA], surveys: Sequence[Survey]) -> Sequence[LayerPlan]:
        totals = [self.budget(attention) for attention in attentions]
        if self.layers == "same":
            return same(surveys, totals[0], self.rotary)
        least = [
            min(total, max(total // 4, int(survey.rope_dims.min()) + self.least_rank))
            for survey, total in zip(surveys, totals, strict=True)
        ]
        windows = [attention.window if isinstance(attention, SlidingWindow) else None for attention in attentions]
        sizes = list(totals)
        for window in set(windows):  # among layers with as many positions: the size of the cache stays
            layers = [i for i, other in enumerate(windows) if other == window]
            lost = [surveys[i].lost for i in layers]
            shared = distribute(lost, [totals[i] for i in layers], [least[i] for i in layers])
            for i, size in zip(layers, shared, strict=True):
                sizes[i] = size
        allowed = [widths(self.rotary, a.num_kv_heads, a.turned // 2) for a in attentions]
        return [LayerPlan(n, near(survey, n, valid)) for survey, n, valid in zip(surveys, sizes, allowed, strict=True)]

    @property
    def measured(self) -> bool:
        return self.layers == "measured"

    def windows(self, attention: MHA, positions: int) -> list[int]:
        longest = attention.window if isinstance(attention, SlidingWindow) else positions
        tried = [max(least, positions // part) for least, part in WINDOWS]
        return [window for window in tried if window < min(longest, positions) and self.norm == "none"]

    def choices(self, attention: MHA, statistics: Statistics) -> list[tuple[LayerPlan, dict[str, Any], float]]:
        survey, full = self.survey(attention, statistics), 2 * statistics.groups * statistics.width
        best = survey.rope_dims[survey.errors.argmin(0)].tolist()
        parts = range(2, PARTS + 1, 2) if isinstance(attention, SlidingWindow) else range(1, PARTS + 1)
        sizes = {full * part // (2 * PARTS) * 2 for part in parts} | {self.budget(attention)}
        return [
            (LayerPlan(n, (best[n],)), self.node(attention, (best[n], n - best[n])), float(survey.lost[n]))
            for n in sorted(sizes)
            if survey.lost[n].isfinite() and n - best[n] <= attention.d_model
        ]

    def _rope_dims(self, attention: MHA, total: int) -> list[int]:
        """At most `SPLITS` values of d_r of the method. ConfigError: none fits."""
        valid = widths(self.rotary, attention.num_kv_heads, attention.turned // 2)
        valid = [rope for rope in valid if rope + self.least_rank <= total]
        if not valid:
            raise ConfigError(f"convert.rotary={self.rotary} fits no cache of {total} numbers; raise convert.keep")
        return valid[:: max(1, -(-(len(valid) - 1) // SPLITS))]

    def convert(self, attention: MHA, statistics: Statistics, inputs: Inputs, plan: LayerPlan | None = None) -> Layer:
        split = self.split(attention, statistics, plan)
        rope = 2 * len(split.mixing.frequencies)
        node = self.node(attention, (rope, split.rank))
        split = split._replace(rank=node["latent_dim"] - (self.norm == "rms"))
        exact = replace(self, norm="none").node(attention, (rope, split.rank))
        converted = attention_of(exact, attention)
        assert isinstance(converted, MLA)
        fill(converted, attention, statistics, split, self.centre)
        if self.norm == "rms":
            normed = attention_of(node | {"bias": ["out"]}, attention)
            assert isinstance(normed, MLA)
            converted = natively(converted, normed, inputs)
        window = _window(attention)
        about = window | {"rope_dim": rope, "latent_dim": split.rank, "predicted_error": split.lost}
        return Layer(node, converted, about | {"weight_error": _weight_error(attention, statistics, split)})

    def finished(self, layer: Layer) -> Layer:
        """Without the output's bias, which the constant of the latent then adds, if latents have norms."""
        attention = layer.attention
        assert isinstance(attention, MLA) and isinstance(attention.out, nn.Linear)
        if self.norm == "rms":
            matrix, bias = attention.out.weight.double(), attention.out.bias.double()
            gram = matrix @ matrix.mT
            gram.diagonal().add_(RIDGE * gram.diagonal().mean())
            values = matrix.mT @ torch.linalg.solve(gram, bias)
            up = attention.up.weight.view(attention.num_heads, 2, attention.head_dim, -1)
            up[:, 0, :, -1] += values.view(attention.num_heads, -1)
            attention.out.register_parameter("bias", None)
        return layer

    def split(self, attention: MHA, statistics: Statistics, plan: LayerPlan | None = None) -> Split:
        """The rotary components and the latent of a layer by its plan; None: the best for this layer alone."""
        plan = LayerPlan(self.budget(attention)) if plan is None else plan
        sizes = self.sizes(attention, plan.total)
        if sizes is not None:
            ropes = [sizes[0]]
        elif plan.rope_dims is not None:
            ropes = [rope for rope in plan.rope_dims if rope + self.least_rank <= plan.total]
        else:
            ropes = self._rope_dims(attention, plan.total)
        tried = (self.of_size(attention, statistics, rope, plan.total - rope, plan.turned) for rope in ropes)
        return min(tried, key=lambda split: split.lost)

    def of_size(
        self, attention: MHA, statistics: Statistics, rope: int, rank: int, turned: Tensor | None = None
    ) -> Split:
        """A layer's split of d_r = `rope` and r = `rank`, at most the components of content.

        Args:
            turned: the components that keep their rotation, (G, F) bool; None: the method chooses.
        """
        mixing = mix(statistics, frequencies_of(attention), self.rotary, rope, turned)
        moment, weights = moment_of(statistics, mixing, self.centre), None
        if self.latent == "weights":
            both = torch.cat((attention.key.weight, attention.value.weight)).detach().double()
            weights = content_map(statistics, mixing) @ both
        output = attention.out.weight.detach().double().unflatten(1, (statistics.heads, -1)).movedim(1, 0)
        metric = metric_of(statistics, mixing, output)
        content, blocks = len(mixing.content), [len(mixing.content), *[statistics.width] * statistics.groups]
        projection = project(self.latent, moment, metric, content, weights, blocks)
        rank = min(rank, len(moment))
        return Split(mixing, projection, rank, mixing.lost + float(projection.errors[rank]))


@torch.no_grad()
def fill(mla: MLA, attention: MHA, statistics: Statistics, split: Split, centre: bool) -> None:
    """Set the weights of an MLA to approximate an attention within a cache."""
    mixing, rank = split.mixing, split.rank
    down, up = split.projection.down[:rank], split.projection.up[:, :rank]
    heads, groups, width = statistics.heads, statistics.groups, statistics.width
    group, content = heads // groups, len(mixing.content)
    change = content_map(statistics, mixing)
    of_latent = down @ change  # [k; v] -> c, (r, 2 G D)
    of_rotary = torch.cat((mixing.turned, torch.zeros_like(mixing.turned)), 1)
    cached = torch.cat((of_latent, of_rotary))  # (r + d_r, 2 G D)

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
        mla.down.down.weight.copy_(cached)
        for norm, original in ((mla.query.norm, attention.query_norm), (mla.down.norm, attention.key_norm)):
            assert isinstance(original, nn.RMSNorm)
            norm.weight.copy_(original.weight)
        constant = torch.zeros(2 * groups * width, dtype=torch.float64)  # biases of the original: it has none
    else:
        assert isinstance(mla.query, nn.Linear) and isinstance(mla.down, nn.Linear)
        mla.query.weight.copy_((reads @ query.view(heads, width, -1)).flatten(0, 1))
        if attention.query.bias is not None:
            mla.query.bias.copy_((reads @ attention.query.bias.double().view(heads, width, 1)).flatten())
        mla.down.weight.copy_(cached @ stacked)
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
    mean = change @ statistics.mean if centre else torch.zeros(len(change), dtype=torch.float64)
    offset = change @ constant if not isinstance(mla.down, NormedKeys) else torch.zeros_like(mean)
    added = (mean + up @ (down @ (offset - mean)))[content:].view(groups, width).repeat_interleave(group, 0)
    mla.out.bias.copy_(output @ added.flatten() + _bias(attention.out))
    mla.frequencies = mixing.frequencies.clone()


@torch.no_grad()
def natively(exact: MLA, native: MLA, inputs: Inputs) -> MLA:
    """Set the weights of an MLA with RMS norms, and no bias but the output's, to approximate one without norms.

    The last number of the latent is M u x, where u is the linear function of inputs that is closest to 1: inputs of
    attention have a norm behind them, and a mean that is not zero. It makes the norm of [c, M u x] nearly constant, and
    u x takes the place of biases. M is the value with the least error of c after the norm.

    Args:
        exact: latent of r numbers, no norm.
        native: latent of r + 1 numbers.
    """
    assert isinstance(exact.query, nn.Linear) and isinstance(exact.down, nn.Linear)
    assert isinstance(native.query, nn.Linear) and isinstance(native.down, nn.Linear)
    assert isinstance(native.norm, nn.RMSNorm)
    r, width, count = exact.latent_dim, exact.d_model, 0
    gram, mean = torch.zeros(width, width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64)
    rows = []
    for batch in inputs():
        x = batch.double().flatten(0, -2)
        gram.addmm_(x.mT, x)
        mean, count = mean + x.sum(0), count + len(x)
        rows.append(x[:: max(1, len(x) // ROWS)])
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    one = torch.linalg.solve(gram, mean)  # u
    x = torch.cat(rows)
    latent, constant = x @ exact.down.weight[:r].double().mT, x @ one
    energy = latent.square().sum(1)
    size = energy.mean().sqrt()

    def normed(multiple: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Error, weights of the norm, and root mean square, for M = `multiple` * sqrt(E |c|^2)."""
        whole = torch.cat((latent, (multiple * size * constant)[:, None]), 1)
        root = whole.square().mean(1).sqrt()
        scaled, target = whole / root[:, None], torch.cat((latent, torch.ones_like(constant)[:, None]), 1)
        weight = (scaled * target).sum(0) / scaled.square().sum(0).clamp(min=TINY)
        return (scaled * weight - target)[:, :r].square().sum(), weight, root.mean()

    multiples = torch.logspace(-2, 7, 19, base=2, dtype=torch.float64)
    errors = torch.stack([normed(multiple)[0] for multiple in multiples])
    multiple = multiples[errors.argmin()]
    _, weight, root = normed(multiple)
    scale = 16 / root  # so large that the epsilon of norms does not count
    down = native.down.weight
    down[:r], down[r] = exact.down.weight[:r] * scale, multiple * size * scale * one
    down[r + 1 :] = exact.down.weight[r:]
    if exact.down.bias is not None:
        down[r + 1 :] += torch.outer(exact.down.bias[r:], one.to(down.dtype))
    native.norm.weight.copy_(weight)
    native.query.weight.copy_(exact.query.weight)
    if exact.query.bias is not None:
        native.query.weight += torch.outer(exact.query.bias, one.to(down.dtype))
    native.up.weight.zero_()
    native.up.weight[:, :r] = exact.up.weight
    native.out.load_state_dict(exact.out.state_dict())
    native.frequencies = exact.frequencies.clone()
    return native


def _window(attention: MHA) -> dict[str, int]:
    """Arguments of `MLAWindow` that `MLA` has not; {}: the layer sees all positions."""
    return {"window": attention.window, "sinks": attention.sinks} if isinstance(attention, SlidingWindow) else {}


def _weight_error(attention: MHA, statistics: Statistics, split: Split) -> float:
    """Squared error of the matrices that make content keys and values, over their squared size."""
    weights = torch.cat((attention.key.weight, attention.value.weight)).detach().double()
    exact = content_map(statistics, split.mixing) @ weights
    near = split.projection.up[:, : split.rank] @ (split.projection.down[: split.rank] @ exact)
    return float((exact - near).square().sum() / exact.square().sum().clamp(min=torch.finfo(exact.dtype).tiny))


def _bias(linear: nn.Linear) -> Tensor:
    if linear.bias is None:
        return torch.zeros(linear.out_features, dtype=torch.float64)
    return linear.bias.detach().double()

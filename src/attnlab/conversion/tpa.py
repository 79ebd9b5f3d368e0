"""Grouped-query attention as tensor product attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt
from torch import Tensor, nn

from attnlab.attention import MHA, Attention, SlidingWindow, TPAKVOnly, TPANonContextualA
from attnlab.config.bounds import Size
from attnlab.conversion.base import Conversion, Inputs, Layer, attention_of
from attnlab.conversion.budget import LayerPlan
from attnlab.conversion.statistics import Statistics, frequencies_of
from attnlab.errors import ConfigError


@dataclass(frozen=True)
class ToTPA(Conversion):
    """Keys and values of a token, (G, D), as a sum of R outer products of a head factor and a token factor.

    Mixing heads commutes with the rotation of positions, so that R = G is exact: a_g = G on the heads of group g. With
    fewer ranks the head factors are the first eigenvectors of sum_t K_t K_t^T, (G, G), with rows weighted by the
    energy of the queries that read them, and for values by the norm of the output that they enter. Contextual head
    factors a(x) = A x + alpha follow from these by alternating ridge regressions.

    Args:
        rank: R_K = R_V, 1 to G.
        contextual: head factors depend on the token, and are cached too.
        sweeps: alternating regressions, of contextual factors.
        ridge: of the regressions, as a share of the mean diagonal.
    """

    rank: Size = 1
    contextual: bool = False
    sweeps: Annotated[int, Ge(1)] = 8
    ridge: Annotated[float, Gt(0)] = 1e-6

    def refuse(self, attention: Attention) -> None:
        super().refuse(attention)
        assert isinstance(attention, MHA)
        biased = [name for name in ("query", "key", "value", "out") if getattr(attention, name).bias is not None]
        reasons = {
            "has a sliding window": isinstance(attention, SlidingWindow),
            f"has biases ({', '.join(biased)})": bool(biased),
            "norms its queries and keys": not isinstance(attention.query_norm, nn.Identity),
            "has no rotary positions in all of a head": attention.turned != attention.head_dim,
            f"has {attention.num_heads} heads of width {attention.head_dim}, and as many query factors must fit a head":
                attention.num_heads > attention.head_dim and not self.contextual,
        }  # fmt: skip
        if reason := next((text for text, applies in reasons.items() if applies), None):
            raise ConfigError(f"convert=tpa: the original {reason}, which TPA does not have; use convert=mla")

    def planned(self, attention: MHA) -> dict[str, Any]:
        if self.rank > attention.num_kv_heads:
            raise ConfigError(
                f"convert.rank={self.rank}: keys and values have {attention.num_kv_heads} heads, and no more ranks"
            )
        kind = "TPAKVOnly" if self.contextual else "TPANonContextualA"
        more = {"bias": True} if self.contextual else {"q_rank": attention.num_heads}
        return {
            "_target_": f"attnlab.attention.{kind}",
            "d_model": attention.d_model,
            "num_heads": attention.num_heads,
            "head_dim": attention.head_dim,
            "rank": self.rank,
            **more,
            "dropout": attention.dropout,
            "rope_theta": None,
        }

    @torch.no_grad()
    def convert(self, attention: MHA, statistics: Statistics, inputs: Inputs, plan: LayerPlan | None = None) -> Layer:
        node = self.planned(attention)
        converted = attention_of(node, attention)
        assert isinstance(converted, TPAKVOnly | TPANonContextualA)
        converted.frequencies = frequencies_of(attention)
        converted.out.weight.copy_(attention.out.weight)
        weights = [
            linear.weight.double().unflatten(0, (-1, attention.head_dim)) for linear in (attention.key, attention.value)
        ]
        heads, tokens = zip(*(self._fixed(statistics, attention, i, weights[i]) for i in (0, 1)), strict=True)
        group, about = attention.num_heads // attention.num_kv_heads, {}
        if isinstance(converted, TPANonContextualA):
            query = attention.num_heads * torch.eye(attention.num_heads, dtype=torch.float64)
            converted.head_factors.copy_(torch.cat((query, *(head.repeat_interleave(group, 1) for head in heads))))
            converted.factors.weight.copy_(
                torch.cat((attention.query.weight.double(), *(t.flatten(0, 1) for t in tokens)))
            )
        else:
            errors = self._contextual(converted, attention, statistics, inputs, list(heads), list(tokens))
            about = {"key_error": errors[0], "value_error": errors[1]}
        return Layer(node, converted, about)

    def _fixed(self, statistics: Statistics, attention: MHA, which: int, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Head factors (R, G) and token factors (R, D, d) of keys (0) or values (1)."""
        groups, width = statistics.groups, statistics.width
        span = slice(which * groups * width, (which + 1) * groups * width)
        moment = statistics.moment[span, span].view(groups, width, groups, width).diagonal(dim1=1, dim2=3).sum(-1)
        scale = row_weights(statistics, attention)[which]
        vectors = torch.linalg.eigh(scale[:, None] * moment * scale).eigenvectors.flip(-1)[:, : self.rank]
        head = self.rank * (vectors / scale[:, None]).mT
        token = torch.einsum("gr,gwd->rwd", vectors * scale[:, None], weight)
        return head, token

    def _contextual(
        self, tpa: TPAKVOnly, a: MHA, statistics: Statistics, inputs: Inputs, heads: list[Tensor], tokens: list[Tensor]
    ) -> list[float]:
        """Set the weights by alternating regressions -> the relative errors of keys and values."""
        group, errors, of_heads, of_tokens = a.num_heads // a.num_kv_heads, [], [], []
        scales = row_weights(statistics, a)
        for which, linear in enumerate((a.key, a.value)):
            fitted = Alternating(self.rank, linear, a.num_kv_heads, heads[which], tokens[which], scales[which])
            for _ in range(self.sweeps):
                fitted.regress_tokens(inputs, self.ridge)
                fitted.regress_heads(inputs, self.ridge)
            fitted.regress_tokens(inputs, self.ridge)
            errors.append(fitted.error(inputs))
            of_heads.append(fitted.head.repeat_interleave(group, 1).flatten(0, 1))
            of_tokens.append(fitted.token.flatten(0, 1))
        tpa.query.weight.copy_(a.query.weight)
        rows = torch.cat(of_heads + of_tokens)  # the last column is the bias
        tpa.factors.weight.copy_(rows[:, :-1])
        assert tpa.factors.bias is not None
        tpa.factors.bias.copy_(rows[:, -1])
        return errors


class Alternating:
    """Y(x) = W x, (G, D), by (1 / R) sum_r a_r(x) (x) b_r(x), a_r = A_r [x; 1] and b_r = B_r [x; 1].

    Each regression has a closed form in A or in B for a fixed other one: the error rises by the ridge alone.

    Args:
        rank: R.
        linear: W without a bias, (G D, d).
        groups: G.
        head: fixed head factors to begin with, (R, G).
        token: token factors to begin with, (R, D, d).
        scale: weights of the rows of Y, (G,).
    """

    def __init__(self, rank: int, linear: nn.Linear, groups: int, head: Tensor, token: Tensor, scale: Tensor) -> None:
        self.rank, self.weight, self.groups, self.scale = rank, linear.weight.double(), groups, scale
        self.head = torch.cat((torch.zeros(*head.shape, linear.in_features, dtype=head.dtype), head[..., None]), -1)
        self.token = torch.cat((token, torch.zeros_like(token[..., :1])), -1)

    def regress_tokens(self, inputs: Inputs, ridge: float) -> None:
        """The best B for a fixed A; the ridge is a share of the mean diagonal."""
        size = self.head.shape[-1]
        normal = torch.zeros(self.rank * size, self.rank * size, dtype=torch.float64)
        right = torch.zeros(self.rank * size, self.token.shape[1], dtype=torch.float64)
        for x, y in self._rows(inputs):
            a = torch.einsum("tn,rgn->trg", x, self.head) * self.scale / self.rank
            wide = torch.einsum("trg,tn->tgrn", a, x).flatten(2).flatten(0, 1)  # rows of all positions and groups
            normal += wide.mT @ wide
            right += wide.mT @ (y * self.scale[:, None]).flatten(0, 1)
        self.token = _solved(normal, right, ridge).view(self.rank, size, -1).mT

    def regress_heads(self, inputs: Inputs, ridge: float) -> None:
        """The best A for a fixed B; the ridge is a share of the mean diagonal."""
        size = self.head.shape[-1]
        normal = torch.zeros(self.rank * size, self.rank * size, dtype=torch.float64)
        right = torch.zeros(self.rank * size, self.groups, dtype=torch.float64)
        for x, y in self._rows(inputs):
            b = torch.einsum("tn,rwn->trw", x, self.token) / self.rank
            gram = b @ b.mT  # (t, R, R)
            normal += torch.einsum("trs,tn,tm->rnsm", gram, x, x).flatten(2).flatten(0, 1)
            right += torch.einsum("trw,tgw,tn->rng", b, y, x).flatten(0, 1)
        self.head = _solved(normal, right, ridge).view(self.rank, size, -1).mT

    def error(self, inputs: Inputs) -> float:
        """Squared error over squared size, of weighted rows."""
        lost = squares = 0.0
        for x, y in self._rows(inputs):
            a, b = torch.einsum("tn,rgn->trg", x, self.head), torch.einsum("tn,rwn->trw", x, self.token)
            fitted = torch.einsum("trg,trw->tgw", a, b) / self.rank
            lost += float(((fitted - y) * self.scale[:, None]).square().sum())
            squares += float((y * self.scale[:, None]).square().sum())
        return lost / squares

    def _rows(self, inputs: Inputs) -> Any:
        for batch in inputs():
            x = batch.double().flatten(0, 1)
            y = (x @ self.weight.mT).unflatten(-1, (self.groups, -1))
            yield torch.cat((x, torch.ones_like(x[:, :1])), -1), y


def row_weights(statistics: Statistics, attention: MHA) -> tuple[Tensor, Tensor]:
    """The weights of each key-value head's errors of keys and values, (G,) each, with mean one."""
    group = statistics.heads // statistics.groups
    keys = statistics.energy.sum(-1).unflatten(0, (-1, group)).sum(-1).sqrt()
    output = attention.out.weight.detach().double().unflatten(1, (statistics.heads, -1))
    values = output.square().sum((0, 2)).unflatten(0, (-1, group)).sum(-1).sqrt()
    return keys / keys.mean(), values / values.mean()


def _solved(normal: Tensor, right: Tensor, ridge: float) -> Tensor:
    normal.diagonal().add_(ridge * normal.diagonal().mean())
    return torch.linalg.solve(normal, right)

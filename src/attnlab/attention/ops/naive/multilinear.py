"""Multi-linear attention: no softmax, products of three factors."""

import torch
from torch import Tensor, nn

from ... import AbsoluteMultiLinear, RelativeMultiLinear, SummedMultiLinear, TiedMultiLinear
from ...multilinear import MultiLinear
from .formulas import formula


@formula(RelativeMultiLinear)
def relative(a: RelativeMultiLinear, x: Tensor, prefix: Tensor | None = None) -> Tensor:
    """Slices A_i.. of block-term tensors over lags, flattened and read out; x (T, d), prefix (S, d)."""
    q, k, v = _factors(a, x)
    rows = []
    for i in range(len(x)):
        y = _prefix_pairs(a, q[i], prefix)
        for c, g in enumerate(_cores(a)):
            weight = a.out.weight.view(a.d_model, -1, a.window, a.window)[:, c].flip(-1, -2)  # by lags
            for lag in range(min(i + 1, a.window)):
                for other in range(min(i + 1, a.window)):
                    y = y + weight[:, lag, other] * (g * q[i] * k[i - lag] * v[i - other]).sum()
        rows.append(y)
    return torch.stack(rows)


@formula(AbsoluteMultiLinear)
def absolute(a: AbsoluteMultiLinear, x: Tensor, prefix: Tensor | None = None) -> Tensor:
    """Slices A_i.. over the places of the window, read out, times N / (i + 1); x (T, d), prefix (S, d)."""
    q, k, v = _factors(a, x)
    rows = []
    for i in range(len(x)):
        y = torch.zeros(a.d_model, dtype=x.dtype)
        for c, g in enumerate(_cores(a)):
            weight = a.out.weight.view(a.d_model, -1, a.window, a.window)[:, c]
            for j in range(i + 1):
                for m in range(i + 1):
                    y = y + weight[:, j, m] * (g * q[i] * k[j] * v[m]).sum()
        rows.append(y * a.window / (i + 1) + _prefix_pairs(a, q[i], prefix))
    return torch.stack(rows)


@formula(SummedMultiLinear)
def summed(a: SummedMultiLinear, x: Tensor, prefix: Tensor | None = None) -> Tensor:
    """Decaying sums of keys and of values, each written out; x (T, d), prefix (S, d)."""
    q, k, v = _factors(a, x)
    decay = 1 / (1 + torch.exp(-a.decay))
    of_key, of_value = decay[: a.rank], decay[a.rank :]
    rows = []
    for i in range(len(x)):
        keys = torch.stack([of_key ** (i - j) * k[j] for j in range(i + 1)]).sum(0) * (1 - of_key**2) ** 0.5
        values = torch.stack([of_value ** (i - j) * v[j] for j in range(i + 1)]).sum(0) * (1 - of_value**2) ** 0.5
        read = torch.cat([g * q[i] * keys * values for g in _cores(a)])
        rows.append(a.out.weight @ read + _prefix_pairs(a, q[i], prefix))
    return torch.stack(rows)


@formula(TiedMultiLinear)
def tied(a: TiedMultiLinear, x: Tensor, prefix: Tensor | None = None) -> Tensor:
    """A mean over the prefix's pairs and the text's up to the query; x (T, d), prefix (S, d)."""
    joint = x if prefix is None else torch.cat((prefix, x))
    q, k, v = _factors(a, joint)
    rows = []
    for i in range(len(joint) - len(x), len(joint)):
        read = [_pairs(g * q[i], k[: i + 1], v[: i + 1]) for g in _cores(a)]
        rows.append(a.out.weight @ torch.cat(read))
    return torch.stack(rows)


def _factors(a: MultiLinear, x: Tensor) -> tuple[Tensor, ...]:
    return (x @ a.qkv.weight.T).split([a.rank, a.rank, a.value_dim], -1)


def _cores(a: MultiLinear) -> list[Tensor]:
    """One a read-out: g, or exp(g_r) / sum_s exp(g_s)."""
    cores = [torch.exp(g) / torch.exp(g).sum() if a.core == "softmax" else g for g in a.cores]
    return [torch.stack(cores).mean(0)] if a.num_readouts == 1 else cores


def _pairs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Values weighted by the inner products of q with their keys, averaged."""
    return torch.stack([(q * k[j]).sum() * v[j] for j in range(len(k))]).mean(0)


def _prefix_pairs(a: MultiLinear, q: Tensor, prefix: Tensor | None) -> Tensor:
    """W_P times the mean over the prefix of (g . q . k_s) v_s."""
    if prefix is None or not len(prefix):
        return torch.zeros(a.d_model, dtype=q.dtype)
    _, k, v = _factors(a, prefix)
    read = [_pairs(g * q, k, v) for g in _cores(a)]
    assert isinstance(a.prefix_out, nn.Linear)
    return a.prefix_out.weight @ torch.cat(read)

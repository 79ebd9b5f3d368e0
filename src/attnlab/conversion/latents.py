"""A latent for content keys and values together: the projection with the smallest error in a chosen norm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from attnlab.conversion.mixing import Mixing
from attnlab.conversion.statistics import Statistics

Latent = Literal["output_aware", "balanced", "pca", "weights"]
RIDGE = 1e-4  # of the mean diagonal of a metric, so that it can be inverted


class Projection(NamedTuple):
    """c = E^T y and y^ = B c (+ what centring adds), of y = [content keys; values].

    Args:
        down: E^T, (r, n).
        up: B, (n, r).
        errors: predicted squared errors of the output for the first 0, 1, 2, ... components, (n + 1,).
    """

    down: Tensor
    up: Tensor
    errors: Tensor


def metric_of(statistics: Statistics, mixing: Mixing, output: Tensor) -> Tensor:
    """The norm of errors of y in which they count as they move the attention's output, (n, n).

    Keys: S_k = (1 / D) sum_i E w_ti q_ti q_ti^T, of the queries that read content. Values: block g is
    sum_{i: g(i) = g} E [sum_j P_tj^2] W_o,i^T W_o,i.

    Args:
        output: W_o of each head, (H, d, D).
    """
    groups, width, heads = statistics.groups, statistics.width, statistics.heads
    group, size = heads // groups, len(mixing.content)
    metric = torch.zeros(size + groups * width, size + groups * width, dtype=torch.float64)
    for i in range(heads):
        reads = mixing.content.view(size, groups, width)[:, i // group] @ mixing.stand_in[i]
        metric[:size, :size] += reads @ statistics.of_query[i] @ reads.mT / width
        span = slice(size + i // group * width, size + (i // group + 1) * width)
        metric[span, span] += statistics.spread[i] * output[i].mT @ output[i]
    return metric


def moment_of(statistics: Statistics, mixing: Mixing, centred: bool) -> Tensor:
    """Second moments of y, around its mean if `centred`, (n, n).

    Args:
        centred: whether the mean is taken away.
    """
    moment, content = statistics.covariance() if centred else statistics.moment, mixing.content
    size = content.shape[1]
    keys = content @ moment[:size]
    upper = torch.cat((keys[:, :size] @ content.mT, keys[:, size:]), 1)
    return torch.cat((upper, torch.cat((keys[:, size:].mT, moment[size:, size:]), 1)))


def content_map(statistics: Statistics, mixing: Mixing) -> Tensor:
    """[k; v] -> y = [content keys; values], (n, 2 G D)."""
    return torch.block_diag(mixing.content, torch.eye(statistics.groups * statistics.width, dtype=torch.float64))


def project(
    method: Latent,
    moment: Tensor,
    metric: Tensor,
    content: int,
    weights: Tensor | None = None,
    blocks: Sequence[int] | None = None,
) -> Projection:
    """The projection of a method, of full rank: its first r rows and columns are the best of rank r.

    Args:
        method: "output_aware": error in the metric of outputs; "pca": of y itself; "balanced": of y whose keys are
            divided by the ratio of the root mean squares of keys and values (the mean norms in TransMLA, section 4.3);
            "weights": of the weight matrices, without data (MHA2MLA, section 3.2).
        moment: second moments of y, (n, n).
        metric: of outputs, (n, n).
        content: components of y that are keys; the others are values.
        weights: the matrix W_y that makes y of inputs, (n, d); only "weights" reads it.
        blocks: sizes of the metric's diagonal blocks, outside of which it is zero, so that its root is theirs; None:
            it is one block.
    """
    size = len(moment)
    if method == "output_aware":
        scale = metric.diagonal().mean().clamp(min=torch.finfo(torch.float64).tiny)
        scaled = metric / scale + RIDGE * torch.eye(size, dtype=torch.float64)
        roots = [_roots(part) for part in _diagonal(scaled, [size] if blocks is None else blocks)]
        half, inverse = (torch.block_diag(*side) for side in zip(*roots, strict=True))
        target = moment
    else:
        diagonal = torch.ones(size, dtype=torch.float64)
        if method == "balanced" and 0 < content < size:
            energies = moment.diagonal()
            diagonal[:content] = (energies[content:].mean() / energies[:content].mean()).sqrt()
        half, inverse = torch.diag(diagonal), torch.diag(1 / diagonal)
        target = moment
        if method == "weights":
            assert weights is not None
            target = weights @ weights.mT
    values, vectors = (part.flip(-1) for part in torch.linalg.eigh(half @ target @ half))
    down, up = vectors.mT @ half, inverse @ vectors
    return Projection(down, up, _errors(moment, metric, down, up, values if target is moment else None))


def _diagonal(matrix: Tensor, sizes: Sequence[int]) -> Iterator[Tensor]:
    """The blocks along the diagonal; those of no size are left out."""
    start = 0
    for size in sizes:
        if size:
            yield matrix[start : start + size, start : start + size]
        start += size


def _errors(moment: Tensor, metric: Tensor, down: Tensor, up: Tensor, values: Tensor | None) -> Tensor:
    """tr S (I - B_r E_r^T) C (I - B_r E_r^T)^T for each r, (n + 1,).

    With B = (E^T)^-1 the columns are y = sum_a b_a (e_a . y), so that the error of r components is that of the others.
    values: the diagonal of E^T C E, (n,), where it has no other elements; None: it has.
    """
    if values is not None:
        errors = ((metric @ up * up).sum(0) * values).flip(0).cumsum(0).flip(0)
    else:
        metric_up, moment_down = up.mT @ metric @ up, down @ moment @ down.mT
        products = metric_up * moment_down.mT  # tr S b_a b_b^T (e_a^T C e_b)
        errors = products.flip(0, 1).cumsum(0).cumsum(1).diagonal().flip(0)  # of the components r, r + 1, ...
    return torch.cat((errors, errors.new_zeros(1))).clamp(min=0)


def _roots(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The square root of a positive definite matrix, and its inverse."""
    values, vectors = torch.linalg.eigh(matrix)
    values = values.clamp(min=torch.finfo(torch.float64).tiny).sqrt()
    return vectors * values @ vectors.mT, vectors / values @ vectors.mT

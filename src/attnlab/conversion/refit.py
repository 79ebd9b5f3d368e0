"""The output projection of a converted attention, fitted to what the original puts out."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from attnlab.attention import Attention
from attnlab.conversion.statistics import add_products, symmetric

RIDGE = 1e-3  # of the mean variance of what the projection reads
POSITIONS, FOR_EACH = 16384, 16  # enough for the regression, and for each column that the projection reads


def spaced(positions: int, width: int) -> int:
    """Of how many batches one is read: more positions than :data:`POSITIONS`, or 16 for each column, change little.

    Args:
        positions: that there are.
        width: columns of the projection.
    """
    return max(1, positions // max(POSITIONS, FOR_EACH * width))


@torch.no_grad()
def refit(
    converted: Attention, pairs: Iterable[tuple[Tensor, Tensor]], seen: Callable[[int, Tensor], None] | None = None
) -> None:
    """Add to the output projection what a ridge regression finds of the original's output.

    With z the heads' outputs of the converted attention, e = original(x) - converted(x), and both around their means:
    W_o += E[e z^T] (E[z z^T] + ridge)^-1, and the bias takes what is left of the mean of e. The heads' errors are
    correlated with their outputs, and partly cancel. Nothing changes where the conversion is exact.

    Args:
        converted: its projection `out`, which has a bias, is changed.
        pairs: batches that enter both, (B, T, d), and what the original puts out, (B, T, d).
        seen: called with the number of each batch and what the projection reads of it, which the fit does not change;
            None: nobody.
    """
    out = converted.out
    assert isinstance(out, nn.Linear) and out.bias is not None
    read: list[Tensor] = []
    handle = out.register_forward_pre_hook(lambda _, given: read.append(given[0]))
    width, size, count = out.in_features, out.out_features, 0
    gram = torch.zeros(width, width, dtype=torch.float64)
    cross, sums = gram.new_zeros(width, size), (gram.new_zeros(width), gram.new_zeros(size))
    try:
        for number, (x, want) in enumerate(pairs):
            error = (want - converted(x)).double().flatten(0, -2)
            (heads,) = read  # it is called once
            read.clear()
            if seen is not None:
                seen(number, heads)
            z = heads.double().flatten(0, -2)
            add_products(gram, z)
            cross.addmm_(z.mT, error)
            count += len(z)
            sums = sums[0] + z.sum(0), sums[1] + error.sum(0)
    finally:
        handle.remove()
    of_z, of_error = (total / count for total in sums)
    gram, cross = symmetric(gram) / count - torch.outer(of_z, of_z), cross / count - torch.outer(of_z, of_error)
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    added = torch.linalg.solve(gram, cross).mT
    out.weight.add_(added)
    out.bias.add_(of_error - added @ of_z)

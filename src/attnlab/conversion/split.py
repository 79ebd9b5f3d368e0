"""Split of keys and values into rotary components and a latent for the rest.

A rotary embedding multiplies z[f] in C^G, the pair f of all key heads, by one complex number. So any unitary U_f may
mix the heads: k'[f] = U_f^H k[f] with q'[f] = U_f^H q[f] leaves every logit unchanged. Eigenvectors of E z z^H
concentrate the energy in few components. Components without rotation become content, which a latent can hold.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from attnlab.conversion.statistics import Statistics
from attnlab.errors import ConfigError

Rotary = Literal["score", "standard", "two_norm", "transmla", "uniform"]
Latent = Literal["output_aware", "balanced", "pca", "weights"]
RIDGE = 1e-4  # of the mean diagonal of a metric, so that it can be inverted


class Mixing(NamedTuple):
    """Split of a layer's keys and queries into components with and without rotation.

    Args:
        turned: the map from [k of all heads] to the rotary key, (d_r, G D), half-split.
        content: the map to the rest, (G D - d_r, G D); with `turned` an orthogonal matrix.
        queries: the map from a head's query to its rotary query, (H, d_r, D).
        stand_in: a map of each head's query before content is read, (H, D, D): the best constant in place of the
            lost rotation.
        frequencies: of the rotary components, (d_r / 2,).
        lost: predicted squared error of the output from the lost rotations.
    """

    turned: Tensor
    content: Tensor
    queries: Tensor
    stand_in: Tensor
    frequencies: Tensor
    lost: float


def check_width(method: Rotary, width: int, groups: int, pairs: int, key: str = "") -> None:
    """ConfigError: a method cannot have this number of rotary components.

    Args:
        width: d_r.
        groups: G.
        pairs: F, rotary pairs of a head.
        key: the setting behind the width; "": convert.rope_dim.
    """
    count, key = width // 2, key or f"convert.rope_dim={width}"
    most = pairs if method == "standard" else groups * pairs
    if width % 2 or not 0 <= count <= most:
        valid = f"an even number up to {2 * most}" if pairs else "0; the original has no rotary positions"
        raise ConfigError(f"{key}: expected {valid}")
    if method == "transmla" and pairs and count <= pairs and (count == 0 or pairs % count):
        rule = f"the first component of every c-th frequency rotates; rope_dim must divide {2 * pairs}"
        raise ConfigError(f"convert.rotary=transmla {key}: {rule}")
    if method in ("two_norm", "uniform") and count % groups:
        rule = f"every key head rotates as many components; rope_dim must be a multiple of {2 * groups}"
        raise ConfigError(f"convert.rotary={method} {key}: {rule}")


def widths(method: Rotary, groups: int, pairs: int) -> list[int]:
    """All valid d_r of a method, ascending; arguments as in :func:`check_width`."""
    valid = []
    for width in range(0, 2 * groups * pairs + 1, 2):
        with contextlib.suppress(ConfigError):
            check_width(method, width, groups, pairs)
            valid.append(width)
    return valid


def mix(statistics: Statistics, theta: Tensor, method: Rotary, width: int, turned: Tensor | None = None) -> Mixing:
    """Choose `width` / 2 complex components that keep their rotation.

    Args:
        theta: the frequencies, (F,).
        method: "score": complex eigenvectors, and the components that lose most without rotation; "standard": of these
            the best one of each k-th frequency, so that the frequencies are those of a narrower head with another base,
            as other programs expect; "transmla": real
            orthogonal mixing, and the first component of every c-th frequency (TransMLA, section 4.2, without folding
            frequencies); "two_norm" and "uniform": no mixing, and of each key head the frequencies with the largest
            product of norms, or evenly spread ones (MHA2MLA, section 3.1).
        width: d_r, even. ConfigError: not valid for the method.
        turned: the components that keep their rotation, (G, F) bool, from :func:`scores`; None: the method chooses.
    """
    groups, pairs = statistics.groups, statistics.pairs
    check_width(method, width, groups, pairs)
    if not pairs:
        none = torch.zeros(0, groups * statistics.width, dtype=torch.float64)
        every = torch.eye(groups * statistics.width, dtype=torch.float64)
        heads = torch.eye(statistics.width, dtype=torch.float64).repeat(statistics.heads, 1, 1)
        return Mixing(none, every, heads[:, :0], heads, theta, 0.0)
    complex_basis = method in ("score", "standard")
    basis, chosen = (
        _standard(statistics, width // 2, theta) if method == "standard" else _METHODS[method](statistics, width // 2)
    )
    loss = _losses(statistics, basis, stand_in=complex_basis)
    keep = torch.zeros(groups, pairs, dtype=torch.bool)
    keep.view(-1)[chosen] = True
    keep = keep if turned is None else turned
    return _mixing(statistics, theta, basis, keep, float(loss[~keep].sum()), stand_in=complex_basis)


def scores(statistics: Statistics, method: Rotary, theta: Tensor) -> Tensor:
    """The value of each component's rotation, (G, F).

    With "score" and "standard" the losses of the components of each frequency, the largest first; with "two_norm" the
    products of norms of each key head; zeros for the other methods, which do not read the data. "standard" cannot
    choose scaled frequencies: their value is -inf. theta (F,): the frequencies.
    """
    if method in ("score", "standard") and statistics.pairs:
        losses = _losses(statistics, _sorted_basis(statistics), stand_in=True)
        if method == "standard":
            losses[:, _even(theta) :] = -torch.inf
        return losses
    if method == "two_norm" and statistics.pairs:
        return _norms(statistics)
    return torch.zeros_like(statistics.energy[: statistics.groups])


def _sorted_basis(statistics: Statistics) -> Tensor:
    """Complex eigenvectors of each frequency, (F, G, G), by falling loss without rotation."""
    basis = torch.linalg.eigh(_moments(statistics)).eigenvectors.flip(-1)
    order = _losses(statistics, basis, stand_in=True).sort(dim=0, descending=True, stable=True).indices
    return basis.gather(2, order.mT[:, None].expand_as(basis))


def _score(statistics: Statistics, count: int) -> tuple[Tensor, Tensor]:
    """Complex eigenvectors of each frequency, (F, G, G), and the components (c F + f) with the largest losses."""
    basis = _sorted_basis(statistics)
    loss = _losses(statistics, basis, stand_in=True)
    return basis, loss.flatten().topk(count).indices


def _standard(statistics: Statistics, count: int, theta: Tensor) -> tuple[Tensor, Tensor]:
    """ConfigError: too few frequencies fall evenly from 1; those of llama3 scaling do so only at first."""
    if count > (even := _even(theta)):
        raise ConfigError(
            f"convert.rotary=standard convert.rope_dim={2 * count}: only {even} rotary frequencies of the original "
            f"are a standard spectrum, before its scaling; expected at most {2 * even}"
        )
    return _sorted_basis(statistics), spaced(scores(statistics, "standard", theta)[0], count)


def _even(theta: Tensor) -> int:
    """The number of first frequencies that are powers of the second one."""
    ratio = theta[1:] / theta[:-1]
    return int(torch.cat((theta[:1] - 1, ratio / ratio[:1] - 1)).abs().lt(1e-6).cumprod(0).sum())


def spaced(value: Tensor, count: int) -> Tensor:
    """The numbers 0, k, 2 k, ... of `count` frequencies with the largest sum of `value`, over all k."""
    steps = range(1, max(1, (len(value) - 1) // max(1, count - 1)) + 1)
    return max((torch.arange(count) * k for k in steps), key=lambda places: float(value[places].sum()))


def _transmla(statistics: Statistics, count: int) -> tuple[Tensor, Tensor]:
    basis = torch.linalg.eigh(_moments(statistics).real).eigenvectors.flip(-1).to(torch.complex128)
    if count > statistics.pairs:
        first = torch.arange(count)  # all frequencies of the first component, then of the next
        return basis, first
    return basis, torch.arange(0, statistics.pairs, statistics.pairs // count)


def _norms(statistics: Statistics) -> Tensor:
    """Products of the norms of keys and of the queries that read them, of each key head, (G, F)."""
    keys = torch.stack([matrix.diagonal().real for matrix in _moments(statistics)], -1).sqrt()
    return keys * statistics.energy.sqrt().unflatten(0, (statistics.groups, -1)).mean(1)


def _two_norm(statistics: Statistics, count: int) -> tuple[Tensor, Tensor]:
    number = count // statistics.groups
    chosen = _norms(statistics).topk(number, -1).indices + torch.arange(statistics.groups)[:, None] * statistics.pairs
    return _identity(statistics), chosen.flatten()


def _uniform(statistics: Statistics, count: int) -> tuple[Tensor, Tensor]:
    places = torch.linspace(0, statistics.pairs - 1, count // statistics.groups).round().long()
    return _identity(statistics), (places + torch.arange(statistics.groups)[:, None] * statistics.pairs).flatten()


_METHODS: dict[str, Callable[[Statistics, int], tuple[Tensor, Tensor]]] = {
    "score": _score,
    "transmla": _transmla,
    "two_norm": _two_norm,
    "uniform": _uniform,
}


def _identity(statistics: Statistics) -> Tensor:
    return torch.eye(statistics.groups, dtype=torch.complex128).expand(statistics.pairs, -1, -1)


def _moments(statistics: Statistics) -> Tensor:
    """E z z^H of each frequency, (F, G, G) complex."""
    groups, width, pairs = statistics.groups, statistics.width, statistics.pairs
    keys = statistics.moment[: groups * width, : groups * width].view(groups, width, groups, width)
    rr = torch.stack([keys[:, f, :, f] for f in range(pairs)])
    ii = torch.stack([keys[:, f + pairs, :, f + pairs] for f in range(pairs)])
    ri = torch.stack([keys[:, f, :, f + pairs] for f in range(pairs)])
    return torch.complex(rr + ii, ri.mT - ri)


def _losses(statistics: Statistics, basis: Tensor, stand_in: bool) -> Tensor:
    """Predicted squared error of the output without a component's rotation, (G, F).

    The logit of a component is Re conj(q) k e^(i phi); the error is that of e^(i phi) against its mean, or against 1.
    """
    energy = torch.einsum("fgc,fgh,fhc->cf", basis.conj(), _moments(statistics), basis).real  # E |k'|^2
    share = basis.abs().square().movedim(0, -1)  # (G, components, F)
    group = statistics.heads // statistics.groups
    rest = 1 - statistics.turn.abs().square() if stand_in else 2 * (1 - statistics.turn.real)
    queries = (statistics.weighted * rest).unflatten(0, (statistics.groups, group)).sum(1)  # (G, F)
    return energy * torch.einsum("gcf,gf->cf", share, queries) / (2 * statistics.width)


def _mixing(statistics: Statistics, theta: Tensor, basis: Tensor, keep: Tensor, lost: float, stand_in: bool) -> Mixing:
    groups, width, pairs = statistics.groups, statistics.width, statistics.pairs
    group = statistics.heads // groups
    rotated = 2 * pairs
    maps = torch.zeros(2, groups, pairs, groups, width, dtype=torch.float64)  # real and imaginary rows of k' = U^H k
    place = torch.arange(pairs)
    for c in range(groups):
        for g in range(groups):
            u = basis[:, g, c].conj()
            maps[0, c, place, g, place], maps[0, c, place, g, place + pairs] = u.real, -u.imag
            maps[1, c, place, g, place], maps[1, c, place, g, place + pairs] = u.imag, u.real
    rows = maps.flatten(3)
    turned = torch.cat((rows[0][keep], rows[1][keep]))
    content = torch.cat((rows[0][~keep], rows[1][~keep]))
    plain = torch.eye(groups * width, dtype=torch.float64).view(groups, width, -1)[:, rotated:].flatten(0, 1)
    content = torch.cat((content, plain))  # components that were never rotated
    queries = torch.stack([turned.view(-1, groups, width)[:, i // group] for i in range(statistics.heads)])
    change = torch.eye(width, dtype=torch.float64).repeat(statistics.heads, 1, 1)
    if stand_in and pairs:
        rho = statistics.turn.conj()
        change[:, place, place], change[:, place, place + pairs] = rho.real, -rho.imag
        change[:, place + pairs, place], change[:, place + pairs, place + pairs] = rho.imag, rho.real
    frequencies = theta.expand(groups, -1)[keep]
    return Mixing(turned, content, queries, change, frequencies, lost)


# --- the latent ------------------------------------------------------------------------------------------------


class Projection(NamedTuple):
    """c = E^T y and y^ = B c, without the terms of centring, for y = [content keys; values].

    Args:
        down: E^T, (r, n).
        up: B, (n, r).
        errors: predicted squared errors of the output for the first 0, 1, 2, ... components, (n + 1,).
    """

    down: Tensor
    up: Tensor
    errors: Tensor


def metric_of(statistics: Statistics, mixing: Mixing, output: Tensor) -> Tensor:
    """The metric of errors of y by their effect on the attention's output, (n, n).

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
    """Second moments of y, around its mean if `centred`, (n, n)."""
    moment, content = statistics.moment, mixing.content
    if centred:
        moment = moment - torch.outer(statistics.mean, statistics.mean)
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
    """The projection of a method at full rank: its first r rows and columns are the best of rank r.

    Args:
        method: "output_aware": least error in the metric of outputs; "pca": of y itself; "balanced": of y with keys
            divided by the ratio of the root mean squares of keys and values (the mean norms in TransMLA, section 4.3);
            "weights": of the weight matrices, without data (MHA2MLA, section 3.2).
        moment: second moments of y, (n, n).
        metric: of outputs, (n, n).
        content: number of components of y that are keys; the others are values.
        weights: the matrix W_y from inputs to y, (n, d), for "weights".
        blocks: sizes of the metric's diagonal blocks, outside of which it is zero; None: one block.
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
    values, vectors = (part.flip(-1) for part in torch.linalg.eigh(half @ target @ half.mT))
    down, up = vectors.mT @ half, inverse @ vectors
    return Projection(down, up, _errors(moment, metric, down, up, values if target is moment else None))


def _diagonal(matrix: Tensor, sizes: Sequence[int]) -> Iterator[Tensor]:
    """The nonempty blocks along the diagonal."""
    start = 0
    for size in sizes:
        if size:
            yield matrix[start : start + size, start : start + size]
        start += size


def _errors(moment: Tensor, metric: Tensor, down: Tensor, up: Tensor, values: Tensor | None) -> Tensor:
    """tr S (I - B_r E_r^T) C (I - B_r E_r^T)^T for each r, (n + 1,).

    With B = (E^T)^-1 the columns are y = sum_a b_a (e_a . y), so that the error of r components is that of the others.
    values: the diagonal of E^T C E, (n,), if that matrix is diagonal.
    """
    if values is not None:
        errors = ((metric @ up * up).sum(0) * values).flip(0).cumsum(0).flip(0)
    else:
        metric_up, moment_down = up.mT @ metric @ up, down @ moment @ down.mT
        products = metric_up * moment_down.mT  # tr S b_a b_b^T (e_a^T C e_b)
        errors = products.flip(0, 1).cumsum(0).cumsum(1).diagonal().flip(0)  # of the components r, r + 1, ...
    return torch.cat((errors, errors.new_zeros(1))).clamp(min=0)


def _roots(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """R with R^T R = a positive definite matrix, and its inverse."""
    root = torch.linalg.cholesky(matrix).mT
    return root, torch.linalg.solve_triangular(root, torch.eye(len(root), dtype=root.dtype), upper=True)

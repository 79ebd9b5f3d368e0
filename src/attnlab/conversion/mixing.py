"""Which rotary components of the keys keep their rotation, after the heads are mixed within each frequency.

A rotary embedding multiplies z[f] in C^G, the pair f of all key heads, by one complex number. So any unitary U_f may
mix the heads: k'[f] = U_f^H k[f] with q'[f] = U_f^H q[f] leaves every logit as it is. Eigenvectors of E z z^H gather
the energy in few components. Components that lose their rotation are read as content, which a latent can hold.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from attnlab.conversion.statistics import Statistics
from attnlab.errors import ConfigError

Rotary = Literal["score", "two_norm", "transmla", "uniform"]


class Mixing(NamedTuple):
    """How keys and queries of a layer are split into components with rotation and those without.

    Args:
        turned: rows that give the rotary key of [k of all heads], (d_r, G D), half-split.
        content: rows that give what is left, (G D - d_r, G D); with `turned` an orthogonal matrix.
        queries: rows that give a query of d_r components from a head's query, (H, d_r, D).
        stand_in: a map of each head's query before content is read, (H, D, D): the best constant in place of the
            rotation that content lost.
        frequencies: of the rotary components, (d_r / 2,).
        lost: predicted squared error of the output that the lost rotations make.
    """

    turned: Tensor
    content: Tensor
    queries: Tensor
    stand_in: Tensor
    frequencies: Tensor
    lost: float


def check_width(method: Rotary, width: int, groups: int, pairs: int, key: str = "") -> None:
    """Raise ConfigError if a method has no such number of rotary components; the settings alone tell.

    Args:
        method: see :func:`mix`.
        width: d_r.
        groups: G.
        pairs: F, rotary pairs of a head.
        key: the setting that the width comes from; "": convert.rope_dim.
    """
    count, key = width // 2, key or f"convert.rope_dim={width}"
    if width % 2 or not 0 <= count <= groups * pairs:
        there = f"an even number up to {2 * groups * pairs}" if pairs else "0; the original has no rotary positions"
        raise ConfigError(f"{key}: expected {there}")
    if method == "transmla" and pairs and count <= pairs and (count == 0 or pairs % count):
        raise ConfigError(
            f"convert.rotary=transmla {key}: it keeps the first component of every c-th frequency, so that rope_dim "
            f"divides {2 * pairs}"
        )
    if method in ("two_norm", "uniform") and count % groups:
        raise ConfigError(
            f"convert.rotary={method} {key}: every key head keeps the same number of components, so that rope_dim is "
            f"a multiple of {2 * groups}"
        )


def widths(method: Rotary, groups: int, pairs: int) -> list[int]:
    """All d_r that a method has, ascending; the arguments are those of :func:`check_width`."""
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
        method: "score": complex eigenvectors, and the components that lose most without rotation; "transmla": real
            orthogonal mixing, and the first component of every c-th frequency (TransMLA, section 4.2, without folding
            frequencies); "two_norm" and "uniform": no mixing, and of each key head the frequencies with the largest
            product of norms, or evenly spread ones (MHA2MLA, section 3.1).
        width: d_r, even; 0: none, only where nothing is rotated or all of it may be lost.
        turned: the components that keep their rotation, (G, F) bool, of :func:`scores`; None: the method chooses.

    Raises:
        ConfigError: the method has no such width.
    """
    groups, pairs = statistics.groups, statistics.pairs
    check_width(method, width, groups, pairs)
    if not pairs:
        none = torch.zeros(0, groups * statistics.width, dtype=torch.float64)
        every = torch.eye(groups * statistics.width, dtype=torch.float64)
        heads = torch.eye(statistics.width, dtype=torch.float64).repeat(statistics.heads, 1, 1)
        return Mixing(none, every, heads[:, :0], heads, theta, 0.0)
    basis, chosen = _METHODS[method](statistics, width // 2)
    loss = _losses(statistics, basis, stand_in=method == "score")
    keep = torch.zeros(groups, pairs, dtype=torch.bool)
    keep.view(-1)[chosen] = True
    keep = keep if turned is None else turned
    return _mixing(statistics, theta, basis, keep, float(loss[~keep].sum()), stand_in=method == "score")


def scores(statistics: Statistics, method: Rotary) -> Tensor:
    """What components are worth, by which a method chooses those that keep their rotation, (G, F).

    Args:
        method: "score": losses of the components of each frequency, the largest first; "two_norm": products of norms
            of each key head; others do not read the data, and get zeros.
    """
    if method == "score" and statistics.pairs:
        return _losses(statistics, _sorted_basis(statistics), stand_in=True)
    if method == "two_norm" and statistics.pairs:
        return _norms(statistics)
    return torch.zeros_like(statistics.energy[: statistics.groups])


def _sorted_basis(statistics: Statistics) -> Tensor:
    """Complex eigenvectors of each frequency, (F, G, G), those whose lost rotation costs most first."""
    basis = torch.linalg.eigh(_moments(statistics)).eigenvectors.flip(-1)
    order = _losses(statistics, basis, stand_in=True).sort(dim=0, descending=True, stable=True).indices
    return basis.gather(2, order.mT[:, None].expand_as(basis))


def _score(statistics: Statistics, count: int) -> tuple[Tensor, Tensor]:
    """Complex eigenvectors of each frequency, (F, G, G), and the components (c F + f) with the largest losses."""
    basis = _sorted_basis(statistics)
    loss = _losses(statistics, basis, stand_in=True)
    return basis, loss.flatten().topk(count).indices


def _transmla(statistics: Statistics, count: int) -> tuple[Tensor, Tensor]:
    basis = torch.linalg.eigh(_moments(statistics).real).eigenvectors.flip(-1).to(torch.complex128)
    if count > statistics.pairs:
        first = torch.arange(count)  # whole components, one after the other
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
    """Predicted squared error of the output if a component loses its rotation, (G, F).

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

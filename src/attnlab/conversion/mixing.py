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


def check_width(method: Rotary, width: int, groups: int, pairs: int, said: str = "") -> None:
    """Raise ConfigError if a method has no such number of rotary components; the settings alone tell.

    Args:
        method: see :func:`mix`.
        width: d_r.
        groups: G.
        pairs: F, rotary pairs of a head.
        said: where the width comes from, for the message; "": convert.rope_dim.
    """
    count, said = width // 2, said or f"convert.rope_dim={width}"
    if width % 2 or not 0 <= count <= groups * pairs:
        there = f"an even number up to {2 * groups * pairs}" if pairs else "0; the original has no rotary positions"
        raise ConfigError(f"{said}: expected {there}")
    if method == "transmla" and pairs and count <= pairs and (count == 0 or pairs % count):
        raise ConfigError(
            f"convert.rotary=transmla {said}: it keeps the first component of every c-th frequency, so that rope_dim "
            f"divides {2 * pairs}"
        )
    if method in ("two_norm", "uniform") and count % groups:
        raise ConfigError(
            f"convert.rotary={method} {said}: every key head keeps the same number of components, so that rope_dim is "
            f"a multiple of {2 * groups}"
        )


def widths(method: Rotary, groups: int, pairs: int) -> list[int]:
    """All d_r that a method has, ascending.

    Args:
        method: see :func:`mix`.
        groups: G.
        pairs: F, rotary pairs of a head.
    """
    found = []
    for width in range(0, 2 * groups * pairs + 1, 2):
        with contextlib.suppress(ConfigError):
            check_width(method, width, groups, pairs)
            found.append(width)
    return found


def mix(found: Statistics, theta: Tensor, method: Rotary, width: int, kept: Tensor | None = None) -> Mixing:
    """Choose `width` / 2 complex components that keep their rotation.

    Args:
        found: finished statistics.
        theta: the frequencies, (F,).
        method: "score": complex eigenvectors, and the components that lose most without rotation; "transmla": real
            orthogonal mixing, and the first component of every c-th frequency (TransMLA, section 4.2, without folding
            frequencies); "two_norm" and "uniform": no mixing, and of each key head the frequencies with the largest
            product of norms, or evenly spread ones (MHA2MLA, section 3.1).
        width: d_r, even; 0: none, only where nothing is rotated or all of it may be lost.
        kept: the components to keep, (G, F) bool, of :func:`scores`; None: the method chooses.

    Raises:
        ConfigError: the method has no such width.
    """
    groups, pairs = found.groups, found.pairs
    check_width(method, width, groups, pairs)
    if not pairs:
        none = torch.zeros(0, groups * found.width, dtype=torch.float64)
        whole = torch.eye(groups * found.width, dtype=torch.float64)
        heads = torch.eye(found.width, dtype=torch.float64).repeat(found.heads, 1, 1)
        return Mixing(none, whole, heads[:, :0], heads, theta, 0.0)
    basis, chosen = _METHODS[method](found, width // 2)
    loss = _losses(found, basis, stand_in=method == "score")
    keep = torch.zeros(groups, pairs, dtype=torch.bool)
    keep.view(-1)[chosen] = True
    keep = keep if kept is None else kept
    return _mixing(found, theta, basis, keep, float(loss[~keep].sum()), stand_in=method == "score")


def scores(found: Statistics, method: Rotary) -> Tensor:
    """What components are worth, by which a method chooses those that keep their rotation, (G, F).

    Args:
        found: finished statistics.
        method: "score": losses of the components of each frequency, the largest first; "two_norm": products of norms
            of each key head; others do not read the data, and get zeros.
    """
    if method == "score" and found.pairs:
        return _losses(found, _sorted_basis(found), stand_in=True)
    return _norms(found) if method == "two_norm" and found.pairs else torch.zeros_like(found.energy[: found.groups])


def _sorted_basis(found: Statistics) -> Tensor:
    """Complex eigenvectors of each frequency, (F, G, G), those whose lost rotation costs most first."""
    basis = torch.linalg.eigh(_moments(found)).eigenvectors.flip(-1)
    order = _losses(found, basis, stand_in=True).sort(dim=0, descending=True, stable=True).indices
    return basis.gather(2, order.mT[:, None].expand_as(basis))


def _score(found: Statistics, count: int) -> tuple[Tensor, Tensor]:
    """Complex eigenvectors of each frequency, (F, G, G), and the components (c F + f) with the largest losses."""
    basis = _sorted_basis(found)
    loss = _losses(found, basis, stand_in=True)
    return basis, loss.flatten().topk(count).indices


def _transmla(found: Statistics, count: int) -> tuple[Tensor, Tensor]:
    basis = torch.linalg.eigh(_moments(found).real).eigenvectors.flip(-1).to(torch.complex128)
    if count > found.pairs:
        first = torch.arange(count)  # whole components, one after the other
        return basis, first
    return basis, torch.arange(0, found.pairs, found.pairs // count)


def _norms(found: Statistics) -> Tensor:
    """Products of the norms of keys and of the queries that read them, of each key head, (G, F)."""
    keys = torch.stack([matrix.diagonal().real for matrix in _moments(found)], -1).sqrt()
    return keys * found.energy.sqrt().unflatten(0, (found.groups, -1)).mean(1)


def _two_norm(found: Statistics, count: int) -> tuple[Tensor, Tensor]:
    each = count // found.groups
    chosen = _norms(found).topk(each, -1).indices + torch.arange(found.groups)[:, None] * found.pairs
    return _identity(found), chosen.flatten()


def _uniform(found: Statistics, count: int) -> tuple[Tensor, Tensor]:
    places = torch.linspace(0, found.pairs - 1, count // found.groups).round().long()
    return _identity(found), (places + torch.arange(found.groups)[:, None] * found.pairs).flatten()


_METHODS: dict[str, Callable[[Statistics, int], tuple[Tensor, Tensor]]] = {
    "score": _score,
    "transmla": _transmla,
    "two_norm": _two_norm,
    "uniform": _uniform,
}


def _identity(found: Statistics) -> Tensor:
    return torch.eye(found.groups, dtype=torch.complex128).expand(found.pairs, -1, -1)


def _moments(found: Statistics) -> Tensor:
    """E z z^H of each frequency, (F, G, G) complex."""
    groups, width, pairs = found.groups, found.width, found.pairs
    keys = found.moment[: groups * width, : groups * width].view(groups, width, groups, width)
    rr = torch.stack([keys[:, f, :, f] for f in range(pairs)])
    ii = torch.stack([keys[:, f + pairs, :, f + pairs] for f in range(pairs)])
    ri = torch.stack([keys[:, f, :, f + pairs] for f in range(pairs)])
    return torch.complex(rr + ii, ri.mT - ri)


def _losses(found: Statistics, basis: Tensor, stand_in: bool) -> Tensor:
    """Predicted squared error of the output if a component loses its rotation, (G, F).

    The logit of a component is Re conj(q) k e^(i phi); the error is that of e^(i phi) against its mean, or against 1.
    """
    energy = torch.einsum("fgc,fgh,fhc->cf", basis.conj(), _moments(found), basis).real  # E |k'|^2
    share = basis.abs().square().movedim(0, -1)  # (G, components, F)
    group = found.heads // found.groups
    rest = 1 - found.turn.abs().square() if stand_in else 2 * (1 - found.turn.real)
    queries = (found.weighted * rest).unflatten(0, (found.groups, group)).sum(1)  # (G, F)
    return energy * torch.einsum("gcf,gf->cf", share, queries) / (2 * found.width)


def _mixing(found: Statistics, theta: Tensor, basis: Tensor, keep: Tensor, lost: float, stand_in: bool) -> Mixing:
    groups, width, pairs = found.groups, found.width, found.pairs
    group = found.heads // groups
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
    queries = torch.stack([turned.view(-1, groups, width)[:, i // group] for i in range(found.heads)])
    change = torch.eye(width, dtype=torch.float64).repeat(found.heads, 1, 1)
    if stand_in and pairs:
        rho = found.turn.conj()
        change[:, place, place], change[:, place, place + pairs] = rho.real, -rho.imag
        change[:, place + pairs, place], change[:, place + pairs, place + pairs] = rho.imag, rho.real
    frequencies = theta.expand(groups, -1)[keep]
    return Mixing(turned, content, queries, change, frequencies, lost)

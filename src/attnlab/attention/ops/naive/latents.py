"""Latents that all heads read: MLA, MTLA, and windows of them."""

import math
from typing import Any

import torch
from torch import Tensor

from ... import MLA, MTLA, MLAQueryLatent, MLAWindow, MTLAWindow
from .formulas import Turn, base, formula, half_split
from .heads import window


@formula(MLA)
def mla(a: MLA, x: Tensor, prefix: Tensor | None = None, turn: Turn = half_split) -> Tensor:
    """Absorbed logits over the latents of all earlier positions, x (T, d), prefix (S, d) (MTLA paper, section 3.2)."""
    c, kp = _latents(a, x, prefix, turn)
    return _read_latents(a, x, prefix, turn, c, kp, [list(range(i + 1)) for i in range(len(c))])


@formula(MLAWindow)
def mla_window(a: MLAWindow, x: Tensor, prefix: Tensor | None = None, turn: Turn = half_split) -> Tensor:
    """MLA whose query i sees the prefix, and the `window` newest positions of the text; x (T, d), prefix (S, d)."""
    c, kp = _latents(a, x, prefix, turn)
    return _read_latents(a, x, prefix, turn, c, kp, window(a, x, prefix))


@formula(MLAQueryLatent)
def mla_query_latent(a: MLAQueryLatent, x: Tensor, prefix: Tensor | None = None, turn: Turn = half_split) -> Tensor:
    """Full keys and values; both latents pass RMS norms (T6's specification, 1.4); x (T, d), prefix (S, d)."""

    def rms(v: Tensor, weight: Any) -> Tensor:
        return weight * v / torch.sqrt((v * v).mean() + 1e-6)

    joint = x if prefix is None else torch.cat((prefix, x))
    query_down, query_norm, query_up = a.query.children()
    up_keys, up_values = a.up_matrices()
    keys, values = [], []
    for j, v in enumerate(joint):
        latent, rotary = a.down(v).split([a.latent_dim, a.rope_dim])
        latent, rotary = rms(latent, a.norm.weight), turn(rotary, j, a.rope_theta)
        keys.append([torch.cat((up_keys[h] @ latent, rotary)) for h in range(a.num_heads)])
        values.append([up_values[h] @ latent for h in range(a.num_heads)])
    rows = []
    for i in range(len(joint) - len(x), len(joint)):
        q = query_up(rms(query_down(joint[i]), query_norm.weight)).view(a.num_heads, -1)
        heads = []
        for h in range(a.num_heads):
            turned = torch.cat((q[h, : a.head_dim], turn(q[h, a.head_dim :], i, a.rope_theta)))
            logits = torch.stack([turned @ keys[j][h] for j in range(i + 1)])
            p = torch.softmax(logits / math.sqrt(a.head_dim + a.rope_dim), 0)
            heads.append(torch.stack([p[j] * values[j][h] for j in range(i + 1)]).sum(0))
        rows.append(a.out(torch.cat(heads)))
    return torch.stack(rows)


@formula(MTLA)
def mtla(a: MTLA, x: Tensor, prefix: Tensor | None = None, turn: Turn = half_split) -> Tensor:
    """MLA over running sums of gated latents in chunks (MTLA paper, section 4); x (T, d), prefix (S, d)."""
    s = a.stride
    c, kp = _latents(a, x, prefix, turn)
    m = []
    for i in range(len(c)):
        angles = [i // s * 10000 ** (-2 * k / a.latent_dim) for k in range(a.latent_dim // 2)]
        slot_gate = a.gate_slot(torch.tensor([f(b) for b in angles for f in (math.sin, math.cos)], dtype=x.dtype))
        chunk = range(i // s * s, i + 1)
        m.append(torch.stack([torch.sigmoid(slot_gate @ a.gate_latent(c[j])) * c[j] for j in chunk]).sum(0))
    visible = [[j for j in range(i + 1) if (j + 1) % s == 0 or j == i] for i in range(len(c))]
    assert all(len(v) == math.ceil((i + 1) / s) for i, v in enumerate(visible))
    return _read_latents(a, x, prefix, turn, m, kp, visible)


@formula(MTLAWindow)
def mtla_window(a: MTLAWindow, x: Tensor, prefix: Tensor | None = None, turn: Turn = half_split) -> Tensor:
    """MLA over first positions, means of old chunks, and other positions as they are; x (T, d), prefix (S, d)."""
    s, begin = a.stride, a.first
    c, kp = _latents(a, x, prefix, turn)
    latents, rotary = list(c), list(kp)
    chunks = range(max(0, len(c) - begin) // s)
    for k in chunks:
        angles = [k * 10000 ** (-2 * m / a.latent_dim) for m in range(a.latent_dim // 2)]
        slot_gate = a.gate_slot(torch.tensor([f(b) for b in angles for f in (math.sin, math.cos)], dtype=x.dtype))
        inside = [c[begin + k * s + j] for j in range(s)]
        gates = torch.stack([torch.sigmoid(slot_gate @ a.gate_latent(v)) for v in inside])
        latents.append(torch.stack([g * v for g, v in zip(gates, inside, strict=True)]).sum(0) / gates.sum())
        rotary.append(kp[begin + k * s + s - 1])
    visible = []
    for i in range(len(c)):
        merged = [k for k in chunks if begin + k * s + s - 1 <= i - a.recent]
        old = begin + len(merged) * s
        visible.append([j for j in range(i + 1) if j < begin or j >= old] + [len(c) + k for k in merged])
    return _read_latents(a, x, prefix, turn, latents, rotary, visible)


def _latents(a: MLA, x: Tensor, prefix: Tensor | None, turn: Turn) -> tuple[list[Tensor], list[Tensor]]:
    joint = x if prefix is None else torch.cat((prefix, x))
    down = [a.down(v) for v in joint]
    rotary = [turn(v[a.latent_dim :], j, base(a)) for j, v in enumerate(down)]
    return [a.norm(v[: a.latent_dim]) for v in down], rotary


def _read_latents(
    a: MLA, x: Tensor, prefix: Tensor | None, turn: Turn, m: list[Tensor], kp: list[Tensor], visible: list[list[int]]
) -> Tensor:
    start = 0 if prefix is None else len(prefix)
    up_keys, up_values = a.up_matrices()
    rows = []
    for i in range(start, start + len(x)):
        q = a.query(x[i - start]).view(a.num_heads, a.head_dim + a.rope_dim)
        heads = []
        for h in range(a.num_heads):
            content, rotary = q[h, : a.head_dim], turn(q[h, a.head_dim :], i, base(a))
            logits = torch.stack([(up_keys[h].T @ content) @ m[j] + rotary @ kp[j] for j in visible[i]])
            p = torch.softmax(logits / math.sqrt(a.head_dim + a.rope_dim), 0)
            heads.append(up_values[h] @ torch.stack([p[n] * m[j] for n, j in enumerate(visible[i])]).sum(0))
        rows.append(a.out(torch.cat(heads)))
    return torch.stack(rows)

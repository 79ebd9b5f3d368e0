"""Attention straight from the equations: one row at a time, one query at a time, no shortcut.  Slow on purpose.

Each function takes a module for its weights, x (T, d) of one row, and its prompt (S, d) or None -> (T, d).
"""

import math

import torch
from torch import Tensor

from src.attention import MHA, MLA, MTLA


def turn(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotary embedding of one vector: component m and m + D/2 turn by position * theta^(-2m/D)."""
    half = x.shape[-1] // 2
    out = x.clone()
    for m in range(half):
        angle = position * theta ** (-2 * m / x.shape[-1])
        out[m] = x[m] * math.cos(angle) - x[m + half] * math.sin(angle)
        out[m + half] = x[m + half] * math.cos(angle) + x[m] * math.sin(angle)
    return out


def mha(a: MHA, x: Tensor, prompt: Tensor | None = None) -> Tensor:
    start = 0 if prompt is None else len(prompt)
    joint = x if prompt is None else torch.cat((prompt, x))
    rows = []
    for t in range(len(x)):
        i, heads = start + t, []
        for h in range(a.num_heads):
            g = h * a.num_kv_heads // a.num_heads
            q = turn(a.query(joint[i])[h * a.head_dim :][: a.head_dim], i, a.rope_theta)
            keys = [turn(a.key(joint[j])[g * a.head_dim :][: a.head_dim], j, a.rope_theta) for j in range(i + 1)]
            values = [a.value(joint[j])[g * a.head_dim :][: a.head_dim] for j in range(i + 1)]
            p = torch.softmax(torch.stack([q @ k for k in keys]) * a.head_dim**-0.5, 0)
            heads.append(sum(p[j] * values[j] for j in range(i + 1)))
        rows.append(a.out(torch.cat(heads)))
    return torch.stack(rows)


def latent(a: MLA, x: Tensor, prompt: Tensor | None = None) -> Tensor:
    """MLA and MTLA (spec 1.3, 1.4): absorbed logits over the visible latents, or running sums of gated latents."""
    start = 0 if prompt is None else len(prompt)
    joint = x if prompt is None else torch.cat((prompt, x))
    total = len(joint)
    down = [a.down(v) for v in joint]
    c = [a.norm(v[: a.latent_dim]) for v in down]
    kp = [turn(v[a.latent_dim :], j, a.rope_theta) for j, v in enumerate(down)]
    if isinstance(a, MTLA):
        s = a.stride
        m = []
        for i in range(total):
            total_sum = torch.zeros_like(c[0])
            for j in range(i // s * s, i + 1):
                pe = torch.tensor(
                    [f(i // s * 10000 ** (-2 * k / a.latent_dim)) for k in range(a.latent_dim // 2) for f in (math.sin, math.cos)],
                    dtype=x.dtype,
                )
                total_sum = total_sum + torch.sigmoid(a.gate_slot(pe) @ a.gate_latent(c[j])) * c[j]
            m.append(total_sum)
        visible = [[j for j in range(i + 1) if (j + 1) % s == 0 or j == i] for i in range(total)]
        assert all(len(v) == math.ceil((i + 1) / s) for i, v in enumerate(visible))
    else:
        m, visible = c, [list(range(i + 1)) for i in range(total)]
    up = a.up.weight.view(a.num_heads, 2 * a.head_dim, a.latent_dim)
    rows = []
    for t in range(len(x)):
        i, heads = start + t, []
        q_all = a.query(joint[i]).view(a.num_heads, a.head_dim + a.rope_dim)
        for h in range(a.num_heads):
            uk, uv = up[h, : a.head_dim], up[h, a.head_dim :]
            qn, qp = q_all[h, : a.head_dim], turn(q_all[h, a.head_dim :], i, a.rope_theta)
            logits = torch.stack([(uk.T @ qn) @ m[j] + qp @ kp[j] for j in visible[i]])
            p = torch.softmax(logits * (a.head_dim + a.rope_dim) ** -0.5, 0)
            heads.append(uv @ sum(p[n] * m[j] for n, j in enumerate(visible[i])))
        rows.append(a.out(torch.cat(heads)))
    return torch.stack(rows)


def attend(a: torch.nn.Module, x: Tensor, prompt: Tensor | None = None) -> Tensor:
    return mha(a, x, prompt) if isinstance(a, MHA) else latent(a, x, prompt)  # type: ignore[arg-type]

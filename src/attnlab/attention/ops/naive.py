"""Reference implementations of all mechanisms from the papers' equations: slow, one row, query and head at a time.

`attend(module, x, prefix)`: the module for its weights, x (T, d) of one row, its prefix (S, d) or None -> (T, d).
Every mechanism has its formula here, written from the paper, not from the fast code. A formula belongs to exactly the
classes that it is registered for: a subclass computes something else, and needs another.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .. import (
    GLA,
    GTA,
    MFA,
    MHA,
    MLA,
    MLRA,
    MTLA,
    TPA,
    AbsoluteMultiLinear,
    Attention,
    Llama3Scaling,
    MLAQueryLatent,
    MLAWindow,
    MTLAWindow,
    RelativeMultiLinear,
    SlidingWindow,
    SummedMultiLinear,
    TiedMultiLinear,
    TPAKVOnly,
    TPANonContextualA,
    TPANonContextualB,
    TPASharedB,
)
from ..multilinear import MultiLinear

Turn = Callable[..., Tensor]  # (x, position, theta) -> x turned
Formula = Callable[..., Tensor]
F = TypeVar("F", bound=Formula)
FORMULAS: dict[type[Attention], Formula] = {}


def half_split(x: Tensor, position: int, theta: float | Tensor, scaling: Llama3Scaling | None = None) -> Tensor:
    """Rotate components m and m + D/2 by position * theta^(-2m/D), with Llama's sign.

    `x`: (..., D); `position`: of the token, from 0; `theta`: base of the frequencies, or the frequencies, (D/2,);
    `scaling`: Llama 3.1's rule for them, or None.
    """
    u, v = x.chunk(2, dim=-1)
    cos, sin = _circle(x, position, theta, scaling)
    return torch.cat((u * cos - v * sin, u * sin + v * cos), -1)


def adjacent(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotation in the MTLA code: pairs of components 2m and 2m + 1.

    `x`: (..., D); `position`: of the token, from 0; `theta`: base of the frequencies.
    """
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = _circle(x, position, theta)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def opposite(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotation in T6: half-split pairs in the opposite direction.

    `x`: (..., D); `position`: of the token, from 0; `theta`: base of the frequencies.
    """
    return half_split(x, -position, theta)


def _circle(
    x: Tensor, position: int, theta: float | Tensor, scaling: Llama3Scaling | None = None
) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    frequencies = (
        theta.tolist() if isinstance(theta, Tensor) else [theta ** (-2 * m / width) for m in range(width // 2)]
    )
    angles = [position * _scaled(frequency, scaling) for frequency in frequencies]
    return tuple(torch.tensor([f(a) for a in angles], dtype=x.dtype) for f in (math.cos, math.sin))  # type: ignore[return-value]


def _scaled(frequency: float, scaling: Llama3Scaling | None) -> float:
    """Llama 3.1's rule: low frequencies are divided, high ones are unchanged, and those between are interpolated."""
    if scaling is None:
        return frequency
    wavelength, length = 2 * math.pi / frequency, scaling.original_max_position_embeddings
    if wavelength < length / scaling.high_freq_factor:
        return frequency
    if wavelength > length / scaling.low_freq_factor:
        return frequency / scaling.factor
    smooth = length / wavelength - scaling.low_freq_factor
    smooth /= scaling.high_freq_factor - scaling.low_freq_factor
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def base(a: MHA | MLA | TPA) -> float | Tensor:
    """The `theta` of a :data:`Turn`: the base of a mechanism's frequencies, or the frequencies, (D/2,)."""
    return a.frequencies if a.rope_theta is None else a.rope_theta


def formula(*mechanisms: type[Attention]) -> Callable[[F], F]:
    """Decorator that registers the naive form of the given classes, but not of their subclasses."""

    def register(function: F) -> F:
        FORMULAS.update(dict.fromkeys(mechanisms, function))
        return function

    return register


def attend(a: Attention, x: Tensor, prefix: Tensor | None = None, turn: Turn = half_split) -> Tensor:
    """The naive form of a mechanism, (T, d).

    Args:
        x: text of one row, (T, d).
        prefix: prefix of the row, (S, d), or None.

    Raises:
        LookupError: the class of `a` has no formula.
    """
    kind = type(a)
    if kind not in FORMULAS:
        inherited = [base.__name__ for base in kind.__mro__ if base in FORMULAS]
        hint = f" (that of {inherited[0]} is not inherited)" if inherited else ""
        raise LookupError(f"{kind.__name__} has no naive form{hint}: write its formula in attention/ops/naive.py")
    if isinstance(a, MultiLinear):
        return FORMULAS[kind](a, x, prefix)
    return FORMULAS[kind](a, x, prefix, turn)


# --- keys and values of every head ----------------------------------------------------------------------------------


@formula(MHA)
def mha(a: MHA, x: Tensor, prefix: Tensor | None = None, turn: Turn = half_split) -> Tensor:
    """Softmax over all positions up to the query; x (T, d), prefix (S, d) first (MTLA paper, section 3)."""
    start = 0 if prefix is None else len(prefix)
    return read_keys(a, x, prefix, turn, [list(range(i + 1)) for i in range(start + len(x))])


@formula(SlidingWindow)
def sliding_window(a: SlidingWindow, x: Tensor, prefix: Tensor | None = None, turn: Turn = half_split) -> Tensor:
    """MHA over the prefix, the sinks and the `window` newest text positions; x (T, d), prefix (S, d)."""
    return read_keys(a, x, prefix, turn, window(a, x, prefix))


def window(a: SlidingWindow | MLAWindow, x: Tensor, prefix: Tensor | None) -> list[list[int]]:
    """Positions of prefix and text that each position sees; x (T, d), prefix (S, d)."""
    start = 0 if prefix is None else len(prefix)
    return [[j for j in range(i + 1) if j < start + a.sinks or i - j < a.window] for i in range(start + len(x))]


def read_keys(a: MHA, x: Tensor, prefix: Tensor | None, turn: Turn, visible: list[list[int]]) -> Tensor:
    """Softmax of each text position over its visible positions of prefix and text; x (T, d), prefix (S, d)."""

    def normed(v: Tensor, norm: nn.Module) -> Tensor:
        if not isinstance(norm, nn.RMSNorm):
            return v
        assert norm.eps is not None
        return norm.weight * v / torch.sqrt((v * v).mean(-1, keepdim=True) + norm.eps)

    def turned(v: Tensor, norm: nn.Module, heads: int, position: int) -> Tensor:
        scaled = {} if a.rope_scaling is None else {"scaling": a.rope_scaling}
        vector = normed(v.view(heads, a.head_dim), norm)
        return torch.cat((turn(vector[:, : a.turned], position, base(a), **scaled), vector[:, a.turned :]), -1)

    joint = x if prefix is None else torch.cat((prefix, x))
    q = [turned(a.query(v), a.query_norm, a.num_heads, i) for i, v in enumerate(joint)]
    k = [turned(a.key(v), a.key_norm, a.num_kv_heads, i) for i, v in enumerate(joint)]
    v = [a.value(v).view(a.num_kv_heads, a.head_dim) for v in joint]
    rows = []
    for i in range(len(joint) - len(x), len(joint)):
        heads = []
        for h in range(a.num_heads):
            g = h * a.num_kv_heads // a.num_heads
            logits = torch.stack([q[i][h] @ k[j][g] for j in visible[i]])
            p = torch.softmax(logits / math.sqrt(a.head_dim), 0)
            heads.append(torch.stack([p[n] * v[j][g] for n, j in enumerate(visible[i])]).sum(0))
        rows.append(a.out(torch.cat(heads)))
    return torch.stack(rows)


@formula(GTA)
def gta(a: GTA, x: Tensor, prefix: Tensor | None = None, turn: Turn = half_split) -> Tensor:
    """Keys of a rotary part, which all groups share, and of values of their group; x (T, d), prefix (S, d)."""
    joint = x if prefix is None else torch.cat((prefix, x))
    keys, values = [], []
    for j, v in enumerate(joint):
        tied, rotary = a.down(v).split([a.num_kv_heads * a.head_dim, a.rope_dim])
        tied = tied.view(a.num_kv_heads, a.head_dim)
        keys.append([torch.cat((turn(rotary, j, base(a)), of[: a.head_dim - a.rope_dim])) for of in tied])
        values.append(tied)
    rows = []
    for i in range(len(joint) - len(x), len(joint)):
        heads = []
        for h, q in enumerate(a.query(joint[i]).view(a.num_heads, a.head_dim)):
            g = h * a.num_kv_heads // a.num_heads
            turned = torch.cat((turn(q[: a.rope_dim], i, base(a)), q[a.rope_dim :]))
            p = torch.softmax(torch.stack([turned @ keys[j][g] for j in range(i + 1)]) / math.sqrt(a.head_dim), 0)
            heads.append(torch.stack([p[j] * values[j][g] for j in range(i + 1)]).sum(0))
        rows.append(a.out(torch.cat(heads)))
    return torch.stack(rows)


@formula(MFA)
def mfa(a: MFA, x: Tensor, prefix: Tensor | None = None, turn: Turn = half_split) -> Tensor:
    """Queries by two matrices and a norm, one key and one value head; x (T, d), prefix (S, d)."""
    joint = x if prefix is None else torch.cat((prefix, x))
    down, norm, up = a.query.children()
    keys = [a.key(v) for v in joint]
    values = [key + a.share * (a.value.weight @ key) for key in keys] if a.reuse else [a.value(v) for v in joint]
    keys = [turn(key, j, base(a)) for j, key in enumerate(keys)]
    rows = []
    for i in range(len(joint) - len(x), len(joint)):
        factor = down(joint[i])
        factor = norm.weight * factor / torch.sqrt((factor * factor).mean() + 1e-6)
        heads = []
        for q in up(factor).view(a.num_heads, a.head_dim):
            turned = turn(q, i, base(a))
            p = torch.softmax(torch.stack([turned @ keys[j] for j in range(i + 1)]) / math.sqrt(a.head_dim), 0)
            heads.append(torch.stack([p[j] * values[j] for j in range(i + 1)]).sum(0))
        rows.append(a.out(torch.cat(heads)))
    return torch.stack(rows)


# --- latents that all heads read ------------------------------------------------------------------------------------


@formula(MLA)
def mla(a: MLA, x: Tensor, prefix: Tensor | None = None, turn: Turn = half_split) -> Tensor:
    """Absorbed logits over the latents of all earlier positions, x (T, d), prefix (S, d) (MTLA paper, section 3.2)."""
    c, kp = latents(a, x, prefix, turn)
    return read_latents(a, x, prefix, turn, c, kp, [list(range(i + 1)) for i in range(len(c))])


@formula(MLAWindow)
def mla_window(a: MLAWindow, x: Tensor, prefix: Tensor | None = None, turn: Turn = half_split) -> Tensor:
    """MLA over the prefix, the sinks and the `window` newest text positions; x (T, d), prefix (S, d)."""
    c, kp = latents(a, x, prefix, turn)
    return read_latents(a, x, prefix, turn, c, kp, window(a, x, prefix))


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
    c, kp = latents(a, x, prefix, turn)
    m = merged(a, c)
    visible = [[j for j in range(i + 1) if (j + 1) % s == 0 or j == i] for i in range(len(c))]
    assert all(len(v) == math.ceil((i + 1) / s) for i, v in enumerate(visible))
    return read_latents(a, x, prefix, turn, m, kp, visible)


def merged(a: MTLA, c: list[Tensor]) -> list[Tensor]:
    """The running sum of the gated latents c (r,) in each position's chunk."""
    s, m = a.stride, []
    for i in range(len(c)):
        angles = [i // s * 10000 ** (-2 * k / a.latent_dim) for k in range(a.latent_dim // 2)]
        slot_gate = a.gate_slot(torch.tensor([f(b) for b in angles for f in (math.sin, math.cos)], dtype=c[0].dtype))
        chunk = range(i // s * s, i + 1)
        m.append(torch.stack([torch.sigmoid(slot_gate @ a.gate_latent(c[j])) * c[j] for j in chunk]).sum(0))
    return m


@formula(MTLAWindow)
def mtla_window(a: MTLAWindow, x: Tensor, prefix: Tensor | None = None, turn: Turn = half_split) -> Tensor:
    """MLA over first positions, means of old chunks, and other positions unmerged; x (T, d), prefix (S, d)."""
    s, begin = a.stride, a.first
    c, kp = latents(a, x, prefix, turn)
    every, rotary = list(c), list(kp)
    chunks = range(max(0, len(c) - begin) // s)
    for k in chunks:
        angles = [k * 10000 ** (-2 * m / a.latent_dim) for m in range(a.latent_dim // 2)]
        slot_gate = a.gate_slot(torch.tensor([f(b) for b in angles for f in (math.sin, math.cos)], dtype=x.dtype))
        inside = [c[begin + k * s + j] for j in range(s)]
        gates = torch.stack([torch.sigmoid(slot_gate @ a.gate_latent(v)) for v in inside])
        every.append(torch.stack([g * v for g, v in zip(gates, inside, strict=True)]).sum(0) / gates.sum())
        rotary.append(kp[begin + k * s + s - 1])
    visible = []
    for i in range(len(c)):
        merged = [k for k in chunks if begin + k * s + s - 1 <= i - a.recent]
        old = begin + len(merged) * s
        visible.append([j for j in range(i + 1) if j < begin or j >= old] + [len(c) + k for k in merged])
    return read_latents(a, x, prefix, turn, every, rotary, visible)


def latents(a: MLA, x: Tensor, prefix: Tensor | None, turn: Turn) -> tuple[list[Tensor], list[Tensor]]:
    """Latents (r,) and rotary keys (d_r,) of each position, prefix (S, d) first; x (T, d)."""
    joint = x if prefix is None else torch.cat((prefix, x))
    down = [a.down(v) for v in joint]
    rotary = [turn(v[a.latent_dim :], j, base(a)) for j, v in enumerate(down)]
    return [a.norm(v[: a.latent_dim]) for v in down], rotary


def read_latents(
    a: MLA, x: Tensor, prefix: Tensor | None, turn: Turn, m: list[Tensor], kp: list[Tensor], visible: list[list[int]]
) -> Tensor:
    """Softmax of x (T, d) over the latents `m` and rotary keys `kp` that each position sees; prefix (S, d)."""
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


@formula(GLA, MLRA)
def grouped_latents(a: GLA, x: Tensor, prefix: Tensor | None = None, turn: Turn = half_split) -> Tensor:
    """Each branch of a head has its latent, its matrices and its softmax; x (T, d), prefix (S, d)."""

    def normed(v: Tensor, norm: nn.Module) -> Tensor:
        return norm.weight * v / torch.sqrt((v * v).mean() + 1e-6) if isinstance(norm, nn.RMSNorm) else norm(v)

    def scaled(v: Tensor) -> Tensor:
        return v * math.sqrt(a.d_model / len(v)) if a.scaled else v

    joint = x if prefix is None else torch.cat((prefix, x))
    latents, width = a.groups * a.branches, a.latent_dim // (a.groups * a.branches)
    norms, c, rotary = list(a.norm.children()), [], []
    for j, v in enumerate(joint):
        down = a.down(v)
        c.append([scaled(normed(down[m * width : (m + 1) * width], norms[m])) for m in range(latents)])
        rotary.append(turn(down[a.latent_dim :], j, base(a)))
    ups = a.up.weight.view(latents, a.num_heads // a.groups, 2, a.head_dim, width)  # [value, key] of a latent's heads
    rows = []
    for i in range(len(joint) - len(x), len(joint)):
        if a.query_latent_dim is None:
            q = a.query(joint[i])
        else:
            down, norm, up = a.query.children()
            q = up(scaled(normed(down(joint[i]), norm)))
        heads = []
        for h, vector in enumerate(q.view(a.num_heads, -1)):
            content, turned = vector[: a.head_dim], turn(vector[a.head_dim :], i, base(a))
            g, place = divmod(h, a.num_heads // a.groups)
            total = torch.zeros(a.head_dim, dtype=x.dtype)
            for m in range(g, latents, a.groups):  # one for each branch
                up_value, up_key = ups[m, place]
                logits = torch.stack([content @ (up_key @ c[j][m]) + turned @ rotary[j] for j in range(i + 1)])
                p = torch.softmax(logits / math.sqrt(a.head_dim + a.rope_dim), 0)
                total = total + torch.stack([p[j] * (up_value @ c[j][m]) for j in range(i + 1)]).sum(0)
            heads.append(total / math.sqrt(a.branches))
        rows.append(a.out(torch.cat(heads)))
    return torch.stack(rows)


# --- queries, keys and values that are sums of outer products -------------------------------------------------------


@formula(TPA, TPAKVOnly, TPANonContextualA, TPANonContextualB, TPASharedB)
def tpa(a: TPA, x: Tensor, prefix: Tensor | None = None, turn: Turn = half_split) -> Tensor:
    """Q, K and V as sums of outer products (TPA paper, eq. 3.1 to 3.5, section 3.5); x (T, d), prefix (S, d)."""
    joint = x if prefix is None else torch.cat((prefix, x))
    qkv = [_tensor_products(a, v, t, turn) for t, v in enumerate(joint)]
    rows = []
    for i in range(len(joint) - len(x), len(joint)):
        heads = []
        for h in range(a.num_heads):
            logits = torch.stack([qkv[i][0][h] @ qkv[j][1][h] for j in range(i + 1)])
            p = torch.softmax(logits / math.sqrt(a.head_dim), 0)
            head = torch.stack([p[j] * qkv[j][2][h] for j in range(i + 1)]).sum(0)
            if isinstance(a.norm, nn.RMSNorm):
                head = a.norm.weight * head / torch.sqrt((head * head).mean() + 1e-5)
            heads.append(head)
        rows.append(a.out(torch.cat(heads)))
    return torch.stack(rows)


def _tensor_products(a: TPA, x: Tensor, position: int, turn: Turn) -> list[Tensor]:
    """Q_t, K_t and V_t, each (h, D), of x (d,)."""
    ranks = {"q": a.q_rank, "k": a.rank, "v": a.rank}
    projected, used = a.factors(x), 0

    def take(source: str, width: int) -> list[Tensor]:
        """The next factors, in the order of the projection's rows."""
        nonlocal used
        used += ranks[source] * width
        return [projected[used - (ranks[source] - r) * width :][:width] for r in range(ranks[source])]

    def learned(rows: Tensor) -> dict[str, list[Tensor]]:
        split = rows.split([ranks[source] for source in "qkv"])
        return {source: list(part) for source, part in zip("qkv", split, strict=True)}

    if isinstance(a, TPANonContextualA):
        head = learned(a.head_factors)
    else:
        head = {source: take(source, a.num_heads) for source in "qkv"}
    if a.nonlinearity == "sigmoid":
        head = {source: [1 / (1 + torch.exp(-v)) for v in factors] for source, factors in head.items()}
    elif a.nonlinearity == "softmax":
        head = {source: [torch.exp(v) / torch.exp(v).sum() for v in factors] for source, factors in head.items()}
    if isinstance(a, TPANonContextualB):
        token = learned(a.token_factors)
    else:
        sources = "qk" if isinstance(a, TPASharedB) else "qkv"
        token = {source: take(source, a.turned) for source in sources}
        third = {source: take(source, a.third_dim) for source in sources} if a.third_dim else {}
        if isinstance(a, TPASharedB):
            token["v"], third["v"] = token["k"], third.get("k", [])

    outputs = []
    for source in "qkv":
        total = torch.zeros(a.num_heads, a.head_dim, dtype=x.dtype)
        for r in range(ranks[source]):
            b = token[source][r] if source == "v" else turn(token[source][r], position, base(a))
            if a.third_dim:
                b = torch.cat([component * b for component in third[source][r]])  # vec of the outer product
            total = total + torch.outer(head[source][r], b) / ranks[source]
        if source == "q" and isinstance(a, TPAKVOnly):
            blocks = a.query(x).view(a.num_heads, -1, a.turned)
            total = turn(blocks, position, base(a)).flatten(1)
        outputs.append(total)
    return outputs


# --- no softmax: products of three factors --------------------------------------------------------------------------


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
    """Slices A_i.. over the positions of the window, read out, times N / (i + 1); x (T, d), prefix (S, d)."""
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
    """Mean over the pairs of the prefix, and of the text up to the query; x (T, d), prefix (S, d)."""
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
    """Core of each read-out: g, or exp(g_r) / sum_s exp(g_s)."""
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

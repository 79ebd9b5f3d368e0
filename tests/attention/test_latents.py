"""GTA, MFA, GLA and MLRA: the released computations, options beside the configured ones, special cases, refusals."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from attnlab.attention import GLA, GTA, MFA, MLA, MLRA, Attention
from attnlab.attention.ops.naive import half_split
from tests.attention.mechanisms import check_equations, error

RMS = torch.tensor(1e-6, dtype=torch.float64)


def drawn(attention: Attention, seed: int = 0) -> Any:
    """The module in float64 with weights that make the softmax choose and every norm count."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in attention.double().parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        wide = parameter.dim() > 1
        parameter.data = noise * 1.3 / parameter.shape[-1] ** 0.5 if wide else 1 + 0.3 * noise
    return attention.eval()


def rotated(x: Tensor, theta: float = 10000.0) -> Tensor:
    """(B, T, H, D) -> rotated by position."""
    return torch.stack([half_split(x[:, t], t, theta) for t in range(x.shape[1])], 1)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x * (x.square().mean(-1, keepdim=True) + RMS).rsqrt()


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of (B, T, H, .)."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def released_latents(a: Any, x: Tensor) -> Tensor:
    """As the code of MLRA computes MLRA-2, MLRA-4 and GLA: keys and values of each branch, summed outputs."""
    total, groups, heads = a.groups * a.branches, a.groups, a.num_heads
    width = a.latent_dim // total
    down, norm, up = a.query
    q = up(normed(down(x), norm.weight) * (a.d_model / a.query_latent_dim) ** 0.5).unflatten(-1, (heads, -1))
    content, q_rotary = q.split([a.head_dim, a.rope_dim], -1)
    q = torch.cat((content, rotated(q_rotary)), -1)
    *latents, k_rotary = a.down(x).split([width] * total + [a.rope_dim], -1)
    k_rotary = rotated(k_rotary.unsqueeze(2)).expand(-1, -1, heads, -1)
    scaled = [normed(c, norm.weight) * (a.d_model / width) ** 0.5 for c, norm in zip(latents, a.norm, strict=True)]
    matrices = a.up.weight.unflatten(0, (total, -1))
    both = [(c @ m.T).unflatten(-1, (heads // groups, 2, -1)) for c, m in zip(scaled, matrices, strict=True)]
    y = torch.zeros(*x.shape[:2], heads, a.head_dim, dtype=x.dtype)
    for branch in range(a.branches):
        value, key = torch.cat(both[branch * groups : (branch + 1) * groups], 2).unbind(3)
        y = y + dense(q, torch.cat((key, k_rotary), -1), value) * a.branches**-0.5
    return a.out(y.flatten(2))


def released_tied(a: GTA, x: Tensor) -> Tensor:
    """As both codes compute GTA: the rotary halves of queries and keys come last."""
    tied, rotary = a.down(x).split([a.num_kv_heads * a.head_dim, a.rope_dim], -1)
    value = tied.unflatten(-1, (a.num_kv_heads, -1)).repeat_interleave(a.num_heads // a.num_kv_heads, 2)
    q = a.query(x).unflatten(-1, (a.num_heads, -1)).roll(-a.rope_dim, -1)
    content, q_rotary = q.split([a.head_dim - a.rope_dim, a.rope_dim], -1)
    key = [value[..., : a.head_dim - a.rope_dim], rotated(rotary.unsqueeze(2)).expand(-1, -1, a.num_heads, -1)]
    return a.out(dense(torch.cat((content, rotated(q_rotary)), -1), torch.cat(key, -1), value).flatten(2))


@pytest.mark.parametrize(
    ("attention", "released"),
    [
        (GLA(32, 4, groups=2, query_latent_dim=12, scaled=True), released_latents),
        (GLA(32, 4, groups=4, query_latent_dim=12, scaled=True), released_latents),
        (MLRA(32, 4, branches=2, query_latent_dim=12), released_latents),
        (MLRA(32, 4, branches=4, query_latent_dim=12), released_latents),
        (GTA(32, 4, 2), released_tied),
    ],
    ids=["gla-2", "gla-4", "mlra-2", "mlra-4", "gta"],
)
def test_the_released_computation(attention: Attention, released: Any) -> None:
    attention = drawn(attention)
    x = torch.randn(2, 7, 32, dtype=torch.float64, requires_grad=True)
    y, want = attention(x), released(attention, x)
    assert error(y, want) < 1e-12
    g, inputs = torch.randn_like(y), [x, *attention.parameters()]
    for got, exact in zip(torch.autograd.grad(y, inputs, g), torch.autograd.grad(want, inputs, g), strict=True):
        assert error(got, exact) < 1e-11


@pytest.mark.parametrize(
    "attention",
    [
        GTA(32, 4),
        GTA(32, 4, 1, rope_dim=8),
        GTA(32, 4, 2, head_dim=6, rope_dim=2),
        GTA(32, 4, 2, rope_dim=0),
        GTA(32, 4, 2, rope_theta=None),
        MFA(32, 4, query_dim=5),
        MFA(32, 5, head_dim=12, reuse=True, rope_theta=None),
        GLA(32, 4, groups=1, norm="layer"),
        GLA(32, 4, groups=4, latent_dim=12, norm="none", rope_dim=0),
        GLA(32, 6, head_dim=6, rope_dim=4, groups=3, latent_dim=9, query_latent_dim=5, scaled=True, rope_theta=None),
        MLRA(32, 4, branches=1, latents=2),
        MLRA(32, 3, head_dim=4, branches=3, latents=3, latent_dim=9, scaled=False),
        MLRA(32, 4, branches=2, latents=8, rope_dim=2, query_latent_dim=7),
    ],
    ids=lambda attention: f"{type(attention).__name__}({attention.extra_repr().partition(', dropout')[0]})",
)
def test_other_options_equal_the_equations(attention: Attention) -> None:
    check_equations(drawn(attention), 4, torch.tensor([3, 0, 1]), [[1] * 4, [2, 1, 1], [4]])


def test_special_cases_are_each_other() -> None:
    x = torch.randn(2, 6, 32, dtype=torch.float64)
    mla, gla = drawn(MLA(32, 4, norm="rms")), drawn(GLA(32, 4, groups=1))
    gla.load_state_dict({name.replace("norm.", "norm.0."): value for name, value in mla.state_dict().items()})
    assert error(gla(x), mla(x)) < 1e-12
    grouped, branch = drawn(GLA(32, 4, groups=4, scaled=True)), drawn(MLRA(32, 4, branches=1))
    branch.load_state_dict(grouped.state_dict())
    assert error(branch(x), grouped(x)) < 1e-12


def test_values_start_as_keys_where_they_are_reused() -> None:
    assert not MFA(32, 4, reuse=True).share.any()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: GLA(32, 4, groups=3), "^groups=3: expected 3 groups that divide num_heads=4"),
        (lambda: GLA(32, 4, groups=0), "^groups=0: expected"),
        (lambda: GLA(32, 4, groups=8), "^groups=8: expected"),
        (lambda: GLA(32, 4, groups=2, latent_dim=7), "latent_dim=7"),
        (lambda: GLA(32, 4, latent_dim=65), "^latent_dim=65: expected 1 to 64"),
        (lambda: MLRA(32, 4, branches=3), "^branches=3: expected a divisor of latents=4"),
        (lambda: MLRA(32, 4, branches=0), "^branches=0"),
        (lambda: MLRA(32, 4, latents=0), "expected a divisor of latents=0"),
        (lambda: MLRA(32, 4, branches=2, latents=6), "^latents=6: expected 3 groups"),
        (lambda: MLRA(32, 4, latent_dim=6), "latent_dim=6"),
        (lambda: GTA(32, 4, 3), "^num_kv_heads must divide num_heads"),
        (lambda: GTA(32, 4, 2, rope_dim=3), "^rope_dim=3: expected an even number"),
        (lambda: GTA(32, 4, 2, rope_dim=10), "^rope_dim=10: expected an even number up to head_dim=8"),
        (lambda: MFA(32, 4, head_dim=5), "^head_dim must be even"),
        (lambda: MFA(32, 4, query_dim=0), "^query_dim=0: expected at least 1"),
        (lambda: GLA(32, 4, query_latent_dim=0), "^query_latent_dim=0: expected at least 1"),
    ],
)
def test_sizes_that_do_not_fit(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        build()
    assert "\n" not in str(refusal.value)

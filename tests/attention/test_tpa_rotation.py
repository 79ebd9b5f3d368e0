"""Theorem 1 of the TPA paper: with rotated token factors, logits depend on differences of positions alone.

Values of `tpa_shared_b` share token factors with keys and are not rotated: the outputs of a later start show it.
"""

import pytest
import torch
from torch import Tensor

from attnlab.attention import TPA
from attnlab.attention.ops.rope import rotate
from attnlab.attention.positional import Angles
from tests.attention.mechanisms import Mechanism, error, extend_by
from tests.attention.test_tpa import NAMES, random

THIRD = ("attention.third_dim=2",)
FORMS = [(name, options) for name in NAMES for options in ((), THIRD) if name != "tpa_noncontextual_b" or not options]
LENGTH = 6


def build(name: str, options: tuple[str, ...] = ()) -> TPA:
    attention = Mechanism(name).build(*options)
    assert isinstance(attention, TPA)
    return attention


def angles(attention: TPA, x: Tensor, first: int) -> Angles:
    """Of as many positions as x has, from `first` on."""
    cos, sin = attention.rotary_table(first + x.shape[1], x)
    return cos[None, first:], sin[None, first:]


def built(attention: TPA, x: Tensor, at: Angles) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (B, T, h, D) as the layer builds them; queries hold the scale of the logits."""
    query, packed = attention.dense(attention.rotated_factors(at, *attention.project(x)))
    value, key = packed.split(attention.head_dim, -1)
    return query * attention.scale, key, value


def products(query: Tensor, key: Tensor) -> Tensor:
    """(B, h, T, T)."""
    return query.transpose(1, 2) @ key.permute(0, 2, 3, 1)


def logits(attention: TPA, x: Tensor, queries_from: int, keys_from: int) -> Tensor:
    query = built(attention, x, angles(attention, x, queries_from))[0]
    return products(query, built(attention, x, angles(attention, x, keys_from))[1])


def turned(attention: TPA, x: Tensor, by: Tensor) -> Tensor:
    """Whole queries or keys (B, T, h, D) turned by positions (T,), by eq. 2.1: each third-order column alone."""
    frequencies = 10000.0 ** (-torch.arange(0, attention.turned, 2, dtype=torch.float64) / attention.turned)
    at = by[:, None, None, None] * frequencies
    return rotate(x.unflatten(-1, (-1, attention.turned)), at.cos(), at.sin()).flatten(-2)


@pytest.mark.parametrize(("name", "options"), FORMS)
def test_rotated_factors_are_rotated_queries_and_keys(name: str, options: tuple[str, ...]) -> None:
    """Eq. 3.7, and RoPE_{t-s}(Q_t) K_s^T = RoPE_t(Q_t) RoPE_s(K_s)^T."""
    attention, x = build(name, options), random(2, LENGTH, 32)
    cos, sin = angles(attention, x, 0)
    query, key, value = built(attention, x, (torch.ones_like(cos), torch.zeros_like(sin)))  # nothing rotated
    positions = torch.arange(5, 5 + LENGTH, dtype=torch.float64)
    got = built(attention, x, angles(attention, x, 5))
    assert error(got[0], turned(attention, query, positions)) < 1e-12
    assert error(got[1], turned(attention, key, positions)) < 1e-12
    assert torch.equal(got[2], value)  # values are not rotated
    result = products(*got[:2])
    for t in range(LENGTH):
        for s in range(LENGTH):
            by = torch.tensor([t - s], dtype=torch.float64)
            want = products(turned(attention, query[:, t : t + 1], by), key[:, s : s + 1])
            assert error(result[..., t, s], want[..., 0, 0]) < 1e-12


@pytest.mark.parametrize(("name", "options"), FORMS)
def test_logits_depend_on_differences_of_positions(name: str, options: tuple[str, ...]) -> None:
    attention, x = build(name, options), random(2, LENGTH, 32)
    want = logits(attention, x, 0, 0)
    for offset in (1, 1000):
        assert error(logits(attention, x, offset, offset), want) < 1e-12
        assert error(logits(attention, x, offset, 0), want) > 1e-3  # the difference of positions does count
        assert error(logits(attention, x, 0, offset), want) > 1e-3


@pytest.mark.parametrize(("name", "options"), FORMS)
def test_a_layer_whose_positions_begin_later(
    name: str, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its outputs with a prefix, in parallel and step by step from the cache, are those of positions 0, 1, ..."""
    attention, x, prefix, lengths = build(name, options), random(2, 5, 32), random(2, 3, 32), torch.tensor([3, 2])
    want, table = attention(x, prefix, prefix_lengths=lengths), attention.rotary_table

    def later(length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = table(length + 1000, like)
        return cos[1000:], sin[1000:]

    monkeypatch.setattr(attention, "rotary_table", later)
    assert error(attention(x, prefix, prefix_lengths=lengths), want) < 1e-12
    cache = attention.new_cache(2, 5, 3)
    attention.read_prefix(prefix, lengths, cache)
    assert error(extend_by(attention, x, cache, [1, 3, 1]), want) < 1e-12

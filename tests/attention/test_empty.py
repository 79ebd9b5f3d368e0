"""One rule for empty input: an empty text gives an empty tensor, and an empty prefix is no prefix."""

import itertools

import pytest
import torch

from attnlab.attention import Attention, Cache
from tests.attention.mechanisms import EVERY, Mechanism, error

every = pytest.mark.parametrize("mechanism", EVERY, ids=str)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, 32, dtype=torch.float64)


@every
def test_forward(mechanism: Mechanism) -> None:
    attention = mechanism.build()
    for shape, size, training in itertools.product([(2, 0), (0, 3), (0, 0)], [None, 0, 4], [False, True]):
        x, prefix = draw(*shape).requires_grad_(), None if size is None else draw(shape[0], size)
        attention.train(training)
        for sizes in (None, torch.full((shape[0],), size or 0)):
            y = attention(x, prefix, lengths=torch.full((shape[0],), shape[1]), prefix_lengths=sizes)
            assert y.shape == x.shape and y.dtype == x.dtype
            y.sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape


@every
def test_extend_by_nothing_changes_nothing(mechanism: Mechanism) -> None:
    attention, x = mechanism.build(), draw(2, 5)
    for size in (None, 0, 4):
        prefix = draw(2, size or 0)
        want, cache = attention(x, prefix), attention.new_cache(2, 5, size or 0)
        if size is not None:
            attention.read_prefix(prefix, None, cache)
        outs = []
        for piece in x.split([1, 2, 2], 1):
            nothing = attention.extend(x[:, :0], cache)
            assert nothing.shape == (2, 0, 32) and nothing.dtype == x.dtype
            outs.append(attention.extend(piece, cache))
        assert attention.extend(x[:, :0], cache).shape == (2, 0, 32)  # also where there is no room for more
        assert error(torch.cat(outs, 1), want) < 1e-12 and cache.length == 5


@every
@pytest.mark.parametrize("ragged", [False, True])
def test_a_cache_without_rows(mechanism: Mechanism, ragged: bool) -> None:
    """Every call on it works, and a batch that loses its last sentence is one."""
    attention = mechanism.build()
    cache = attention.new_cache(0, 6, 4)
    assert cache.nbytes == 0 == attention.cache_elements(0, 6, 4)
    attention.read_prefix(draw(0, 4), torch.zeros(0, dtype=torch.int64) if ragged else None, cache)
    walk_without_rows(attention, cache)

    full = attention.new_cache(4, 6, 4, prefix_batch=2)
    attention.read_prefix(draw(2, 4), torch.tensor([4, 2]) if ragged else None, full)
    attention.extend(draw(4, 1), full)
    full.select(torch.zeros(0, dtype=torch.int64))
    walk_without_rows(attention, full)
    for batch, prefixes in ((2, 0), (0, 2)):
        with pytest.raises(ValueError, match="evenly"):
            attention.new_cache(batch, 4, 4, prefix_batch=prefixes)


def walk_without_rows(attention: Attention, cache: Cache) -> None:
    for new in (1, 2, 1, 0):
        before = cache.length
        assert attention.extend(draw(0, new), cache).shape == (0, new, 32)
        assert cache.length == before + new
        cache.reorder(torch.zeros(0, dtype=torch.int64))
    cache.select(torch.zeros(0, dtype=torch.int64))
    cache.crop(cache.length)
    assert cache.nbytes == 0

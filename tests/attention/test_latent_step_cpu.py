"""Steps in latent space by few kernels, against the same steps as they are computed elsewhere."""

import pytest
import torch
from torch import nn

from attnlab.attention import MLA
from attnlab.attention.mla import LatentCache
from tests.attention.mechanisms import error


def filled(attention: MLA, ragged: bool = False) -> LatentCache:
    cache = attention.new_cache(4, 12, 5, prefix_batch=2)
    rng = torch.Generator().manual_seed(2)
    prefix = torch.randn(2, 5, 32, generator=rng, dtype=torch.float64)
    attention.read_prefix(prefix, torch.tensor([5, 2]) if ragged else None, cache)
    assert isinstance(cache, LatentCache)
    return cache


def plain(cache: LatentCache) -> LatentCache:
    """The cache, whose steps are computed as on other devices."""
    cache.lean_dtype = None
    return cache


def test_a_step_follows_weights_that_change_in_place() -> None:
    torch.manual_seed(0)
    attention = MLA(32, 4).double().eval()
    few, many = filled(attention), plain(filled(attention))
    x = torch.randn(4, 1, 32, dtype=torch.float64)
    for cache in (few, many):
        attention.extend(x, cache)
    with torch.no_grad():
        for module in (attention.query, attention.down, attention.out):
            assert isinstance(module, nn.Linear)
            module.weight.mul_(1.5)
    assert error(attention.extend(x, few), attention.extend(x, many)) < 1e-13


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_as_elsewhere(dtype: torch.dtype) -> None:
    attention = MLA(32, 4).to(dtype).eval()
    cache = attention.new_cache(2, 3)
    assert isinstance(cache, LatentCache)
    assert cache.step(attention, torch.zeros(2, 1, 32, dtype=dtype)) is None

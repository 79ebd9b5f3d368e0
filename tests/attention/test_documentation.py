"""Representations of mechanisms and caches, as Jupyter shows them."""

from attnlab.attention import MTLA


def test_sizes_are_shown() -> None:
    attention = MTLA(d_model=32, num_heads=4, stride=2)
    assert "d_model=32, num_heads=4, stride=2, head_dim=8, rope_dim=4, latent_dim=32" in repr(attention)
    cache = attention.new_cache(2, 8)
    cache.length = 3
    assert repr(cache) == "MTLACache(batch=2, positions=3 of 8, 18 numbers per token, 1.1 KiB)"

"""Docstrings and representations of mechanisms, as Jupyter shows them."""

import doctest
import sys

import pytest

import attnlab.attention
from attnlab.attention import MTLA, Attention
from attnlab.attention.documentation import arguments

CLASSES = [getattr(attnlab.attention, name) for name in attnlab.attention.__all__]
MECHANISMS = [cls for cls in CLASSES if issubclass(cls, Attention) and cls is not Attention]


@pytest.mark.parametrize("cls", MECHANISMS, ids=lambda cls: cls.__name__)
def test_every_argument_has_a_line_and_the_example_is_right(cls: type[Attention]) -> None:
    assert cls.__doc__ and all(f"\n    {name}: " in cls.__doc__ for name in arguments(cls))
    finder = doctest.DocTestFinder(recurse=False)
    (example,) = finder.find(cls, globs=vars(sys.modules[cls.__module__]))
    assert len(example.examples) == 3 and doctest.DocTestRunner().run(example).failed == 0


def test_sizes_are_shown() -> None:
    attention = MTLA(d_model=32, num_heads=4, stride=2)
    assert "d_model=32, num_heads=4, stride=2, head_dim=8, rope_dim=4, latent_dim=32" in repr(attention)
    cache = attention.new_cache(2, 8)
    cache.length = 3
    assert repr(cache) == "MTLACache(batch=2, positions=3 of 8, 18 numbers per token, 1.1 KiB)"

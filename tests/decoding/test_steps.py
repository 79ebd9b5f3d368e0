"""Static caches in whole models: what a captured step computes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attnlab.attention import MHA, MTLA, Attention, Cache
from attnlab.decoding import Steps
from attnlab.models import Decoder, PrefixDecoder
from attnlab.models.cross_decoder import CrossDecoder

WIDTH, VOCAB = 16, 11
Start = Callable[[], list[Cache]]


def mtla(layer: int) -> Attention:
    return MTLA(WIDTH, 2, stride=2)


def of(name: str) -> tuple[PrefixDecoder | CrossDecoder | Decoder, Start]:
    """A model, and what makes its caches for four rows of nine positions."""
    torch.manual_seed(1)
    prefix, lengths = torch.randn(2, 5, WIDTH, dtype=torch.float64), torch.tensor([5, 3])
    if name == "learned positions":
        decoder = Decoder(VOCAB, WIDTH, lambda _: MHA(WIDTH, 2), num_layers=2, ffn_dim=24, max_length=9, positions=9)
        decoder.double().eval()
        return decoder, lambda: decoder.start(4, 9)
    kind = PrefixDecoder if name == "prefix" else CrossDecoder
    model = kind(VOCAB, WIDTH, attention=mtla, num_layers=2, ffn_dim=24).double().eval()
    return model, lambda: model.start(prefix, lengths, 2, 9)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["prefix", "cross", "learned positions"])
def test_static_caches_change_nothing(name: str) -> None:
    model, start = of(name)
    tokens: Tensor = torch.randint(VOCAB, (4, 9))
    plain, static = start(), start()
    for t in range(9):
        if t == 2:
            for cache in static:
                assert cache.can_be_static
                cache.make_static()
        want, got = (model.step(tokens[:, t : t + 1], caches) for caches in (plain, static))
        assert (got - want).abs().max() < 1e-12
    assert all(cache.is_static for cache in static)


@torch.inference_mode()
def test_on_a_cpu_each_step_runs_as_it_is() -> None:
    model, start = of("prefix")
    caches, tokens = start(), torch.randint(VOCAB, (4, 9))
    steps = Steps(model, caches, 9)
    for t in range(9):
        steps(tokens[:, t : t + 1])
    assert not steps.captured and not any(cache.is_static for cache in caches) and caches[0].length == 9

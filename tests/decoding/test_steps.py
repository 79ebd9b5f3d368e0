"""Static caches in whole models: what a captured step computes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attnlab.attention import MHA, MTLA, Attention, Cache
from attnlab.decoding import BeamSearch, Steps
from attnlab.models import Decoder, PrefixDecoder
from attnlab.models.cross_decoder import CrossDecoder

WIDTH, VOCAB = 16, 11
Start = Callable[[], list[Cache]]
MODELS = ["prefix", "cross", "learned positions"]


def mtla(layer: int) -> Attention:
    return MTLA(WIDTH, 2, stride=2)


def of(name: str, size: int = 9, device: str = "cpu") -> tuple[PrefixDecoder | CrossDecoder | Decoder, Start]:
    """A model, and what makes its caches for four rows of so many positions."""
    torch.manual_seed(1)
    prefix, lengths = torch.randn(2, 5, WIDTH, dtype=torch.float64).to(device), torch.tensor([5, 3], device=device)
    if name == "learned positions":
        decoder = Decoder(
            VOCAB, WIDTH, lambda _: MHA(WIDTH, 2), num_layers=2, ffn_dim=24, max_length=size, positions=size
        )
        decoder.double().eval().to(device)
        return decoder, lambda: decoder.start(4, size)
    kind = PrefixDecoder if name == "prefix" else CrossDecoder
    model = kind(VOCAB, WIDTH, attention=mtla, num_layers=2, ffn_dim=24).double().eval().to(device)
    return model, lambda: model.start(prefix, lengths, 2, size)


@torch.inference_mode()
@pytest.mark.parametrize("name", MODELS)
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


@torch.inference_mode()
@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_captured_steps_of_a_model_equal_others(name: str) -> None:
    model, start = of(name, 24, "cuda")
    tokens = torch.randint(VOCAB, (4, 24), device="cuda")
    caches = start(), start()
    plain, captured = (Steps(model, part, 24, graphs=bool(n)) for n, part in enumerate(caches))
    for t in range(24):
        want, got = (steps(tokens[:, t : t + 1]) for steps in (plain, captured))
        assert (got - want).abs().max() < 1e-11
    assert captured.captured and caches[0][0].length == caches[1][0].length == 24


def texts(device: str) -> list[list[int]]:
    """The best text of each sentence by a beam search of 40 steps, in which sentences end and are dropped."""
    torch.manual_seed(1)
    model = PrefixDecoder(VOCAB, WIDTH, attention=mtla, num_layers=2, ffn_dim=24).double().eval()
    with torch.no_grad():
        model.unembedding.weight.mul_(4)
    prefix, lengths = torch.randn(6, 5, WIDTH, dtype=torch.float64), torch.tensor([5, 3, 1, 5, 2, 4])
    search = BeamSearch(beam=3, max_len_a=8.0, max_len_b=0)  # of other lengths
    best = search(model.to(device), prefix.to(device), lengths.to(device), bos=2, eos=2, pad=1)
    return [hypotheses[0].tokens for hypotheses in best]


@pytest.mark.gpu
def test_beam_search_on_a_gpu_writes_what_it_does_on_a_cpu() -> None:
    expected = texts("cpu")
    assert texts("cuda") == expected and len({len(text) for text in expected}) > 2

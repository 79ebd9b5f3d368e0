"""Compiled decoding steps: equal to the others, and few graphs for all lengths, batches and beams."""

import functools
from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab.attention import MHA, MTLA, Attention, Cache
from attnlab.bench.baselines.base import PublishedCache
from attnlab.bench.variants import LayerSteps
from attnlab.decoding import BeamSearch, Sampling, Steps
from attnlab.decoding.beam import READS
from attnlab.models import T6, PrefixDecoder
from attnlab.training.compiled import Compiled
from tests.attention.mechanisms import EVERY, Mechanism, error
from tests.attention.test_compiled import quick
from tests.attention.test_static import One

REAL = torch.compile
LONG = 200  # steps
MOST = 3  # graphs: for prefixes of different lengths, for others, and for one prefix
Shape = tuple[int, int, bool, int]  # prefixes, their longest length, whether their lengths differ, steps


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Compile without a C++ compiler -> a list with one entry of each graph that is compiled."""
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        compiled.append(len(inputs))
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend, fullgraph=True))
    return compiled


def decode(model: One, compiled: Compiled, shape: Shape, beam: int = 3) -> float:
    """Beams that are reordered, of which some sentences end -> the largest error of compiled steps."""
    count, size, ragged, steps = shape
    attention, rows, worst = model.attention, count * beam, 0.0
    capacity = min(steps, attention.max_positions or steps)
    prefix, lengths = torch.randn(count, size, attention.d_model, dtype=torch.float64), None
    if ragged:
        lengths = torch.randint(1, size, (count,))
        lengths[0] = size
    caches = [attention.new_cache(rows, capacity, size, prefix_batch=count) for _ in range(2)]
    for cache in caches:
        attention.read_prefix(prefix, lengths, cache)
    loops = [Steps(model, [cache], capacity, compiled=c) for cache, c in zip(caches, (compiled, None), strict=True)]
    for t in range(capacity):
        tokens = torch.randint(7, (rows, 1))
        got, want = (loop(tokens) for loop in loops)
        worst = max(worst, error(got, want))
        order = torch.arange(rows) // beam * beam + torch.randint(beam, (rows,))
        for cache in caches:
            cache.reorder(order)
        if t == 5 and count > 3:  # half of the sentences have ended
            rows = count // 2 * beam
            for cache, loop in zip(caches, loops, strict=True):
                cache.select(torch.arange(count)[: count // 2] * 2)
                loop.reset()
    assert caches[0].is_static and not caches[1].is_static and caches[0].length == caches[1].length == capacity
    with pytest.raises(ValueError, match="the cache has room for"):
        loops[0](tokens[:rows])
    return worst


@pytest.mark.slow  # a whole trace each
@pytest.mark.parametrize("mechanism", [m for m in EVERY if m.stride in (None, 2)], ids=str)
@torch.inference_mode()
def test_few_graphs_for_all_lengths_and_batches(mechanism: Mechanism, graphs: list[int]) -> None:
    torch.manual_seed(0)
    model, compiled = One(mechanism.build()), Compiled(True)
    assert decode(model, compiled, (4, 7, True, LONG)) < 1e-12
    assert len(graphs) == 1, "one for all lengths"
    assert decode(model, compiled, (5, 6, True, READS + 3)) < 1e-12
    assert len(graphs) == 1, "one for all batches"
    assert decode(model, compiled, (6, 9, False, READS + 9)) < 1e-12
    assert decode(model, compiled, (1, 5, False, 9)) < 1e-12
    assert len(graphs) <= MOST


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", [pytest.param(m, id=str(m)) for m in EVERY if quick(m)])
@torch.inference_mode()
def test_inductor(mechanism: Mechanism) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, compiled = One(mechanism.build()), Compiled(True)
    assert decode(model, compiled, (4, 7, True, 2 * READS + 5)) < 1e-12
    assert decode(model, compiled, (5, 6, True, READS + 3)) < 1e-12


def mtla(layer: int) -> Attention:
    return MTLA(16, 2, stride=2)


@pytest.mark.slow
def test_beam_search(graphs: list[int]) -> None:
    torch.manual_seed(1)
    model = PrefixDecoder(23, 16, attention=mtla, num_layers=2, ffn_dim=24).double().eval()
    compiled, search = Compiled(True), BeamSearch(beam=3, max_len_b=9)
    for count, size in ((4, 7), (5, 5)):
        prefix, lengths = torch.randn(count, size, 16, dtype=torch.float64), torch.arange(count) % 2 + size - 1
        ids: dict[str, Any] = {"bos": 0, "eos": 2, "pad": 1}
        want, got = (search(model, prefix, lengths, **ids, compiled=c) for c in (None, compiled))
        assert [[h.tokens for h in hypotheses] for hypotheses in got] == [[h.tokens for h in hs] for hs in want]
    assert 1 <= len(graphs) <= 2 and len(compiled.methods) == 1


def test_sampling(graphs: list[int]) -> None:
    torch.manual_seed(1)
    model = T6(23, 16, mtla, num_layers=1, ffn_dim=24, output_init="default").double().eval()
    compiled = Compiled(True)
    for rows, size, tokens in ((3, 4, READS + 9), (4, 2, 7)):
        prompt, sampling = torch.randint(23, (rows, size)), Sampling(tokens=tokens)
        assert torch.equal(sampling(model, prompt, compiled=compiled), sampling(model, prompt))
    assert len(graphs) == 1


def test_a_step_that_needs_the_length_on_the_host_runs_as_it_is(graphs: list[int]) -> None:
    class Next:
        def step(self, tokens: Tensor, caches: list[Cache]) -> Tensor:
            return tokens + 1

    steps = Steps(Next(), [PublishedCache(None, 1, 4, 0, 1, torch.empty(0))], 4, compiled=Compiled(True))
    assert int(steps(torch.zeros(1, 1))) == 1 and not graphs


@pytest.mark.slow
@torch.inference_mode()
def test_more_models_than_torch_compiles_one_method_for(graphs: list[int]) -> None:
    """Each has its own graph."""
    for heads in (1, 2, 3):
        layer = LayerSteps(MHA(8 * heads, heads).double().eval())
        caches = [layer.attention.new_cache(2, 5) for _ in range(2)]
        loops = [Steps(layer, [cache], 5, compiled=c) for cache, c in zip(caches, (Compiled(True), None), strict=True)]
        for _ in range(5):
            x = torch.randn(2, 1, 8 * heads, dtype=torch.float64)
            with torch._dynamo.config.patch(recompile_limit=1):
                got, want = (loop(x) for loop in loops)
            assert error(got, want) < 1e-12
        assert caches[0].length == int(caches[0].start) == 5
    assert len(graphs) == (3 if "isolate_recompiles" in signature(REAL).parameters else 1)

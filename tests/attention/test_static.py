"""Static caches: steps that read the length from the device equal those that know it."""

import pytest
import torch

from attnlab.attention import Attention, Cache
from attnlab.attention.ops import kernels
from attnlab.attention.ops.backends import Backend, prefer
from attnlab.attention.tpa import FactorCache
from attnlab.bench.baselines.base import PublishedCache
from attnlab.decoding import Steps
from tests.attention.mechanisms import EVERY, NAMES, Mechanism, error

STATIC = [m for m in EVERY if m.build().new_cache(1, 1).can_be_static]


def test_every_mechanism_of_ours_can_be_static() -> None:
    assert {m.name for m in STATIC} == set(NAMES)


@pytest.mark.parametrize("mechanism", STATIC, ids=str)
@pytest.mark.parametrize(("prefix", "ragged"), [(0, False), (5, False), (5, True)], ids=["alone", "prefix", "ragged"])
def test_static_steps_equal_others(mechanism: Mechanism, prefix: int, ragged: bool) -> None:
    attention, steps = mechanism.build(), 2 * mechanism.grid + 5
    x, before = torch.randn(4, steps, 32, dtype=torch.float64), torch.randn(2, prefix, 32, dtype=torch.float64)
    lengths = torch.tensor([prefix, 2]) if ragged else None
    caches = [attention.new_cache(4, steps + 3, prefix, prefix_batch=2) for _ in range(2)]
    for cache in caches:
        if prefix:
            attention.read_prefix(before, lengths, cache)
        attention.extend(x[:, :2], cache)
    caches[1].make_static()
    for t in range(2, steps):
        if t == 4:
            for cache in caches:
                cache.reorder(torch.tensor([1, 1, 3, 2]))
        if t >= 5:  # bounds of what is read change nothing
            caches[1].bound_reads(t + 1 + t % 3)
        want, got = (attention.extend(x[:, t : t + 1], cache) for cache in caches)
        assert error(got, want) < 1e-13
    assert caches[1].length == steps == int(caches[1].start)


def test_a_static_cache_takes_one_position_and_some_mechanisms_have_none() -> None:
    attention = next(m for m in STATIC if m.name == "mla").build()
    cache = attention.new_cache(1, 8)
    cache.make_static()
    with pytest.raises(ValueError, match="one position at a time, not 3"):
        attention.extend(torch.zeros(1, 3, 32, dtype=torch.float64), cache)
    with pytest.raises(ValueError, match="a static cache cannot be cropped"):
        cache.crop(0)
    other = PublishedCache(None, 1, 4, 0, 1, torch.empty(0))
    with pytest.raises(TypeError, match="need the length on the host"):
        other.make_static()


@pytest.mark.parametrize("name", ["tpa", "tpa_noncontextual_b"])
def test_static_factors_lie_in_whole_blocks(name: str) -> None:
    """The factor kernel reads head factors in full loads if their capacity is a multiple of 16."""
    attention = next(m for m in STATIC if m.name == name).build()
    aligned, cache = attention.new_cache(2, 32, 16), attention.new_cache(2, 19, 5)
    assert isinstance(cache, FactorCache)
    before = {name: buffer.shape for name, buffer in cache.text.items()}
    cache.text = {name: torch.randn_like(buffer) for name, buffer in cache.text.items()}
    unpadded = dict(cache.text)
    for _ in range(2):
        cache.make_static()
        shapes = [(buffer.shape, buffer.is_contiguous()) for buffer in cache.buffers()]
        assert shapes == [(buffer.shape, True) for buffer in aligned.buffers()]
        assert cache.nbytes == aligned.nbytes and len(cache.cos) == 5 + 32 and cache.capacity == 19
    for name, buffer in cache.text.items():
        span = tuple(slice(size) for size in before[name])
        assert torch.equal(buffer[span], unpadded[name]) and buffer.count_nonzero() == unpadded[name].count_nonzero()
    pointers = [buffer.data_ptr() for buffer in aligned.buffers()]
    aligned.make_static()
    assert [buffer.data_ptr() for buffer in aligned.buffers()] == pointers  # nothing is copied that fits


class One:
    """An attention as a model: its inputs are looked up by tokens."""

    def __init__(self, attention: Attention) -> None:
        weight = next(attention.parameters())
        self.attention = attention
        self.table = torch.randn(7, attention.d_model, device=weight.device, dtype=weight.dtype)

    @torch.no_grad()
    def step(self, tokens: torch.Tensor, caches: list[Cache]) -> torch.Tensor:
        return self.attention.extend(self.table[tokens], caches[0])


@pytest.mark.gpu
@pytest.mark.parametrize("size", [0, 5])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-3), (torch.bfloat16, 0.2)], ids=str
)
@pytest.mark.parametrize("mechanism", STATIC, ids=str)
def test_a_captured_step_equals_others(mechanism: Mechanism, dtype: torch.dtype, tolerance: float, size: int) -> None:
    """24 steps of four rows after ragged prefixes, reordered twice."""
    device = "cuda"
    model = One(mechanism.build(dtype=dtype).to(device))
    tokens, rows = torch.randint(7, (4, 24), device=device), torch.tensor([1, 1, 3, 2], device=device)
    caches = [model.attention.new_cache(4, 30, size, prefix_batch=2) for _ in range(2)]
    prefix = torch.randn(2, size, 32, device=device, dtype=dtype)
    plain, other = (Steps(model, [cache], 24, graphs=bool(n)) for n, cache in enumerate(caches))
    with torch.inference_mode():
        for cache in caches:
            if size:
                model.attention.read_prefix(prefix, torch.tensor([size, 1], device=device), cache)
        for t in range(24):
            if t in (6, 15):
                for cache in caches:
                    cache.reorder(rows)
            want, got = (steps(tokens[:, t : t + 1]) for steps in (plain, other))
            assert got.dtype == dtype and error(got.cpu(), want.cpu()) < tolerance, t
    assert other.captured and caches[1].is_static and not caches[0].is_static
    assert caches[0].length == caches[1].length == 24


@pytest.mark.skipif(not kernels.usable(torch.device("cpu")), reason="no interpreter")
@pytest.mark.parametrize("name", ["mqa", *(pytest.param(x, marks=pytest.mark.slow) for x in ("mtla", "tpa"))])
def test_static_steps_through_kernels(name: str) -> None:
    mechanism = next(m for m in STATIC if m.name == name)
    attention = mechanism.build(dtype=torch.float32)
    x = torch.randn(2, 5, 32)
    plain, static = (attention.new_cache(2, 7) for _ in range(2))
    static.make_static()
    for t in range(5):
        want = attention.extend(x[:, t : t + 1], plain)
        with prefer(Backend.TRITON):
            assert error(attention.extend(x[:, t : t + 1], static), want) < 1e-4

"""Static caches: steps that read the length from the device equal those that know it."""

import pytest
import torch

from attnlab.attention.ops import kernels
from attnlab.attention.ops.backends import Backend, prefer
from attnlab.attention.tpa import FactorCache
from tests.attention.mechanisms import EVERY, Mechanism, error

STATIC = [m for m in EVERY if m.build().new_cache(1, 1).can_be_static]


def test_most_mechanisms_can_be_static() -> None:
    names = {m.name for m in STATIC}
    assert {"mha", "mqa", "gqa", "mla", "mtla", "mla_window", "mtla_window", "sliding_window"} <= names


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
    other = next(m for m in EVERY if m not in STATIC).build().new_cache(1, 4)
    with pytest.raises(TypeError, match="need the length on the host"):
        other.make_static()


@pytest.mark.parametrize("name", ["tpa", "tpa_noncontextual_b"])
def test_static_factors_lie_in_whole_blocks(name: str) -> None:
    """The factor kernel reads head factors in whole loads if their capacity is a multiple of 16."""
    attention = next(m for m in STATIC if m.name == name).build()
    aligned, cache = attention.new_cache(2, 32, 16), attention.new_cache(2, 19, 5)
    assert isinstance(cache, FactorCache)
    before = {name: buffer.shape for name, buffer in cache.text.items()}
    cache.text = {name: torch.randn_like(buffer) for name, buffer in cache.text.items()}
    kept = dict(cache.text)
    for _ in range(2):
        cache.make_static()
        shapes = [(buffer.shape, buffer.is_contiguous()) for buffer in cache.buffers()]
        assert shapes == [(buffer.shape, True) for buffer in aligned.buffers()]
        assert cache.nbytes == aligned.nbytes and len(cache.cos) == 5 + 32 and cache.capacity == 19
    for name, buffer in cache.text.items():
        own = tuple(slice(size) for size in before[name])
        assert torch.equal(buffer[own], kept[name]) and buffer.count_nonzero() == kept[name].count_nonzero()
    pointers = [buffer.data_ptr() for buffer in aligned.buffers()]
    aligned.make_static()
    assert [buffer.data_ptr() for buffer in aligned.buffers()] == pointers  # nothing is copied that fits


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mechanism", STATIC, ids=str)
def test_a_captured_step_equals_others(mechanism: Mechanism) -> None:
    from attnlab.decoding import Steps

    class One:
        """An attention as a model: its inputs are looked up by tokens."""

        def __init__(self) -> None:
            self.attention = mechanism.build(dtype=torch.float32).cuda()
            self.table = torch.randn(7, 32, device="cuda")

        @torch.no_grad()
        def step(self, tokens: torch.Tensor, caches: list) -> torch.Tensor:
            return self.attention.extend(self.table[tokens], caches[0])

    model, tokens = One(), torch.randint(7, (4, 24), device="cuda")
    plain, captured = (Steps(model, [model.attention.new_cache(4, 30)], 24, graphs=g) for g in (False, True))
    with torch.inference_mode():
        for t in range(24):
            want, got = (steps(tokens[:, t : t + 1]) for steps in (plain, captured))
            assert error(got.cpu(), want.cpu()) < 1e-4
    assert captured.captured and captured.caches[0].length == 24


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

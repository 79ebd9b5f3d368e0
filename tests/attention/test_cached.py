"""What every mechanism in conf/attention promises about its cached form: always what recomputation gives."""

import copy
import io
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from attnlab.attention import MHA, MLA, TPA, Attention, Cache, MTLAWindow
from tests.attention.mechanisms import EVERY, TINY, TWO_WAYS, Mechanism, error, extend_by, prefix_lengths, random_chunks

every = pytest.mark.parametrize("mechanism", EVERY, ids=str)
every_width = pytest.mark.parametrize("mechanism", [*EVERY, *TWO_WAYS], ids=str)


def draw(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@every_width
@pytest.mark.parametrize("kind", ["no prefix", "no prefix read", "empty", "uniform", "shorter", "ragged"])
def test_extend_in_any_chunking_equals_forward(mechanism: Mechanism, kind: str) -> None:
    """Also with more room than is used.  "shorter": equally long prefixes in a wider tensor."""
    attention, s, rng = mechanism.build(), mechanism.grid, torch.Generator().manual_seed(7)
    steps, size, lengths = 3 * s + 2, 0, None
    if kind in ("uniform", "shorter", "ragged"):
        size = 2 * s + 1
    if kind == "ragged":
        lengths = prefix_lengths(s)
    batch = 3 if lengths is None else len(lengths)
    if kind == "shorter":
        lengths = torch.full((batch,), s + 1)
    x, prefix = draw(rng, batch, steps, 32), draw(rng, batch, size, 32)
    if lengths is not None:
        prefix[torch.arange(size) >= lengths[:, None]] = float("nan")
    want = attention(x, prefix, prefix_lengths=lengths)
    for attempt in range(4):
        spare = attempt % 3
        cache = attention.new_cache(batch, steps + spare, size + (3 if kind == "no prefix read" else spare))
        if not kind.startswith("no prefix"):
            attention.read_prefix(prefix, lengths, cache)
        chunks = [1] * steps if attempt == 0 else [steps] if attempt == 1 else random_chunks(steps, rng)
        y = extend_by(attention, x, cache, chunks)
        assert error(y, want) < 1e-12, chunks
        assert cache.length == steps and not y.requires_grad


@every
def test_check_steps_accepts_every_mechanism_and_refuses_wrong_steps(mechanism: Mechanism) -> None:
    attention: Any = mechanism.build().train()
    state = torch.get_rng_state()
    attention.check_steps(3 * mechanism.grid + 2)
    assert attention.training and torch.equal(torch.get_rng_state(), state)
    base: Any = type(attention)
    attention.__class__ = type("Wrong", (base,), {"_extend": lambda self, x, cache: 1.1 * base._extend(self, x, cache)})
    with pytest.raises(ValueError, match=r"Wrong: .* 1\d\.\d %"):
        attention.check_steps()


@pytest.mark.parametrize("mechanism", [m for m in EVERY if hasattr(m.build(), "_queries")], ids=str)
def test_a_subclass_with_other_queries_decodes_as_it_computes(mechanism: Mechanism) -> None:
    """The fast steps of a CPU are those of the class that they are written for."""
    attention: Any = mechanism.build()
    base: Any = type(attention)
    attention.__class__ = type("Sharp", (base,), {"_queries": lambda self, *of: 3 * base._queries(self, *of)})
    x = draw(torch.Generator().manual_seed(7), 2, 3 * mechanism.grid, 32)
    steps = extend_by(attention, x, attention.new_cache(2, x.shape[1]), [1] * x.shape[1])
    assert error(steps, attention(x)) < 1e-12


@pytest.mark.parametrize("mechanism", TWO_WAYS, ids=str)
def test_both_ways_of_a_step_are_taken(mechanism: Mechanism, monkeypatch: pytest.MonkeyPatch) -> None:
    """At this width steps of `walk` work on factors; long chunks work on keys and values that are built."""
    choose, taken = TPA.in_factor_space, set()

    def spy(attention: TPA, new: int, beam: int, text: int, prefix: int) -> bool:
        taken.add(on_factors := choose(attention, new, beam, text, prefix))
        return on_factors

    monkeypatch.setattr(TPA, "in_factor_space", spy)
    walk(mechanism, ["reorder", "nothing"], "uniform", 0)
    assert True in taken
    attention = mechanism.build()
    assert isinstance(attention, TPA)
    x = torch.randn(1, 3 + 2 * attention.head_dim, 32, dtype=torch.float64)
    y = extend_by(attention, x, attention.new_cache(1, x.shape[1]), [1, 1, 2 * attention.head_dim + 1])
    assert error(y, attention(x)) < 1e-12
    assert taken == {True, False}


class Recomputed:
    """The same rows without a cache: their histories through `forward`, each with a copy of its prefix."""

    def __init__(self, attention: Attention, prefix: Tensor, lengths: Tensor | None, beam: int) -> None:
        self.attention, self.beam = attention, beam
        self.prefix = prefix.repeat_interleave(beam, 0)
        self.lengths = None if lengths is None else lengths.repeat_interleave(beam)
        self.history = prefix.new_zeros(len(self.prefix), 0, prefix.shape[-1])

    def extend(self, x: Tensor) -> Tensor:
        self.history = torch.cat((self.history, x), 1)
        return self.attention(self.history, self.prefix, prefix_lengths=self.lengths)[:, -x.shape[1] :]

    def select(self, prefixes: Tensor) -> None:
        rows = (prefixes[:, None] * self.beam + torch.arange(self.beam)).flatten()
        self.history, self.prefix = self.history[rows], self.prefix[rows]
        self.lengths = None if self.lengths is None else self.lengths[rows]


def walk(mechanism: Mechanism, operations: list[str], kind: str, seed: int, *, beam: int = 3, moves: int = 14) -> None:
    """Extend a cache in random steps with random operations between, and recompute every output."""
    attention, s, rng = mechanism.build(), mechanism.grid, torch.Generator().manual_seed(seed)

    def below(n: int) -> int:
        return int(torch.randint(n, (), generator=rng))

    lengths = None
    size = 0 if kind == "none" else 2 * s + 1
    if kind == "ragged":
        lengths = prefix_lengths(s)[torch.randperm(len(prefix_lengths(s)), generator=rng)[:4]]
        size = int(lengths.max())
    count = 3 if lengths is None else len(lengths)
    prefix = draw(rng, count, size, 32)
    cache = attention.new_cache(count * beam, moves * 3, size, prefix_batch=count)
    if size:
        attention.read_prefix(prefix, lengths, cache)
    model = Recomputed(attention, prefix, lengths, beam)
    for move in range(moves):
        operation = operations[below(len(operations))] if move else "reorder"  # before any text as well
        if operation == "reorder" and "reorder" in operations:
            rows = torch.arange(count).repeat_interleave(beam) * beam
            rows = rows + torch.randint(beam, (count * beam,), generator=rng)
            cache.reorder(rows)
            model.history = model.history[rows]
        elif operation == "select" and count > 1:
            remaining = torch.randperm(count, generator=rng)[: 1 + below(count)]
            cache.select(remaining)
            model.select(remaining)
            count = len(remaining)
        elif operation == "crop":
            crop(cache, model, below(cache.length + 1))
        x = draw(rng, count * beam, 1 if below(3) else 1 + below(3), 32)
        assert error(attention.extend(x, cache), model.extend(x)) < 1e-12, f"{operation} at move {move}"
        assert cache.length == model.history.shape[1]
        assert cache.nbytes == 8 * attention.cache_elements(count * beam, moves * 3, size, count)


def crop(cache: Cache, model: Recomputed, length: int) -> bool:
    """Crop both, or neither where the cache refuses."""
    try:
        cache.crop(length)
    except ValueError:
        return False
    model.history = model.history[:, :length]
    return True


@every_width
@pytest.mark.parametrize("kind", ["none", "uniform", "ragged"])
def test_after_any_operations_extend_equals_recomputation(mechanism: Mechanism, kind: str) -> None:
    walk(mechanism, ["reorder", "select", "crop", "nothing"], kind, seed=0)


@every
@pytest.mark.parametrize("read", [(0, 0), (1, 1), (2, 2), (5, 5), (5, 2)], ids=str)
def test_crop_to_the_beginning_of_a_slot_and_an_error_elsewhere(mechanism: Mechanism, read: tuple[int, int]) -> None:
    """The beginning of a slot of every row: after prefixes of 5 and 2 positions there is none where slots have 2."""
    attention, steps, rng = mechanism.build(), 2 * mechanism.grid + 2, torch.Generator().manual_seed(3)
    x, prefix, other = (draw(rng, 2, n, 32) for n in (steps, read[0], 3))
    lengths = None if read[0] == read[1] else torch.tensor(read)
    for length in range(steps + 1):
        cache, model = attention.new_cache(2, steps + 3, read[0]), Recomputed(attention, prefix, lengths, 1)
        attention.read_prefix(prefix, lengths, cache)
        attention.extend(x, cache)
        model.extend(x)
        merged = any((size + length) % (mechanism.stride or 1) for size in read)
        possible = crop(cache, model, length)
        if isinstance(attention, MTLAWindow):  # which overwrites what it has merged
            assert possible or length < steps
        else:
            if attention.cache_elements_per_token:  # a state of fixed size has other rules
                assert possible == (length == steps or not merged)
            assert possible or length not in (0, steps) or merged
        assert cache.length == model.history.shape[1]
        assert error(extend_by(attention, other, cache, [1, 2]), model.extend(other)) < 1e-12
    for impossible in (-1, cache.length + 1):
        with pytest.raises(ValueError, match="crop"):
            cache.crop(impossible)


@every
def test_a_full_cache_is_an_error_and_stays_usable(mechanism: Mechanism) -> None:
    attention, rng = mechanism.build(), torch.Generator().manual_seed(5)
    x, prefix = draw(rng, 1, 5, 32), draw(rng, 1, 4, 32)
    cache = attention.new_cache(1, 5, 3)
    with pytest.raises(ValueError, match="room for 3"):
        attention.read_prefix(prefix, None, cache)
    attention.read_prefix(prefix[:, :3], None, cache)
    first = attention.extend(x[:, :3], cache)
    with pytest.raises(ValueError, match="room for 5"):
        attention.extend(x[:, :3], cache)
    rest = attention.extend(x[:, 3:], cache)
    assert error(torch.cat((first, rest), 1), attention(x, prefix[:, :3])) < 1e-12
    with pytest.raises(ValueError, match="room for 5"):
        attention.extend(x[:, :1], cache)
    with pytest.raises(ValueError, match="once per cache, before any text"):
        attention.read_prefix(prefix[:, :3], None, cache)
    with pytest.raises(ValueError, match="evenly"):
        attention.new_cache(5, 4, 4, prefix_batch=2)


def torch_saved(cache: Cache) -> Cache:
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    loaded: Cache = torch.load(file, weights_only=False)
    return loaded


@every
def test_a_copy_between_two_steps_changes_nothing(mechanism: Mechanism) -> None:
    """Neither for the copy, which is continued to the end, nor for the cache, which is continued after it."""
    attention, rng = mechanism.build(), torch.Generator().manual_seed(10)
    x, prefix, lengths = draw(rng, 2, 7, 32), draw(rng, 2, 5, 32), torch.tensor([5, 2])
    want = attention(x, prefix, prefix_lengths=lengths)
    cache = attention.new_cache(2, 7, 5)
    attention.read_prefix(prefix, lengths, cache)
    ways: list[Callable[[Cache], Cache]] = [copy.copy, torch_saved, copy.deepcopy]
    for t in range(7):
        other = ways[t % 3](cache)
        assert error(extend_by(attention, x[:, t:], other, [1] * (7 - t)), want[:, t:]) < 1e-12, t
        assert error(attention.extend(x[:, t : t + 1], cache), want[:, t : t + 1]) < 1e-12, t
        assert other.nbytes == cache.nbytes


@every
def test_what_does_not_fit_a_mechanism_is_an_error_of_one_line(mechanism: Mechanism) -> None:
    """Caches, widths, rows and lengths. Cache and mechanism stay usable."""
    attention, x = mechanism.build(), torch.randn(2, 3, 32, dtype=torch.float64)
    cache, other = attention.new_cache(2, 3, 3), (MLA if type(attention) is MHA else MHA)(32, 4).new_cache(2, 3, 3)
    wider = mechanism.build("task.model.d_model=64").new_cache(2, 3, 3)
    shared = attention.new_cache(4, 3, 3, prefix_batch=2)
    extend = attention.extend

    def read(prefix: Any, cache: Any = cache, lengths: Any = None) -> None:
        attention.read_prefix(prefix, lengths, cache)

    def refused(kind: type[Exception], message: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        with pytest.raises(kind, match=message):
            call(*args, **kwargs)

    wrong: Any
    call: Callable[..., Any]
    for wrong in (other, wider, None):
        for call in (extend, read):
            refused(TypeError, f"^cache: expected one of {type(attention).__name__}.*new_cache", call, x, wrong)
    for wrong in (x[..., :31], x[0]):
        for name, call in (("x", attention), ("x", lambda t: extend(t, cache)), ("prefix", lambda t: attention(x, t))):
            refused(ValueError, rf"^{name}: expected shape \(batch, positions, 32\)", call, wrong)
    refused(ValueError, "^prefix: expected shape", read, x[..., :31])
    for wrong in (x[:1], torch.cat((x, x))):
        refused(ValueError, f"^prefix: expected 2 rows, not {len(wrong)}$", attention, x, wrong)
        refused(ValueError, f"^prefix: expected 2 rows, not {len(wrong)}$", read, wrong, shared)
        refused(ValueError, f"^x: expected 2 rows, not {len(wrong)}$", extend, wrong, cache)
    wrong = None
    refused(TypeError, "^x: expected a tensor, not NoneType", attention, wrong)
    refused(TypeError, "^x: expected a tensor, not NoneType", extend, wrong, cache)
    lengths: list[tuple[type[Exception], str, Any]] = [
        *((ValueError, "lengths: expected", torch.tensor(wrong)) for wrong in ([4, 1], [1, -1], [1], [[1, 1]])),
        (TypeError, "lengths: expected a tensor of integers, not ", torch.tensor([2.0, math.nan])),
        (TypeError, "lengths: expected a tensor of integers, not ", torch.tensor([True, False])),
        (TypeError, "lengths: expected a tensor of integers, not ", [2, 1]),
    ]
    for kind, message, wrong in lengths:
        refused(kind, f"^{message}", attention, x, lengths=wrong)
        refused(kind, f"^{message}", attention.encode, x, wrong)
        refused(kind, f"^prefix_{message}", attention, x, x, prefix_lengths=wrong)
        refused(kind, f"^prefix_{message}", read, x, lengths=wrong)
    assert not cache.has_prefix
    assert error(extend(x, cache), attention(x)) < 1e-12


@every
def test_bytes_are_as_predicted_and_nothing_grows_beside_them(mechanism: Mechanism) -> None:
    attention = mechanism.build(dtype=torch.float32)
    per_token = attention.cache_elements_per_token
    assert attention.cache_elements(1, 2400) - attention.cache_elements(1, 1200) == 1200 * per_token
    longer = attention.cache_elements(6, 5, 1212, 2) - attention.cache_elements(6, 5, 12, 2)
    alone = attention.cache_elements(1, 5, 1212) - attention.cache_elements(1, 5, 12)
    assert longer == 2 * alone  # a prefix is stored once, whatever the beam
    bounded = attention.visible(5000) != range(5001)  # then a prefix may take room though old text does not
    assert alone == 1200 * per_token or bounded

    def allocated(cache: Cache) -> int:
        storages = [t.untyped_storage() for t in tree_leaves(vars(cache)) if isinstance(t, Tensor)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    for dtype in (None, torch.float64, torch.bfloat16):
        sizes = {}
        for batch, prefixes in ((4, 2), (8, 4), (8, 8)):
            cache = attention.new_cache(batch, 9, 7, prefix_batch=prefixes, dtype=dtype)
            assert cache.nbytes == attention.cache_bytes(batch, 9, 7, prefixes, dtype=dtype or torch.float32)
            sizes[batch, prefixes] = allocated(cache) - cache.nbytes
        assert len(set(sizes.values())) == 1, f"something grows with the batch and is not counted: {sizes}"


@every
@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)], ids=str
)
def test_extend_in_low_precision(mechanism: Mechanism, dtype: torch.dtype, autocast: bool) -> None:
    """The module in one precision, its cache in the same or another; prefixes of one length, and ragged."""
    low, rng, half = mechanism.build(dtype=dtype), torch.Generator().manual_seed(6), torch.bfloat16
    x, prefix = draw(rng, 4, 9, 32).to(dtype), draw(rng, 4, 5, 32).to(dtype)
    for stored, lengths in itertools.product((torch.float32, half), (None, torch.tensor([5, 0, 3, 4]))):
        want = copy.deepcopy(low).double()(x.double(), prefix.double(), prefix_lengths=lengths)
        cache = low.new_cache(4, 9, 5, dtype=stored)
        with torch.autocast("cpu", half, enabled=autocast):
            low.read_prefix(prefix, lengths, cache)
            y = extend_by(low, x, cache, [1, 1, 3, 1, 2, 1])
        assert autocast or y.dtype == dtype
        wide = {torch.float32} if low.accumulates else set()
        assert {buffer.dtype for buffer in cache.buffers()} - wide == {stored} - wide
        assert error(y, want) < (1e-4 if dtype == stored == torch.float32 and not autocast else 0.15)


@every
def test_a_long_bfloat16_decode_keeps_counting(mechanism: Mechanism) -> None:
    """600 positions: bfloat16 cannot count past 256, and a counter in it would stick there."""
    chunks = [250, *[1] * 16, 240, *[1] * 16, 78]  # steps past 256 and 512
    low, rng = mechanism.build(dtype=torch.bfloat16), torch.Generator().manual_seed(9)
    if low.max_positions is not None and low.max_positions < 600:
        pytest.skip(f"takes {low.max_positions} positions")
    exact = copy.deepcopy(low).double()
    x, prefix = draw(rng, 2, 600, 32).bfloat16(), draw(rng, 2, 300, 32).bfloat16()
    for lengths in (None, torch.tensor([300, 271])):
        want = exact(x.double(), prefix.double(), prefix_lengths=lengths)
        cache = low.new_cache(2, 600, 300)
        low.read_prefix(prefix, lengths, cache)
        y = extend_by(low, x, cache, chunks).double()
        difference = (y - want).square().mean((0, 2)).sqrt() / want.square().mean((0, 2)).sqrt()
        assert difference.max() < 0.06, difference.argmax()


def last_errors(mechanism: Mechanism, dtype: torch.dtype, steps: int) -> tuple[float, float]:
    """Relative error of the newest of 64 positions, and of `steps`, each decoded step by step; means over 8 of them."""
    low, rng = mechanism.build(dtype=dtype), torch.Generator().manual_seed(11)
    if low.max_positions is not None and low.max_positions < steps:
        pytest.skip(f"takes {low.max_positions} positions")
    x = draw(rng, 4, steps, 32).to(dtype)
    y = extend_by(low, x, low.new_cache(4, steps), [1] * steps).double()
    with torch.no_grad():
        want = copy.deepcopy(low).double()(x.double())
    errors = ((y - want).square().mean((0, 2)) / want.square().mean((0, 2))).sqrt()
    return float(errors[56:64].mean()), float(errors[-8:].mean())


def bounded(mechanism: Mechanism) -> bool:
    """Whether the cache has one size at any length: then errors could add up in it. Others hold a position once."""
    attention = mechanism.make(*TINY)
    return attention.cache_elements(1, 1024) == attention.cache_elements(1, 2048)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("mechanism", "steps"),
    [
        *(pytest.param(m, 1024, id=f"{m}-1024") for m in EVERY if m.choice is None and not m.window and bounded(m)),
        *(pytest.param(m, 4096, id=f"{m}-4096", marks=pytest.mark.slow) for m in EVERY),
    ],
)
def test_the_error_of_a_step_does_not_grow_with_its_position(
    mechanism: Mechanism, steps: int, dtype: torch.dtype
) -> None:
    early, late = last_errors(mechanism, dtype, steps)
    assert late <= 2 * early


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, 32, dtype=torch.float64)


@every
def test_extend_by_nothing_changes_nothing(mechanism: Mechanism) -> None:
    attention, x = mechanism.build(), drawn(2, 5)
    for size in (None, 0, 4):
        prefix = drawn(2, size or 0)
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
    attention.read_prefix(drawn(0, 4), torch.zeros(0, dtype=torch.int64) if ragged else None, cache)
    walk_without_rows(attention, cache)

    full = attention.new_cache(4, 6, 4, prefix_batch=2)
    attention.read_prefix(drawn(2, 4), torch.tensor([4, 2]) if ragged else None, full)
    attention.extend(drawn(4, 1), full)
    full.select(torch.zeros(0, dtype=torch.int64))
    walk_without_rows(attention, full)
    for batch, prefixes in ((2, 0), (0, 2)):
        with pytest.raises(ValueError, match="evenly"):
            attention.new_cache(batch, 4, 4, prefix_batch=prefixes)


def walk_without_rows(attention: Attention, cache: Cache) -> None:
    for new in (1, 2, 1, 0):
        before = cache.length
        assert attention.extend(drawn(0, new), cache).shape == (0, new, 32)
        assert cache.length == before + new
        cache.reorder(torch.zeros(0, dtype=torch.int64))
    cache.select(torch.zeros(0, dtype=torch.int64))
    cache.crop(cache.length)
    assert cache.nbytes == 0


@torch.no_grad()
def test_a_chunk_of_heads_two_wide() -> None:
    attention, x = MHA(33, 6, 1, 2).eval(), torch.randn(1, 4, 33)
    cache = attention.new_cache(1, 4)
    steps = torch.cat([attention.extend(part, cache) for part in x.split([1, 3], 1)], 1)
    assert error(steps, attention(x)) < 1e-5

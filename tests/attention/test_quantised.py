"""What a mechanism promises whose older slots are codes: the equations, with these slots rounded."""

import copy
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from attnlab.attention import MLA, MTLA, Attention, Cache, MTLAWindow
from attnlab.attention.ops.quantised import Coded, attend
from attnlab.attention.sliding_window import Windowed
from attnlab.decoding import BeamSearch
from attnlab.models import Decoder, PrefixDecoder
from tests.attention.mechanisms import EVERY, Mechanism, error, extend_by, prefix_lengths, random_chunks

Bits = Literal[8, 4]
BLOCK = 32  # slots that become codes together
CODED = [mechanism for mechanism in EVERY if mechanism.build().has_codes]
coded = pytest.mark.parametrize("mechanism", CODED, ids=str)
TOLERANCE = {8: 0.01, 4: 0.12}  # root mean square of the error over that of the output, at random weights


def rounded(x: Tensor, bits: Bits) -> Tensor:
    """(..., width) as it is read from codes, group by group."""
    most, kind = {8: (64, torch.float32), 4: (32, torch.float16)}[bits]
    count = -(-x.shape[-1] // most)
    size = -(-x.shape[-1] // (4 * count)) * 4
    parts = []
    for group in x.split(size, -1):
        low, high = group.amin(-1, keepdim=True), group.amax(-1, keepdim=True)
        zero = low.to(kind).to(x.dtype)
        scale = ((high - zero) / (2**bits - 1)).clamp(min=0).to(kind).to(x.dtype)
        code = torch.where(scale > 0, (group - zero) / scale, 0.0).round().clamp(0, 2**bits - 1)
        parts.append(zero + scale * code)
    return torch.cat(parts, -1)


class Twin:
    """The same rows in a cache of full precision, whose older slots are replaced by what codes give."""

    def __init__(self, attention: Attention, bits: Bits, cache: Any) -> None:
        self.attention, self.bits, self.cache, self.done = attention, bits, cache, 0
        self.stride = int(getattr(attention, "stride", 1))
        self.lag = self.first = 0
        if isinstance(attention, MTLAWindow):
            self.lag, self.first = attention.first + attention.recent, attention.raw
        if isinstance(attention, Windowed):
            self.lag = self.first = attention.sinks

    def extend(self, x: Tensor) -> Tensor:
        size, outs = BLOCK * self.stride, []
        while x.shape[1]:
            piece, x = x.split([left := min(x.shape[1], size - self.cache.length % size), x.shape[1] - left], 1)
            outs.append(self.attention.extend(piece, self.cache))
            self._round(min(self.cache.length, self.cache.capacity - 1) // size * size)
        return torch.cat(outs, 1)

    def _round(self, length: int) -> None:
        last = max(0, length - self.lag) // self.stride // BLOCK * BLOCK
        for name, buffer in self.cache.text.items():
            slots = buffer.movedim(self.cache.axes[name], -2) if buffer.dim() > 3 else buffer
            window = slots.shape[-2] - self.first if isinstance(self.attention, Windowed) else None
            for slot in range(self.done, last):
                if window is None or self.first + slot >= self.cache.length - window:
                    place = slots[..., self.first + (slot if window is None else slot % window), :]
                    place.copy_(rounded(place, self.bits))
        self.done = max(self.done, last)

    def crop(self, length: int) -> None:
        self.cache.crop(length)
        self.done = min(self.done, max(0, length - self.lag) // self.stride)


def twins(mechanism: Mechanism, bits: Bits, ragged: bool, steps: int) -> tuple[Attention, Any, Twin]:
    """A mechanism with codes, an empty cache with a prefix, and its twin."""
    attention, generator = mechanism.build(), torch.Generator().manual_seed(3)
    lengths = prefix_lengths(mechanism.grid)[:4] if ragged else None
    size = 0 if lengths is None else int(lengths.max())
    prefix = torch.randn(4, size, 32, generator=generator, dtype=torch.float64)
    full = copy.deepcopy(attention)
    attention.cache_bits = bits
    caches = [made.new_cache(8, steps, size, prefix_batch=4) for made in (attention, full)]
    for made, cache in zip((attention, full), caches, strict=True):
        made.read_prefix(prefix, lengths, cache)
    return attention, caches[0], Twin(full, bits, caches[1])


@coded
@pytest.mark.parametrize(("bits", "ragged"), [(8, True), (4, False)])
def test_any_operations_give_the_equations_with_rounded_slots(mechanism: Mechanism, bits: Bits, ragged: bool) -> None:
    """In any chunking, after reorder, select, copy and crop: codes stay, and no slot is rounded twice."""
    block = BLOCK * (mechanism.stride or 1)
    attention, cache, twin = twins(mechanism, bits, ragged, 6 * block)
    generator, beam, crops = torch.Generator().manual_seed(5), 2, 0
    for move in range(10):
        rows, sentences = cache.rows, cache.rows // beam
        if move % 3 == 1:
            order = torch.arange(sentences).repeat_interleave(beam) * beam
            order += torch.randint(beam, (rows,), generator=generator)
            cache.reorder(order), twin.cache.reorder(order)
        elif move == 6:
            cache.select(torch.tensor([2, 0])), twin.cache.select(torch.tensor([2, 0]))
        elif move % 3 == 2:
            cache = copy.copy(cache)
            for length in (cache.length - int(torch.randint(1, 40, (), generator=generator)), cache.length - 1):
                crops += crop(cache, twin, length)
        count = int(torch.randint(1, block, (), generator=generator))
        x = torch.randn(cache.rows, count, 32, generator=generator, dtype=torch.float64)
        chunks = random_chunks(count, generator) if move % 2 else [1] * count
        assert error(extend_by(attention, x, cache, chunks), twin.extend(x)) < 1e-12, f"move {move}"
        size = cache.rows, cache.capacity, cache.prefix_capacity, cache.rows // beam
        assert cache.nbytes == attention.cache_bytes(*size, dtype=torch.float64)
    assert cache.sealed >= BLOCK and cache.length > 2 * block
    assert crops or (mechanism.stride or 1) > 1 or isinstance(attention, MTLAWindow)


def crop(cache: Cache, twin: Twin, length: int) -> bool:
    """Crop both, or neither where one refuses."""
    try:
        copy.copy(twin.cache).crop(length)
        cache.crop(length)
    except ValueError:
        return False
    twin.crop(length)
    return True


@coded
@pytest.mark.parametrize("bits", [8, 4])
def test_codes_are_close_and_take_the_bytes_that_are_predicted(mechanism: Mechanism, bits: Bits) -> None:
    """Also where a CPU converts codes with other operators than a GPU, in float32, and with a cache in bfloat16."""
    steps = 2 * BLOCK * (mechanism.stride or 1) + 40
    attention, low = mechanism.build(), mechanism.build(dtype=torch.float32)
    x = torch.randn(2, steps, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    want = attention(x).detach()
    attention.cache_bits = low.cache_bits = bits
    exact = extend_by(attention, x, attention.new_cache(2, steps), [steps - 20, *[1] * 20])
    assert float((exact - want).square().mean().sqrt() / want.square().mean().sqrt()) < TOLERANCE[bits]
    for dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 0.1)):
        cache = low.new_cache(2, steps, dtype=dtype)
        assert cache.nbytes == low.cache_bytes(2, steps, dtype=dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            y = extend_by(low, x.float(), cache, [steps - 20, *[1] * 20]).double()
        off = (y - exact).square().mean().sqrt() / exact.square().mean().sqrt()
        assert off < tolerance + TOLERANCE[bits] / 4  # another rounding of an input changes codes
    long, short = (low.cache_bytes(1, size * 960, dtype=torch.float32) for size in (64, 32))
    assert (long - short) / (32 * 960) == pytest.approx(low.cache_bytes_per_token(torch.float32))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("queries", [1, 2, 5])
def test_sums_of_codes_on_a_cpu_are_those_of_converted_numbers(bits: Bits, queries: int) -> None:
    """Heads of their own in float32, whose values are summed as codes, and in float64."""
    rng, used = torch.Generator().manual_seed(0), 2000
    key, value = (Coded(shape, 2, 2016, bits, torch.zeros(0)) for shape in ((3, 140, None), (3, None, 70)))
    key.write(0, torch.randn(2, 3, 140, used, generator=rng))
    value.write(0, torch.randn(2, 3, used, 70, generator=rng))
    q = torch.randn(2, 3 * queries, 140, generator=rng) / 12
    for out, want in zip(attend(q, key, value, used), attend(q.double(), key, value, used), strict=True):
        assert out.dtype == torch.float32 and error(out, want) < 1e-5


@pytest.mark.parametrize("mechanism", [m for m in EVERY if m not in CODED], ids=str)
def test_a_state_is_not_stored_as_codes(mechanism: Mechanism) -> None:
    attention = mechanism.build()
    attention.cache_bits = 8
    with pytest.raises(ValueError, match="state of fixed size"):
        attention.new_cache(1, 4)


def test_a_language_model_is_scored_through_the_cache_that_it_decodes_with() -> None:
    """In evaluation without gradients; training is as without codes."""
    model = Decoder(50, 32, lambda _: MLA(32, 4), num_layers=2, ffn_dim=64)
    tokens = torch.randint(50, (2, 100))
    exact = model.eval()(tokens).detach()
    for attention in model.attentions:
        attention.cache_bits = 4
    with torch.no_grad():
        scored, caches = model(tokens), model.start(2, 100)
        steps = torch.cat([model.step(token, caches) for token in tokens.split(1, 1)], 1)
    assert error(scored, steps) < 1e-4 < error(scored, exact)
    assert torch.equal(scored[:, :32].argmax(-1), exact[:, :32].argmax(-1))
    assert error(model(tokens), exact) < 1e-5 and error(model.train()(tokens), exact) < 1e-5


def test_beam_search_through_codes_finds_what_a_search_without_them_scores_alike() -> None:
    torch.manual_seed(0)
    decoder = PrefixDecoder(30, 32, lambda _: MTLA(32, 4, stride=2), num_layers=2, ffn_dim=64).double().eval()
    search, prefix = BeamSearch(3, max_len_b=150, min_len=150), torch.randn(2, 6, 32, dtype=torch.float64)
    found = []
    for bits in (None, 8):
        for attention in decoder.attentions:
            attention.cache_bits = bits
        found.append(search(decoder, prefix, torch.tensor([6, 4]), bos=2, eos=2, pad=1))
    for exact, best in zip(*found, strict=True):
        assert best[0].score == pytest.approx(exact[0].score, rel=0.01)


def test_rows_are_reordered_with_the_codes_that_a_crop_left() -> None:
    attention, x = MLA(32, 4).double(), torch.randn(2, 100, 32, dtype=torch.float64)
    attention.cache_bits = 8
    cache, order = attention.new_cache(2, 100), torch.tensor([1, 0])
    attention.extend(x[:, :65], cache)
    cache.crop(61)
    attention.extend(x[:, 61:62], cache)
    cache.reorder(order)
    after = torch.cat([attention.extend(one, cache) for one in x[order][:, 62:].split(1, 1)], 1)
    assert error(after, attention(x)[order][:, 62:]) < TOLERANCE[8]


def test_steps_of_latents_alone_in_half_precision() -> None:
    MLA(32, 4, rope_dim=0).bfloat16().check_steps()

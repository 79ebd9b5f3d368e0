"""MTLA with a window: strides, windows and first positions together, and what it is where nothing is merged."""

import itertools

import pytest
import torch

from attnlab.attention import MLA, MTLAWindow
from attnlab.attention.ops import naive
from tests.attention.mechanisms import error

CASES = list(itertools.product((1, 2, 3), (0, 1, 3), (0, 2)))


def small(stride: int, recent: int, first: int) -> MTLAWindow:
    torch.manual_seed(0)
    attention = (
        MTLAWindow(16, 2, head_dim=8, rope_dim=4, latent_dim=12, gate_dim=4, stride=stride, recent=recent, first=first)
        .double()
        .eval()
    )
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return attention


@pytest.mark.parametrize(("stride", "recent", "first"), CASES)
def test_parallel_and_cached_forms_are_the_formula(stride: int, recent: int, first: int) -> None:
    """After ragged prefixes and without, by steps and by chunks of several sizes."""
    attention = small(stride, recent, first)
    lengths = torch.tensor([0, 1, 2, 5, 9, 11])
    x, prefix = torch.randn(6, 13, 16, dtype=torch.float64), torch.randn(6, 11, 16, dtype=torch.float64)
    with torch.no_grad():
        both = {True: attention(x, prefix, prefix_lengths=lengths), False: attention(x)}
        for row, size in enumerate(lengths.tolist()):
            assert error(both[True][row], naive.attend(attention, x[row], prefix[row, :size])) < 1e-12
        assert error(both[False][0], naive.attend(attention, x[0])) < 1e-12
    for prefixed, chunks in itertools.product((True, False), ([1] * 13, [13], [4, 1, 1, 5, 2], [1, 2, 3, 1, 6])):
        cache = attention.new_cache(6, 13, 11 if prefixed else 0)
        if prefixed:
            attention.read_prefix(prefix, lengths, cache)
        out = torch.cat([attention.extend(part, cache) for part in x.split(chunks, 1)], 1)
        assert error(out, both[prefixed]) < 1e-12
        assert sum(buffer.numel() for buffer in cache.buffers()) == attention.cache_elements(6, 13, 11 * prefixed)


@pytest.mark.parametrize(("stride", "recent"), [(1, 0), (4, 13)])
def test_a_stride_of_one_and_a_window_as_long_as_the_text_are_mla(stride: int, recent: int) -> None:
    attention = small(stride, recent, 2)
    plain = MLA(16, 2, 8, 4, 12).double().eval()
    plain.load_state_dict({name: value for name, value in attention.state_dict().items() if "gate" not in name})
    x = torch.randn(2, 13, 16, dtype=torch.float64)
    assert error(attention(x), plain(x)) < 1e-12


def test_long_texts_are_computed_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    attention, x = small(3, 3, 2), torch.randn(2, 40, 16, dtype=torch.float64)
    want = attention(x)
    monkeypatch.setattr("attnlab.attention.mtla_window.BLOCK", 7)
    assert error(attention(x), want) < 1e-12

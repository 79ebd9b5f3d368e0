"""A sliding window: what is right about windowed, and that a false one is caught."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab.attention import MHA, SlidingWindow
from attnlab.attention.ops import naive
from attnlab.attention.ops.rope import rotate
from tests.attention.mechanisms import check_visibility, error, extend_by


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class InheritsTheForm(MHA):
    """As docs/how-to/own-attention.md shows a new mechanism: a change to MHA, without a naive form."""


def test_an_inherited_naive_form_is_refused() -> None:
    with pytest.raises(LookupError, match=r"InheritsTheForm has no naive form \(that of MHA is not inherited\)"):
        naive.attend(InheritsTheForm(8, 2).double(), draw(3, 8))


class SeesAll(SlidingWindow):
    """Declares a window, and reads all of the past."""

    def _forward(self, *arguments: Any) -> Tensor:
        return MHA._forward(self, *arguments)


class OffByOne(SlidingWindow):
    """Declares one position less than it reads."""

    def visible(self, position: int) -> range:
        return range(max(0, position - self.window + 2), position + 1)


class LosesASink(SlidingWindow):
    """Declares a first position less than it reads."""

    def visible(self, position: int) -> Sequence[int]:
        return [seen for seen in super().visible(position) if seen or not position]


def test_a_false_window_fails_the_check_of_visibility() -> None:
    check_visibility(SlidingWindow(8, 2, window=3).double(), 2, 7, draw(2, 2, 8))
    check_visibility(SlidingWindow(8, 2, window=3, sinks=2).double(), 2, 7, draw(2, 2, 8))
    for kind, sinks in ((SeesAll, 0), (SeesAll, 2), (OffByOne, 0), (LosesASink, 1)):
        with pytest.raises(AssertionError):
            check_visibility(kind(8, 2, window=3, sinks=sinks).double(), 2, 7, draw(2, 2, 8))


@pytest.mark.parametrize(
    ("window", "groups", "sinks"),
    [
        (1, 4, 0), (2, 1, 4), (63, 2, 0), (63, 2, 3), (64, 4, 1), (65, 1, 80), (100, 2, 0), (129, 4, 0), (129, 4, 1),
        (130, 1, 0), (131, 2, 0), (500, 4, 9),
    ],
)  # fmt: skip
def test_equals_a_dense_softmax_across_blocks(window: int, groups: int, sinks: int) -> None:
    """Longer than a block of queries; forward, gradients, and chunks."""
    attention, steps = SlidingWindow(32, 4, groups, window=window, sinks=sinks).double(), 130
    x, prefix, lengths = draw(2, steps, 32).requires_grad_(), draw(2, 5, 32), torch.tensor([5, 2])
    y = attention(x, prefix, prefix_lengths=lengths)
    want = dense(attention, x, prefix, lengths)
    assert error(y, want) < 1e-12
    g = torch.randn_like(y)
    assert error(torch.autograd.grad(y, x, g)[0], torch.autograd.grad(want, x, g)[0]) < 1e-11
    for chunks in ([steps], [1] * 3 + [70, 1, 1, 55], [64, 66], [100, *[1] * 30]):
        cache = attention.new_cache(2, steps, 5)
        attention.read_prefix(prefix, lengths, cache)
        assert error(extend_by(attention, x.detach(), cache, chunks), want) < 1e-12


def dense(attention: SlidingWindow, x: Tensor, prefix: Tensor, lengths: Tensor) -> Tensor:
    """One softmax per row over all of its keys, with a mask."""
    rows = []
    for row, before, size in zip(x, prefix, lengths.tolist(), strict=True):
        joint = torch.cat((before[:size], row))
        table, group = attention.rotary_table(len(joint), joint), 4 // attention.num_kv_heads
        q, k, v = (
            f(joint).unflatten(-1, (-1, 8)).transpose(0, 1) for f in (attention.query, attention.key, attention.value)
        )
        q, k, v = rotate(q, *table), rotate(k, *table).repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        i, j = torch.arange(len(joint))[:, None], torch.arange(len(joint))
        seen = (j <= i) & ((j < size + attention.sinks) | (i - j < attention.window))
        logits = (q @ k.mT * attention.head_dim**-0.5).masked_fill(~seen, float("-inf"))
        rows.append(attention.out((logits.softmax(-1) @ v).transpose(0, 1).flatten(1))[size:])
    return torch.stack(rows)


@pytest.mark.parametrize("window", [7, 8, 100])
def test_a_window_as_long_as_the_text_is_mha(window: int) -> None:
    windowed, mha = SlidingWindow(32, 4, 2, window=window).double(), MHA(32, 4, 2).double()
    mha.load_state_dict(windowed.state_dict())
    x, prefix = draw(2, 7, 32), draw(2, 4, 32)
    assert torch.equal(windowed(x), mha(x))
    assert error(windowed(x, prefix), mha(x, prefix)) < 1e-13
    assert windowed.multiply_adds(11, 4) == mha.multiply_adds(11)


def test_a_second_crop_accounts_for_what_was_overwritten_before_the_first() -> None:
    attention, x = SlidingWindow(32, 4, window=3).double(), draw(2, 8, 32)
    cache = attention.new_cache(2, 8)
    attention.extend(x[:, :7], cache)
    cache.crop(6)
    with pytest.raises(ValueError, match="cannot crop to 5 positions: of 7 the newest 3 are cached"):
        cache.crop(5)
    assert error(attention.extend(x[:, 6:], cache), attention(x)[:, 6:]) < 1e-12
    cache.crop(0)
    assert error(attention.extend(x[:, :2], cache), attention(x)[:, :2]) < 1e-12
    cache.crop(1)
    assert error(attention.extend(x[:, 1:2], cache), attention(x)[:, 1:2]) < 1e-12

"""The prefix decoder against its formula, and its caches against its parallel form."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from attnlab.attention.ops import naive
from attnlab.models import PrefixDecoder
from tests.attention.mechanisms import (
    EVERY,
    Mechanism,
    error,
    gates_of_other_steps,
    prefix_lengths,
    random_chunks,
)

SOME = [m for m in EVERY if m.name in ("mha", "mla_window", "mtla", "mtla_window", "tpa", "multilinear")]
some = pytest.mark.parametrize("mechanism", SOME, ids=str)
VOCAB = 11


def build(mechanism: Mechanism, **kwargs: bool) -> PrefixDecoder:
    """Two layers of different weights; norms and biases that count."""
    seeds = iter((1, 2))
    decoder = PrefixDecoder(
        VOCAB, 32, lambda _: mechanism.build(seed=next(seeds)), num_layers=2, ffn_dim=24, projector_dim=12, **kwargs
    )
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if ".attention." not in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return decoder.double().eval()


def draw(mechanism: Mechanism, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, prefixes and their lengths, ragged around the stride; nonsense in the padding."""
    lengths = prefix_lengths(mechanism.grid)
    prefix = torch.randn(len(lengths), int(lengths.max()), 32, dtype=torch.float64)
    prefix[torch.arange(prefix.shape[1]) >= lengths[:, None]] = 1e4
    return torch.randint(VOCAB, (len(lengths), steps)), prefix, lengths


@some
@pytest.mark.parametrize(("tied", "norm"), [(False, True), (True, False)])
def test_equals_the_formula(mechanism: Mechanism, tied: bool, norm: bool) -> None:
    """h = LN1(x);  u = LN1(x + attention(h, P));  z = LN2(u + W2 relu(W1 u));  P: the projected prefix."""
    decoder = build(mechanism, tie_embeddings=tied, final_norm=norm)
    tokens, prefix, lengths = draw(mechanism, 5)
    logits = decoder(tokens, prefix, lengths)
    for b in (0, len(lengths) // 2, len(lengths) - 1):
        down, _, up = decoder.projector
        projected = up(down(prefix[b, : lengths[b]]).clamp(min=0))
        x = math.sqrt(32) * decoder.embedding.weight[tokens[b]]
        for layer in decoder.blocks:
            u = layer.norm1(x + naive.attend(layer.attention, layer.norm1(x), projected))
            x = layer.norm2(u + layer.down(layer.up(u).clamp(min=0)))
        unembedding = decoder.embedding.weight if tied else decoder.unembedding.weight
        assert error(logits[b], (decoder.norm(x) if norm else x) @ unembedding.T) < 1e-11


@some
def test_steps_equal_the_parallel_form(mechanism: Mechanism) -> None:
    decoder, steps, rng = build(mechanism), 2 * mechanism.grid + 3, torch.Generator().manual_seed(0)
    tokens, prefix, lengths = draw(mechanism, steps)
    want = decoder(tokens, prefix, lengths)
    for chunks in ([1] * steps, [steps], random_chunks(steps, rng)):
        caches = decoder.start(prefix, lengths, beam=1, capacity=steps)
        logits = torch.cat([decoder.step(piece, caches) for piece in tokens.split(chunks, 1)], 1)
        assert error(logits, want) < 1e-11
        assert not logits.requires_grad


def test_the_padding_piece_is_zero_and_stays_so() -> None:
    decoder = PrefixDecoder(VOCAB, 32, lambda _: EVERY[0].build(dtype=torch.float32), num_layers=1, ffn_dim=8, pad=3)
    assert not decoder.embedding.weight[3].any()
    decoder(torch.tensor([[0, 3, 4]]), torch.randn(1, 2, 32)).sum().backward()
    assert decoder.embedding.weight.grad is not None
    assert not decoder.embedding.weight.grad[3].any() and decoder.embedding.weight.grad[4].any()


@pytest.mark.parametrize("rate", ["dropout", "activation_dropout"])
def test_dropout_acts_in_training_only(rate: str) -> None:
    seeds = iter((1, 2))
    attention = lambda _: EVERY[0].build(seed=next(seeds), dtype=torch.float32)  # noqa: E731
    rates: dict[str, Any] = {rate: 0.5}
    decoder = PrefixDecoder(VOCAB, 32, attention, num_layers=2, ffn_dim=24, **rates)
    tokens, prefix = torch.randint(VOCAB, (2, 6)), torch.randn(2, 4, 32)
    assert not torch.equal(decoder(tokens, prefix), decoder(tokens, prefix))
    decoder.eval()
    assert torch.equal(decoder(tokens, prefix), decoder(tokens, prefix))


@some
def test_multiply_adds_of_a_step_are_as_counted(mechanism: Mechanism) -> None:
    decoder = build(mechanism)
    caches = decoder.start(torch.randn(1, 4, 32, dtype=torch.float64), None, 1, 9)
    decoder.step(torch.zeros(1, 7, dtype=torch.int64), caches)
    with FlopCounterMode(display=False) as counter:
        decoder.step(torch.zeros(1, 1, dtype=torch.int64), caches)
    # The gate's inner product is elementwise and not counted.
    twice = mechanism.name == "tpa_noncontextual_b"  # learned value factors: read for the prefix and for the text
    counted = counter.get_total_flops() / 2 + sum(gates_of_other_steps(a, 12) for a in decoder.attentions)
    assert counted == pytest.approx(decoder.multiply_adds(12, 4), rel=2e-2 if twice else 2e-3)

"""Encoder forms, the text encoder, the cross-attention decoder."""

import math

import pytest
import torch
from torch import Tensor, nn

from attnlab.attention import MHA, MLA, MTLA, Attention
from attnlab.attention.base import length_mask
from attnlab.attention.ops import naive
from attnlab.models import CrossDecoder, EncoderDecoder, TextEncoder, TextToText
from attnlab.models.build import build_model
from tests.attention.mechanisms import EVERY, Mechanism, composed, error

LENGTHS = torch.tensor([7, 4, 1, 6])
WIDTH = 32


def inputs(seed: int = 0) -> Tensor:
    return torch.randn(len(LENGTHS), int(LENGTHS.max()), WIDTH, generator=torch.Generator().manual_seed(seed)).double()


def encoded(m: Attention, x: Tensor) -> Tensor:
    """One row (T, d): every query over every key, or over every slot: a full chunk or what there is of the last."""
    every = [list(range(len(x)))] * len(x)
    if isinstance(m, MHA):
        return naive.read_keys(m, x, None, naive.half_split, every)
    assert isinstance(m, MLA)
    latents, keys = naive.latents(m, x, None, naive.half_split)
    if isinstance(m, MTLA):
        latents = naive.merged(m, latents)
        every = [[j for j in range(len(x)) if (j + 1) % m.stride == 0 or j + 1 == len(x)]] * len(x)
    return naive.read_latents(m, x, None, naive.half_split, latents, keys, every)


@pytest.mark.parametrize("mechanism", EVERY, ids=str)
def test_encoder_form_sees_all_of_its_row_and_nothing_else(mechanism: Mechanism) -> None:
    attention, x = mechanism.build(f"task.model.d_model={WIDTH}"), inputs().requires_grad_()
    out = attention.encode(x, LENGTHS)
    for row, length in enumerate(LENGTHS.tolist()):
        (grad,) = torch.autograd.grad(out[row, 0].sum(), x, retain_graph=True)
        seen = grad.abs().sum(-1) > 0
        reach = torch.tensor([0 in attention.visible(j) for j in range(length)])  # a window is one on both sides
        if mechanism.sinks:  # of which position 0 is one
            reach = torch.arange(length) < max(mechanism.sinks, mechanism.window or 0)
        assert torch.equal(seen[row, :length], reach) and seen.sum() == reach.sum()


@pytest.mark.parametrize("mechanism", [m for m in EVERY if m.name in ("mha", "mqa", "gqa", "mla", "mtla")], ids=str)
def test_encoder_form_is_the_formula(mechanism: Mechanism) -> None:
    attention = mechanism.build(f"task.model.d_model={WIDTH}")
    x = inputs()
    x.requires_grad_()
    out = attention.encode(x, LENGTHS)
    want = [encoded(attention, x[i, :n]) for i, n in enumerate(LENGTHS.tolist())]
    for i, n in enumerate(LENGTHS.tolist()):
        assert error(out[i, :n], want[i]) < 1e-10
    weights = [torch.randn_like(w) for w in want]
    fast = sum((out[i, : len(w)] * w).sum() for i, w in enumerate(weights))
    slow = sum((a * b).sum() for a, b in zip(want, weights, strict=True))
    for got, expected in zip(
        torch.autograd.grad(fast, [x, *attention.parameters()], retain_graph=True),  # type: ignore[arg-type]
        torch.autograd.grad(slow, [x, *attention.parameters()]),  # type: ignore[arg-type]
        strict=True,
    ):
        assert (got - expected).abs().max() <= 1e-9 * expected.abs().max().clamp(min=1)


def small(pre_norm: bool, attention: bool = True, dropout: float = 0.0) -> tuple[TextEncoder, CrossDecoder]:
    torch.manual_seed(1)

    def make(layer: int) -> Attention:
        return MHA(WIDTH, 4)

    encoder = TextEncoder(13, WIDTH, 2, 4, 24, dropout, pre_norm=pre_norm, attention=make if attention else None)
    return encoder.double().eval(), CrossDecoder(13, WIDTH, make, 2, 4, 24, dropout, pre_norm).double().eval()


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("attention", [False, True])
def test_padding_changes_nothing_in_the_encoder(pre_norm: bool, attention: bool) -> None:
    encoder, _ = small(pre_norm, attention)
    tokens = torch.randint(4, 13, (4, 7)).masked_fill(~length_mask(LENGTHS, 7), 1)
    with torch.no_grad():
        out, lengths = encoder(tokens, LENGTHS)
        assert lengths.equal(LENGTHS)
        for row, length in enumerate(LENGTHS.tolist()):
            alone, _ = encoder(tokens[row : row + 1, :length], LENGTHS[row : row + 1])
            assert error(out[row, :length], alone[0]) < 1e-10


def test_reordered_and_dropped_rows_of_the_cross_decoder() -> None:
    _, decoder = small(True)
    prefix, text = inputs(), torch.randint(4, 13, (8, 4))
    rows, sentences = torch.tensor([1, 1, 2, 3, 5, 4, 6, 6]), torch.tensor([0, 2])
    with torch.no_grad():
        caches = decoder.start(prefix, LENGTHS, 2, 5)
        decoder.step(text, caches)
        for cache in caches:
            cache.reorder(rows)
            cache.select(sentences)
        remaining = torch.cat((text[rows], torch.full((8, 1), 5)), 1).view(4, 2, -1)[sentences].flatten(0, 1)
        got = decoder.step(remaining[:, -1:], caches)
        want = decoder(remaining, prefix[sentences].repeat_interleave(2, 0), LENGTHS[sentences].repeat_interleave(2))[
            :, -1:
        ]
    assert error(got, want) < 1e-10


def test_cross_attention_is_the_formula() -> None:
    _, decoder = small(False)
    cross = decoder.blocks[0].cross
    x, prefix = inputs(3), inputs(4)
    got = cross(x, prefix, LENGTHS)
    for row, length in enumerate(LENGTHS.tolist()):
        q, k, v = cross.query(x[row]), cross.key(prefix[row, :length]), cross.value(prefix[row, :length])
        heads = [
            (q[:, h] @ k[:, h].T / math.sqrt(8)).softmax(-1) @ v[:, h]
            for h in (slice(i, i + 8) for i in range(0, 32, 8))
        ]
        assert error(got[row], cross.out(torch.cat(heads, -1))) < 1e-10


def test_one_embedding_serves_all() -> None:
    def encoder(**sizes: object) -> nn.Module:
        return TextEncoder(num_layers=1, ffn_dim=8, **sizes)  # type: ignore[arg-type]

    def decoder(**sizes: object) -> CrossDecoder:
        return CrossDecoder(num_layers=1, num_heads=4, ffn_dim=8, **sizes)  # type: ignore[arg-type]

    def mla(layer: int) -> Attention:
        return MLA(WIDTH, 4)

    places: dict[str, tuple[type[Attention], ...]] = {"encoder": (MLA, MHA), "decoder": (MHA, MLA), "both": (MLA, MLA)}
    for place, kinds in places.items():
        model = EncoderDecoder(WIDTH, encoder, decoder, lambda: MHA(WIDTH, 4), place, attention=mla, vocab_size=13)  # type: ignore[arg-type]
        assert model.encoder.embedding is model.decoder.embedding
        assert type(model.encoder.layers[0].attention) is kinds[0]
        assert type(model.decoder.attentions[0]) is kinds[1]


def test_the_summariser_has_two_embeddings() -> None:
    model = build_model(composed("mha", "task=xsum", "scale=sample"), vocab_size=13)
    assert isinstance(model, TextToText)
    assert model.encoder.embedding is not model.decoder.embedding
    assert model.decoder.unembedding.weight is model.decoder.embedding.weight

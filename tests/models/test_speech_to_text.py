"""Encoder, decoder and CTC head together, as a run builds them."""

from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from attnlab.models import CrossDecoder, SpeechToText
from attnlab.models.build import build_model
from tests.attention.mechanisms import NAMES, TINY, composed, error

SMALL = (
    *TINY,
    "task.data.features.num_mels=6",
    "task.model.encoder={num_layers: 2, num_heads: 4, ffn_dim: 24, conv_channels: 20, dropout: 0.0}",
    "task.model.encoder.conv_kernels=[5,5]",
    "task.model.decoder={num_layers: 2, ffn_dim: 24, projector_dim: 12, dropout: 0.0}",
)
FRAMES = torch.tensor([23, 9, 16])
SOME = ("mha", "mla", "mtla_window", "tpa", "multilinear")


def build(name: str) -> SpeechToText:
    short = ["attention.recent=2", "attention.first=1"] if name == "mtla_window" else []  # shorter than the texts
    return build_model(composed(name, *SMALL, *short), vocab_size=13).double()


@pytest.mark.parametrize("name", NAMES)
def test_a_padded_row_gets_what_it_gets_alone(name: str) -> None:
    model = build(name).eval()
    features, tokens = torch.zeros(3, 25, 6, dtype=torch.float64), torch.randint(13, (3, 7))
    for row, frames in zip(features, FRAMES, strict=True):
        row[:frames].normal_()
    logits, encoded, lengths = model(features, FRAMES, tokens)
    assert logits.shape == (3, 7, 13) and encoded.shape == (3, 7, 32) and lengths.tolist() == [6, 3, 4]
    for b, frames in enumerate(FRAMES):
        alone, alone_encoded, size = model(features[b : b + 1, :frames], FRAMES[b : b + 1], tokens[b : b + 1, : b + 5])
        assert error(logits[b : b + 1, : b + 5], alone) < 1e-11
        assert error(encoded[b : b + 1, : lengths[b]], alone_encoded) < 1e-11 and size == lengths[b]


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("more", [{}, {"pre_norm": True, "projector_dim": None}], ids=["post-norm", "pre-norm"])
def test_a_decoder_with_cross_attention_in_the_prefix_decoders_place(name: str, more: dict[str, Any]) -> None:
    """Its cached steps equal the parallel form, and every weight learns."""
    short = ["attention.recent=2", "attention.first=1"] if name == "mtla_window" else []
    cfg = composed(name, *SMALL, *short, "task.attention_prefix=false")
    OmegaConf.set_struct(cfg, False)
    cfg.task.model.decoder.update({"_target_": "attnlab.models.CrossDecoder", "num_heads": 4, **more})
    model = build_model(cfg, vocab_size=13).double()
    assert isinstance(model.decoder, CrossDecoder) and model.decoder.unembedding is not None
    features, text = torch.randn(3, 23, 6, dtype=torch.float64), torch.randint(4, 13, (6, 7))
    logits, _, _ = model(features, FRAMES, text[::2])
    logits.square().sum().backward()
    for weight, parameter in model.named_parameters():
        shifts = weight.endswith("cross.key.bias")  # all logits of a query alike, so that softmax takes it out
        assert parameter.grad is not None and (shifts or parameter.grad.abs().max() > 1e-9), weight
    model.eval()
    with torch.no_grad():
        prefix, lengths = model.encoder(features, FRAMES)
        parallel = model.decoder(text, prefix.repeat_interleave(2, 0), lengths.repeat_interleave(2))
        caches = model.decoder.start(prefix, lengths, 2, 7)
        parts = [model.decoder.step(part, caches) for part in text.split([1, 1, 2, 1, 1, 1], 1)]
    assert error(torch.cat(parts, 1), parallel) < 1e-10
    assert sum(c.nbytes for c in caches) == model.decoder.cache_bytes(6, 7, prefix.shape[1], 3, dtype=torch.float64)

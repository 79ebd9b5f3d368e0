"""Text in, text out: after a prefix, or beside one."""

from collections.abc import Callable
from typing import Literal, get_args

from torch import Tensor, nn

from attnlab.attention import Attention
from attnlab.config.bounds import PositiveInt
from attnlab.models.cross_decoder import CrossDecoder
from attnlab.models.prefix_decoder import PrefixDecoder


class TextToText(nn.Module):
    """Text encoder and prefix decoder: the MTLA paper's summariser. One vocabulary, two embeddings."""

    ctc = None

    def __init__(
        self,
        d_model: PositiveInt,
        encoder: Callable[..., nn.Module],
        decoder: Callable[..., PrefixDecoder],
        *,
        attention: Callable[[int], Attention],
        vocab_size: PositiveInt,
    ) -> None:
        super().__init__()
        self.encoder = encoder(vocab_size=vocab_size, d_model=d_model)
        self.decoder = decoder(vocab_size=vocab_size, d_model=d_model, attention=attention)

    def forward(self, tokens: Tensor, lengths: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, S), (B,), (B, T) -> logits (B, T, V), encoder output (B, S, d), its lengths (B,)."""
        encoded, lengths = self.encoder(tokens, lengths)
        return self.decoder(text, encoded, lengths), encoded, lengths


class EncoderDecoder(nn.Module):
    """The Transformer of Vaswani et al. (2017) with one embedding for source, target and output.

    attention_in: where the chosen mechanism stands: "encoder" (Tensorized Transformer, section 5.3), "decoder" (its
    self-attention, which is cached), or "both"; `ordinary` makes the attention of the other place.
    """

    ctc = None

    def __init__(
        self,
        d_model: PositiveInt,
        encoder: Callable[..., nn.Module],
        decoder: Callable[..., CrossDecoder],
        ordinary: Callable[[], Attention],
        attention_in: Literal["encoder", "decoder", "both"] = "encoder",
        *,
        attention: Callable[[int], Attention],
        vocab_size: PositiveInt,
    ) -> None:
        super().__init__()
        if attention_in not in get_args(Literal["encoder", "decoder", "both"]):
            raise ValueError(f"attention_in={attention_in}: it is encoder, decoder or both")
        inside, outside = (
            attention if attention_in in (place, "both") else lambda layer: ordinary()
            for place in ("encoder", "decoder")
        )
        self.encoder = encoder(vocab_size=vocab_size, d_model=d_model, attention=inside)
        self.decoder = decoder(vocab_size=vocab_size, d_model=d_model, attention=outside)
        self.encoder.embedding = self.decoder.embedding

    def forward(self, tokens: Tensor, lengths: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, S), (B,), (B, T) -> logits (B, T, V), encoder output (B, S, d), its lengths (B,)."""
        encoded, lengths = self.encoder(tokens, lengths)
        return self.decoder(text, encoded, lengths), encoded, lengths

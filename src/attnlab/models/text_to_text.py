"""Text to text: the encoder's output as a prefix of the decoder, or read by cross-attention."""

from collections.abc import Callable
from typing import Literal, get_args

from torch import nn

from attnlab.attention import Attention
from attnlab.config.bounds import Size
from attnlab.models.cross_decoder import CrossDecoder
from attnlab.models.prefix_decoder import PrefixDecoder
from attnlab.models.sequence import SequenceModel


class TextToText(SequenceModel):
    """Text encoder and prefix decoder: the MTLA paper's summariser. One vocabulary, two embeddings.

    Args:
        d_model: width of encoder and decoder.
        encoder: called with `vocab_size` and `d_model`.
        decoder: called with `vocab_size`, `d_model` and `attention`.
        attention: called with the number of a layer, returns its mechanism.
        vocab_size: pieces V.
    """

    ctc = None

    def __init__(
        self,
        d_model: Size,
        encoder: Callable[..., nn.Module],
        decoder: Callable[..., PrefixDecoder],
        *,
        attention: Callable[[int], Attention],
        vocab_size: Size,
    ) -> None:
        super().__init__()
        self.encoder = encoder(vocab_size=vocab_size, d_model=d_model)
        self.decoder = decoder(vocab_size=vocab_size, d_model=d_model, attention=attention)


class EncoderDecoder(SequenceModel):
    """The Transformer of Vaswani et al. (2017) with one embedding for source, target and output.

    Args:
        d_model: width of encoder and decoder.
        encoder, decoder: called with `vocab_size`, `d_model` and `attention`.
        ordinary: returns the attention of the place that does not get the chosen mechanism.
        attention_in: where the chosen mechanism is used: "encoder" (Tensorized Transformer, section 5.3), "decoder" (in
            its self-attention, which is cached), or "both".
        attention: called with the number of a layer, returns its mechanism.
        vocab_size: pieces V.

    ValueError: `attention_in` is something else.
    """

    ctc = None

    def __init__(
        self,
        d_model: Size,
        encoder: Callable[..., nn.Module],
        decoder: Callable[..., CrossDecoder],
        ordinary: Callable[[], Attention],
        attention_in: Literal["encoder", "decoder", "both"] = "encoder",
        *,
        attention: Callable[[int], Attention],
        vocab_size: Size,
    ) -> None:
        super().__init__()
        if attention_in not in get_args(Literal["encoder", "decoder", "both"]):
            raise ValueError(f"attention_in={attention_in}: expected encoder, decoder or both")
        inside, outside = (
            attention if attention_in in (place, "both") else lambda layer: ordinary()
            for place in ("encoder", "decoder")
        )
        self.encoder = encoder(vocab_size=vocab_size, d_model=d_model, attention=inside)
        self.decoder = decoder(vocab_size=vocab_size, d_model=d_model, attention=outside)
        self.encoder.embedding = self.decoder.embedding

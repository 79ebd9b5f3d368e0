"""Speech (or any feature sequence) to text: an encoder, a decoder, and optionally a CTC head."""

from collections.abc import Callable

from torch import nn

from attnlab.attention import Attention
from attnlab.config.bounds import Size
from attnlab.models.cross_decoder import CrossDecoder
from attnlab.models.prefix_decoder import PrefixDecoder
from attnlab.models.sequence import SequenceModel


class SpeechToText(SequenceModel):
    """Encoder and decoder of one width: the MTLA paper's prefix decoder, or one with cross-attention.

    Args:
        d_model: width of encoder and decoder.
        encoder: called with `d_model`.
        decoder: called with `vocab_size`, `d_model` and `attention`.
        attention: called with the number of a layer, returns its mechanism.
        vocab_size: pieces V of the text.
        ctc_vocab_size: classes of a linear CTC head on the encoder's output; None: no head.
    """

    def __init__(
        self,
        d_model: Size,
        encoder: Callable[..., nn.Module],
        decoder: Callable[..., PrefixDecoder | CrossDecoder],
        *,
        attention: Callable[[int], Attention],
        vocab_size: Size,
        ctc_vocab_size: Size | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder(d_model=d_model)
        self.decoder = decoder(vocab_size=vocab_size, d_model=d_model, attention=attention)
        self.ctc = None if ctc_vocab_size is None else nn.Linear(d_model, ctc_vocab_size)

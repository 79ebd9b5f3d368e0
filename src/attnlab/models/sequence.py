"""Sequence-to-text models: an encoder, a decoder that reads its output, and token losses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from attnlab.attention import Attention
from attnlab.config.bounds import Size
from attnlab.models.cross_decoder import CrossDecoder
from attnlab.models.prefix_decoder import PrefixDecoder
from attnlab.models.token_loss import in_chunks, nats


class TokenLosses(NamedTuple):
    """Token losses of a batch, and the encoder's output.

    Args:
        smoothed: (B, T) negative log-probability with smoothed labels, in nats; 0 at padding.
        plain: (B, T) without smoothing; without gradients unless it is `smoothed`.
        right: (B, T) bool, whether the target is the most probable token.
        encoded: (B, S', d) output of the encoder.
        lengths: (B,) its lengths.
    """

    smoothed: Tensor
    plain: Tensor
    right: Tensor
    encoded: Tensor
    lengths: Tensor


class SequenceModel(nn.Module):
    """An encoder and a decoder.

    Attributes:
        loss_chunk: number of tokens whose logits are computed at a time in :meth:`token_losses`; None: all.
    """

    encoder: Any
    decoder: Any
    loss_chunk: int | None = None

    def forward(self, inputs: Tensor, lengths: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, S, ...), (B,), (B, T) -> logits (B, T, V), encoder output (B, S', d) and its lengths (B,)."""
        encoded, lengths = self.encoder(inputs, lengths)
        return self.decoder(text, encoded, lengths), encoded, lengths

    @property
    def compilable_encoder(self) -> bool:
        """Whether one compiled encoder supports all lengths. Encoders with mechanisms depend on the lengths."""
        return not getattr(self.encoder, "mechanism", False)

    def losses_of_states(
        self, hidden: Tensor, targets: Tensor, pad: int, smoothing: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Decoder states (n, d), targets (n,) -> smoothed loss, plain loss, and correctness of the target, (n,) each.

        `smoothing` is the probability that is distributed over all tokens.
        """
        logits = self.decoder.logits(hidden)
        smoothed = plain = nats(logits, targets, ignore_index=pad, label_smoothing=smoothing)
        with torch.no_grad():
            if smoothing:
                plain = nats(logits, targets, ignore_index=pad)
            right = logits.argmax(-1) == targets
        return smoothed, plain, right

    def token_losses(
        self,
        inputs: Tensor,
        lengths: Tensor,
        text: Tensor,
        targets: Tensor,
        pad: int,
        smoothing: float = 0.0,
        compiled: Callable[[Any], Any] | None = None,
    ) -> TokenLosses:
        """The loss of each target.

        Args:
            inputs: features (B, S, F) or ids (B, S).
            lengths: lengths of the inputs, (B,).
            text: tokens that the decoder reads, (B, T).
            targets: (B, T).
            smoothing: probability that is distributed over all tokens.
            compiled: returns the compiled form of :meth:`losses_of_states`, and of the encoder's `forward` if that is
                compilable; None: neither is compiled.
        """
        encode, of_states = self.encoder, self.losses_of_states
        if compiled is not None:
            of_states = compiled(of_states)
            encode = compiled(encode.forward) if self.compilable_encoder else encode
        encoded, lengths = encode(inputs, lengths)
        hidden = self.decoder.hidden(text, encoded, lengths)
        losses = partial(of_states, pad=pad, smoothing=smoothing)
        results = in_chunks(losses, (hidden.flatten(0, 1), targets.flatten()), self.loss_chunk)
        smoothed, plain, right = (value.view_as(targets) for value in results)
        return TokenLosses(smoothed, plain, right, encoded, lengths)


class SpeechToText(SequenceModel):
    """Speech encoder and a text decoder: the MTLA paper's prefix decoder, or one with cross-attention.

    Args:
        encoder: called with `d_model`.
        decoder: called with `vocab_size`, `d_model` and `attention`.
        attention: called with the index of a layer, returns its mechanism.
        ctc_vocab_size: number of classes of a linear CTC head on the encoder's output; None: no head.
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


class TextToText(SequenceModel):
    """Text encoder and prefix decoder of the MTLA paper's summariser, with one vocabulary and two embeddings.

    Args:
        encoder: called with `vocab_size` and `d_model`.
        decoder: called with `vocab_size`, `d_model` and `attention`.
        attention: called with the index of a layer, returns its mechanism.
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
        encoder, decoder: called with `vocab_size`, `d_model` and `attention`.
        ordinary: returns the attention of the part that does not use the configured mechanism.
        attention_in: part that uses the configured mechanism: "encoder" (Tensorized Transformer, section 5.3),
            "decoder" (its cached self-attention), or "both".
        attention: called with the index of a layer, returns its mechanism.
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
        inside, outside = (
            attention if attention_in in (place, "both") else lambda layer: ordinary()
            for place in ("encoder", "decoder")
        )
        self.encoder = encoder(vocab_size=vocab_size, d_model=d_model, attention=inside)
        self.decoder = decoder(vocab_size=vocab_size, d_model=d_model, attention=outside)
        self.encoder.embedding = self.decoder.embedding

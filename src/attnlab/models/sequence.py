"""What the sequence-to-text models share: an encoder, a decoder that reads its output, and the loss of each token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnlab.models.token_loss import in_chunks, nats


class TokenLosses(NamedTuple):
    """Of one batch.

    Args:
        smoothed: (B, T) negative log-probability with smoothed labels, in nats; 0 at padding.
        plain: (B, T) without smoothing, and without gradients where `smoothed` has them.
        right: (B, T) bool, whether the target is the most probable token.
        encoded: (B, S', d) the encoder's output.
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
        loss_chunk: tokens whose logits exist at once in :meth:`token_losses`; None: all.
    """

    encoder: Any
    decoder: Any
    loss_chunk: int | None = None

    def forward(self, inputs: Tensor, lengths: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, S, ...), (B,), (B, T) -> logits (B, T, V), encoder output (B, S', d), its lengths (B,)."""
        encoded, lengths = self.encoder(inputs, lengths)
        return self.decoder(text, encoded, lengths), encoded, lengths

    @property
    def compilable_encoder(self) -> bool:
        """Whether one compiled form of the encoder serves all lengths: not with mechanisms, which depend on them."""
        return not getattr(self.encoder, "mechanism", False)

    def losses_of_states(
        self, hidden: Tensor, targets: Tensor, pad: int, smoothing: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """States (n, d) and targets (n,) -> smoothed loss, plain loss, and whether the target is the best, (n,) each.

        Args:
            hidden: the decoder's.
            targets: ids.
            pad: the target that does not count.
            smoothing: probability that is spread over all tokens.
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
            lengths: of the inputs, (B,).
            text: the tokens that the decoder reads, (B, T).
            targets: (B, T).
            pad: the target that does not count.
            smoothing: probability that is spread over all tokens.
            compiled: gives the compiled form of :meth:`losses_of_states`, and of the encoder's `forward` where that is
                compilable; None: neither is compiled.
        """
        encode, of_states = self.encoder, self.losses_of_states
        if compiled is not None:
            of_states = compiled(of_states)
            encode = compiled(encode.forward) if self.compilable_encoder else encode
        encoded, lengths = encode(inputs, lengths)
        hidden = self.decoder.hidden(text, encoded, lengths)

        def losses(h: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            found: tuple[Tensor, Tensor, Tensor] = of_states(h, t, pad, smoothing)
            return found

        found = in_chunks(losses, (hidden.flatten(0, 1), targets.flatten()), self.loss_chunk)
        smoothed, plain, right = (value.view_as(targets) for value in found)
        return TokenLosses(smoothed, plain, right, encoded, lengths)

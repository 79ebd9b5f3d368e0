"""Sequence in, text out: one LightningModule for translation, recognition, understanding and summaries."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnlab.data.batch import Batch
from attnlab.data.text.tokenizer import Tokenizer
from attnlab.decoding import BeamSearch, Decodable, Hypothesis
from attnlab.models import EncoderDecoder, SpeechToText, TextToText
from attnlab.training.module import Module, at_least_float32

Model = SpeechToText | TextToText | EncoderDecoder


class SequenceToText(Module):
    """Trains a model with label-smoothed cross-entropy on the text and, on request, CTC on the encoder's output.

    first_token_weight: how many times the first token's cross-entropy counts (the class, where a text begins with one).
    """

    model: Model

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        *,
        label_smoothing: float = 0.0,
        ctc_weight: float = 0.0,
        first_token_weight: float = 1.0,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        if ctc_weight and model.ctc is None:
            raise ValueError("ctc_weight is set, but the model has no CTC head")
        self.model, self.tokenizer, self.ctc_weight = model, tokenizer, ctc_weight
        self.first_token_weight = first_token_weight
        self.first_right = torch.tensor(0)
        # Published smoothing spreads eps over the V - 1 other tokens, torch's over all V.
        self.smoothing = label_smoothing * tokenizer.size / (tokenizer.size - 1)

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sums over the batch: training loss, cross-entropy without smoothing, right tokens, tokens."""
        tokens = torch.cat((torch.full_like(batch.targets[:, :1], Tokenizer.eos), batch.targets[:, :-1]), 1)
        logits, encoded, lengths = self.model(batch.features, batch.feature_lengths, tokens)
        flat, target = at_least_float32(logits.flatten(0, 1)), batch.targets.flatten()
        loss = F.cross_entropy(
            flat,
            target,
            ignore_index=Tokenizer.pad,
            reduction="sum",
            label_smoothing=self.smoothing if self.training else 0,
        )
        with torch.no_grad():
            real = target != Tokenizer.pad
            plain = (
                loss
                if not self.training
                else F.cross_entropy(flat, target, ignore_index=Tokenizer.pad, reduction="sum")
            )
            right = ((flat.argmax(-1) == target) & real).sum()
            self.first_right = (logits[:, 0].argmax(-1) == batch.targets[:, 0]).sum()
        if self.training and self.first_token_weight != 1.0:
            first = F.cross_entropy(
                at_least_float32(logits[:, 0]), batch.targets[:, 0], reduction="sum", label_smoothing=self.smoothing
            )
            loss = loss + (self.first_token_weight - 1) * first
        if self.ctc_weight and self.training:
            assert self.model.ctc is not None and batch.ctc_targets is not None and batch.ctc_target_lengths is not None
            logp = at_least_float32(self.model.ctc(encoded)).log_softmax(-1).transpose(0, 1)
            ctc = F.ctc_loss(
                logp,
                batch.ctc_targets,
                lengths,
                batch.ctc_target_lengths,
                blank=Tokenizer.bos,
                reduction="sum",
                zero_infinity=True,
            )
            real_labels = 0 if batch.filler else batch.ctc_target_lengths.sum()
            self.tally("ctc_loss", 0 * ctc if batch.filler else ctc, real_labels)
            loss = loss + self.ctc_weight * ctc
        return loss, plain, right, real.sum()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if self.tokenizer.labels:
            self.tally("val_intent_accuracy", self.first_right, len(batch))

    def counts(self, batch: Batch) -> bool:
        return not batch.filler

    def first_of(self, batch: Batch) -> Callable[[], str]:
        first = batch.ids[0]
        return lambda: first

    @torch.inference_mode()
    def decode(
        self,
        batch: Batch,
        search: BeamSearch,
        dtype: torch.dtype | None = None,
        decoder: Decodable | None = None,
        first: list[int] | None = None,
    ) -> list[list[Hypothesis]]:
        """The search's hypotheses of each utterance, best first; caches in `dtype`; `first`: what they begin with."""
        prefix, lengths = self.model.encoder(batch.features, batch.feature_lengths)
        return search(
            decoder or self.model.decoder,
            prefix,
            lengths,
            bos=Tokenizer.eos,
            eos=Tokenizer.eos,
            pad=Tokenizer.pad,
            dtype=dtype,
            first=first,
        )

    def text(self, hypotheses: list[Hypothesis]) -> str:
        """The best hypothesis, detokenised, without its class; empty where the search ended none."""
        return self.tokenizer.decode([t for t in hypotheses[0].tokens if t != Tokenizer.eos]) if hypotheses else ""

    def label(self, hypotheses: list[Hypothesis]) -> str:
        """The class that the best hypothesis begins with; empty where it begins with none."""
        return self.tokenizer.label_of(hypotheses[0].tokens) if hypotheses else ""

"""Sequence in, text out: one LightningModule for translation, recognition, understanding and summaries."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.nn import functional as F

from attnlab.attention import Cache
from attnlab.callbacks.cost import now
from attnlab.callbacks.scoring import Scored, update
from attnlab.data.sequence_to_text import Batch
from attnlab.data.text.tokenizer import Tokenizer
from attnlab.decoding import BeamSearch, Decodable, Hypothesis
from attnlab.errors import DataError
from attnlab.metrics.text import TextMetric
from attnlab.models import CrossDecoder, EncoderDecoder, PrefixDecoder, SpeechToText, TextToText
from attnlab.models.token_loss import at_least_float32
from attnlab.training.module import COMPILED_STEPS, Compiled, Module

Model = SpeechToText | TextToText | EncoderDecoder


class SequenceToText(Module):
    """Trains a model with label-smoothed cross-entropy on the text and, on request, CTC on the encoder's output.

    Args:
        cache_dtype: of the caches while decoding; None: that of the encoder's output.
        classify: whether a second search finds the first token among the classes alone.
        label_smoothing: probability that the other tokens share.
        ctc_weight: of the CTC loss; 0: none.
        first_token_weight: how many times the first token's cross-entropy counts (the class, where a text begins with
            one).
        settings: arguments of `Module`.
    """

    model: Model
    compiled_steps_part = COMPILED_STEPS

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        search: BeamSearch,
        *,
        cache_dtype: torch.dtype | None = None,
        classify: bool = False,
        label_smoothing: float = 0.0,
        ctc_weight: float = 0.0,
        first_token_weight: float = 1.0,
        compile: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        if ctc_weight and model.ctc is None:
            raise ValueError("ctc_weight is set, but the model has no CTC head")
        self.model, self.tokenizer, self.ctc_weight = model, tokenizer, ctc_weight
        self.search, self.cache_dtype, self.classify = search, cache_dtype, classify
        self.first_token_weight = first_token_weight
        self.first_right = torch.tensor(0)
        # Published smoothing spreads eps over the V - 1 other tokens, torch's over all V.
        self.smoothing = label_smoothing * tokenizer.size / (tokenizer.size - 1)
        self._compiled, self._compiled_steps = Compiled(compile, dynamic=True), Compiled(compile)
        self._decoded_tokens = 0
        self._validation: tuple[TextMetric, dict[int, int], BeamSearch] | None = None  # with the places in the metric

    def configure_model(self) -> None:
        super().configure_model()
        if isinstance(self.model, FSDPModule):  # which gathers and frees parameters around calls of forward alone
            register_fsdp_forward_method(self.model, "token_losses")

    @property
    def compiled_part(self) -> str:  # type: ignore[override]
        """Mechanisms choose their block sizes by length, so that a decoder would be compiled again for each."""
        parts = ["the loss over the vocabulary, for sequences of any length"]
        parts = ["the encoder", *parts] if self.model.compilable_encoder else parts
        return f"{' and '.join(parts)}, in training and validation; not layers with mechanisms; {COMPILED_STEPS}"

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sums over the batch: training loss, cross-entropy without smoothing, right tokens, tokens."""
        tokens = torch.cat((torch.full_like(batch.targets[:, :1], Tokenizer.eos), batch.targets[:, :-1]), 1)
        out = self.model.token_losses(
            batch.features,
            batch.feature_lengths,
            tokens,
            batch.targets,
            Tokenizer.pad,
            self.smoothing if self.training else 0.0,
            self._compiled or None,
        )
        loss, plain = out.smoothed.sum(), out.plain.sum()
        with torch.no_grad():
            real = batch.targets != Tokenizer.pad
            right = (out.right & real).sum()
            self.first_right = out.right[:, 0].sum()
        if self.training and self.first_token_weight != 1.0:
            loss = loss + (self.first_token_weight - 1) * out.smoothed[:, 0].sum()
        if self.ctc_weight and self.training:
            assert self.model.ctc is not None and batch.ctc_targets is not None and batch.ctc_target_lengths is not None
            logp = at_least_float32(self.model.ctc(out.encoded)).log_softmax(-1).transpose(0, 1)
            ctc = F.ctc_loss(
                logp,
                batch.ctc_targets,
                out.lengths,
                batch.ctc_target_lengths,
                blank=Tokenizer.bos,
                reduction="sum",
                zero_infinity=True,
            )
            real_labels = 0 if batch.filler else batch.ctc_target_lengths.sum()
            self.tally("ctc_loss", torch.zeros_like(ctc) if batch.filler else ctc, real_labels)
            loss = loss + self.ctc_weight * ctc
        return loss, plain.detach(), right, real.sum()

    def decode_validation(self, metric: TextMetric, chosen: list[int], search: BeamSearch) -> None:
        """Decode the sentences with these indices in every validation, and log the metric's values as `val_NAME`."""
        self._validation = metric, {index: i for i, index in enumerate(chosen)}, search

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        if self._validation:
            metric, _, _ = self._validation
            metric.reset()
            metric.to(self.device)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if self.tokenizer.labels:
            self.tally("val_intent_accuracy", self.first_right, len(batch))
        if self._validation:
            metric, places, search = self._validation
            chosen = {row: places[index] for row, index in enumerate(self.indices(batch_idx)) if index in places}
            if chosen:
                update(metric, self._scored(batch.select([*chosen]), [*chosen.values()], search))

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        if self._validation:
            metric, _, _ = self._validation
            values = metric.compute()
            for name in filter(values.__contains__, metric.logged):
                self.log(f"val_{name}", float(values[name]), prog_bar=True, sync_dist=True)

    def test_step(self, batch: Batch, batch_idx: int) -> Scored:  # type: ignore[override]  # Lightning hands on any type
        scored = self._scored(batch, self.indices(batch_idx), self.search)
        self._decoded_tokens += scored.units
        return scored

    def on_test_epoch_start(self) -> None:
        self._decoded_tokens = 0

    def on_test_epoch_end(self) -> None:
        tokens = torch.tensor(float(self._decoded_tokens), device=self.device)
        if not self.trainer.strategy.reduce(tokens, reduce_op="sum"):
            raise DataError("decoding produced no finished hypothesis: the model's logits are NaN or infinite")

    def _scored(self, batch: Batch, index: list[int], search: BeamSearch) -> Scored:
        """Decode a batch.  Timed are the encoder and the free search, without the compiler's work."""
        watch = CacheWatch(self.model.decoder)
        compiler, began = self._compiled_steps.seconds(), now(self.device)
        best = self.decode(batch, search, self.cache_dtype, watch)
        seconds = now(self.device) - began - (self._compiled_steps.seconds() - compiler)
        constrained = [""] * len(best)
        if self.classify:
            labels = list(self.tokenizer.labels.values())
            constrained = [self.label(h) for h in self.decode(batch, search, self.cache_dtype, first=labels)]
        texts, classes = list(map(self.text, best)), list(map(self.label, best))
        references = [f"{a} {b}".strip() for a, b in zip(batch.labels, batch.references, strict=True)]
        hypotheses = [f"{a} {b}".strip() for a, b in zip(classes, texts, strict=True)]
        return Scored(
            index=torch.tensor(index),
            update={
                "hypotheses": texts,
                "references": batch.references,
                "others": batch.others,
                "labels": batch.labels,
                "free": classes,
                "constrained": constrained,
            },
            rows=list(zip(batch.ids, batch.sources, references, hypotheses, strict=True)),
            seconds=seconds,
            units=sum(len(h[0].tokens) for h in best if h),
            cache_bytes=watch.bytes,
        )

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
            unk=Tokenizer.unk,
            dtype=dtype,
            first=first,
            compiled=self._compiled_steps or None,
        )

    def text(self, hypotheses: list[Hypothesis]) -> str:
        """The best hypothesis, detokenised, without its class; empty where the search ended none."""
        return self.tokenizer.decode([t for t in hypotheses[0].tokens if t != Tokenizer.eos]) if hypotheses else ""

    def label(self, hypotheses: list[Hypothesis]) -> str:
        """The class that the best hypothesis begins with; empty where it begins with none."""
        return self.tokenizer.label_of(hypotheses[0].tokens) if hypotheses else ""


class CacheWatch:
    """A decoder that measures the caches made through it; `bytes`: of the largest ones, measured and predicted."""

    def __init__(self, decoder: PrefixDecoder | CrossDecoder) -> None:
        self.decoder, self.bytes = decoder, (0, 0)
        self.step = decoder.step  # the method itself, which is compiled once for all watches

    def start(
        self, prefix: Tensor, lengths: Tensor | None, beam: int, capacity: int, *, dtype: torch.dtype | None = None
    ) -> list[Cache]:
        caches = self.decoder.start(prefix, lengths, beam, capacity, dtype=dtype)
        sentences, size = prefix.shape[:2]
        rows = sentences * beam
        predicted = self.decoder.cache_bytes(rows, capacity, size, sentences, dtype=dtype or prefix.dtype)
        self.bytes = max(self.bytes, (sum(cache.nbytes for cache in caches), predicted))
        return caches

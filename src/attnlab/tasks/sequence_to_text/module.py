"""Sequence in, text out: one LightningModule for translation, recognition, understanding and summaries."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnlab.attention import Cache
from attnlab.callbacks.cost import now
from attnlab.callbacks.scoring import Scored, update
from attnlab.data.batch import Batch
from attnlab.data.text.tokenizer import Tokenizer
from attnlab.decoding import BeamSearch
from attnlab.errors import DataError
from attnlab.metrics.text import TextMetric
from attnlab.models import CrossDecoder, EncoderDecoder, PrefixDecoder, SpeechToText, TextToText
from attnlab.models.sequence import TokenLosses
from attnlab.models.token_loss import at_least_float32
from attnlab.tasks.restored import Decodes
from attnlab.training.compiled import COMPILED_STEPS, Compiled
from attnlab.training.module import Module

Model = SpeechToText | TextToText | EncoderDecoder


class SequenceToText(Decodes, Module):
    """Trains a model with label-smoothed cross-entropy on the text and, on request, CTC on the encoder's output.

    Args:
        classify: whether a second search finds the first token among the classes alone.
        label_smoothing: probability that the other tokens share.
        ctc_weight: of the CTC loss; 0: none.
        first_token_weight: of the first token's cross-entropy; the token may be a class.

    Attributes:
        cut: the number of test sentences whose best hypothesis ended at the limit of length.
    """

    called = ("token_losses",)
    model: Model

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
        self._compiled, self.steps = Compiled(compile, dynamic=True), Compiled(compile)
        self._decoded_tokens = self._cut = self.cut = 0

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
            loss = loss + self.ctc_weight * self._ctc_loss(batch, out)
        return loss, plain.detach(), right, real.sum()

    def _ctc_loss(self, batch: Batch, out: TokenLosses) -> Tensor:
        """The sum over the batch; its mean over labels is logged as `ctc_loss`."""
        assert self.model.ctc is not None and batch.ctc_targets is not None and batch.ctc_target_lengths is not None
        logp = at_least_float32(self.model.ctc(out.encoded)).log_softmax(-1).transpose(0, 1)
        lengths = out.lengths, batch.ctc_target_lengths
        ctc = F.ctc_loss(logp, batch.ctc_targets, *lengths, Tokenizer.bos, reduction="sum", zero_infinity=True)
        labels = 0 if batch.filler else batch.ctc_target_lengths.sum()
        self.tally("ctc_loss", torch.zeros_like(ctc) if batch.filler else ctc, labels)
        return ctc

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if self.tokenizer.labels:
            self.tally("val_intent_accuracy", self.first_right, len(batch.utterances))

    def test_step(self, batch: Batch, batch_idx: int) -> Scored:  # type: ignore[override]  # Lightning hands on any type
        scored = self._scored(batch, self.indices(batch_idx), self.search)
        self._decoded_tokens += scored.units
        self._cut += scored.cut
        return scored

    def on_test_epoch_start(self) -> None:
        self._decoded_tokens = self._cut = 0

    def on_test_epoch_end(self) -> None:
        cut = torch.tensor(float(self._cut), device=self.device)
        self.cut = int(self.trainer.strategy.reduce(cut, reduce_op="sum"))
        tokens = torch.tensor(float(self._decoded_tokens), device=self.device)
        if not self.trainer.strategy.reduce(tokens, reduce_op="sum"):
            raise DataError(
                "decoding produced no finished hypothesis: the model's logits are NaN or infinite, or "
                "task.decode.min_len asks for more tokens than CTC can write in so few frames"
            )

    def _scored(self, batch: Batch, index: list[int], search: BeamSearch) -> Scored:
        """Decode a batch.  Timed are the encoder and the free search, without the compiler's work."""
        watch = CacheWatch(self.model.decoder)
        compiler, began = self.steps.seconds(), now(self.device)
        best = self.decode(batch, search, self.cache_dtype, watch)
        seconds = now(self.device) - began - (self.steps.seconds() - compiler)
        constrained = [""] * len(best)
        if self.classify:
            labels = list(self.tokenizer.labels.values())
            forced = self.decode(batch, search, self.cache_dtype, first=labels)
            constrained = [self.written(hypotheses)[0] for hypotheses in forced]
        classes, texts = zip(*map(self.written, best), strict=True)
        corpus = batch.utterances
        rows = [
            (x.id, x.source, f"{x.label} {x.target}", f"{a} {b}")
            for x, a, b in zip(corpus, classes, texts, strict=True)
        ]
        return Scored(
            index=torch.tensor(index),
            update={
                "hypotheses": texts,
                "references": [x.target for x in corpus],
                "others": [x.others for x in corpus],
                "labels": [x.label for x in corpus],
                "free": classes,
                "constrained": constrained,
            },
            rows=rows,
            seconds=seconds,
            units=sum(len(h[0].tokens) for h in best if h),
            cut=sum(h[0].at_limit for h in best if h),
            cache_bytes=watch.bytes,
        )

    def counts(self, batch: Batch) -> bool:
        return not batch.filler

    def first_of(self, batch: Batch) -> Callable[[], str]:
        first = batch.utterances[0].id
        return lambda: first


class DecodesValidation(SequenceToText):
    """Decodes sentences of each validation, and logs the metric's values as `val_NAME`."""

    def decode_validation(self, metric: TextMetric, chosen: list[int], search: BeamSearch) -> None:
        """Decode the sentences with the indices `chosen`."""
        self._decoded = metric, {index: i for i, index in enumerate(chosen)}, search  # with places in the metric
        self.decoded_validation = {"sentences": len(chosen), "score": metric.name, "search": asdict(search)}

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self._decoded[0].reset()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        metric, places, search = self._decoded
        chosen = {row: places[index] for row, index in enumerate(self.indices(batch_idx)) if index in places}
        if chosen:
            update(metric, self._scored(batch.select([*chosen]), [*chosen.values()], search))

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        metric = self._decoded[0]
        values = metric.compute()
        for name in filter(values.__contains__, metric.logged):
            self.log(f"val_{name}", float(values[name]), prog_bar=True, sync_dist=True)


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

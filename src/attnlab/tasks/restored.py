"""Trained models ready to compute, without Lightning, which takes seconds to import."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from attnlab.data.batch import Batch
from attnlab.data.text.tokenizer import Tokenizer
from attnlab.decoding import BeamSearch, Decodable, Hypothesis
from attnlab.models.token_loss import at_least_float32
from attnlab.training.compiled import COMPILED_STEPS, Compiled


class Restored(nn.Module):
    """A model without training.

    Args:
        identity: of the model, as its checkpoints store it.
        parts: attributes by name, such as a vocabulary.
    """

    model: Any
    compiled_steps_part = ""

    def __init__(self, model: nn.Module, identity: dict[str, Any], **parts: Any) -> None:
        super().__init__()
        self.model, self.identity = model, identity
        for name, value in parts.items():
            setattr(self, name, value)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


class Decodes:
    """Beam search of a sequence-to-text model: in training and after it.

    Attributes:
        cache_dtype: of the caches while decoding; None: that of the encoder's output.
        steps: the compiler of decoding steps.
    """

    compiled_steps_part = COMPILED_STEPS
    model: Any
    tokenizer: Tokenizer
    search: BeamSearch
    cache_dtype: torch.dtype | None
    steps: Compiled

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
        ctc = at_least_float32(self.model.ctc(prefix)).log_softmax(-1) if search.ctc_weight else None
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
            ctc=ctc,
            compiled=self.steps or None,
        )

    def written(self, hypotheses: list[Hypothesis]) -> tuple[str, str]:
        """Class and detokenised text of the best hypothesis; each is empty where it has none."""
        tokens = hypotheses[0].tokens if hypotheses else []
        return self.tokenizer.label_of(tokens), self.tokenizer.decode(tokens)


class RestoredTranslator(Decodes, Restored):
    """A sequence-to-text model with its `tokenizer` and its `search`."""

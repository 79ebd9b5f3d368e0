"""Continuing texts with a trained language model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig

from attnlab.config.build import instantiate
from attnlab.data.inputs import InputKind
from attnlab.decoding import Sampling
from attnlab.errors import DataError
from attnlab.tasks.prediction import Predictor, Result, changed

if TYPE_CHECKING:
    from attnlab.tasks.language_modelling.module import LanguageModelling

INPUT = InputKind("text", (), ("text", "prompt", "input"))


class Continuation(Predictor):
    """The continuation of a text as `prediction`. The word for unknown words is never chosen.

    The same text has the same continuation, whatever stands beside it: each is drawn with the seed of `task.sampling`.

    Args:
        module: with the model and its vocabulary.
        cfg: the run's configuration.
        settings: fields of `task.sampling` in place of the configured ones.
    """

    def __init__(self, module: LanguageModelling, cfg: DictConfig, **settings: Any) -> None:
        super().__init__(module, cfg.hardware.precision)
        self.module = module
        self.sampling: Sampling = changed(
            instantiate(cfg.task.sampling, path="task.sampling"), settings, "task.sampling"
        )

    def read(self, value: str) -> list[int]:
        vocabulary, longest = self.module.vocabulary, self.module.model.longest
        ids = [vocabulary.end, *vocabulary.ids(value)]
        if len(ids) + self.sampling.tokens > longest:
            raise DataError(
                f"{value[:40]!r}: {len(ids)} {vocabulary.unit}s and task.sampling.tokens={self.sampling.tokens} make "
                f"{len(ids) + self.sampling.tokens} positions, more than the model's context of {longest}; shorten "
                "the text or lower task.sampling.tokens"
            )
        return ids

    def size(self, prepared: list[int]) -> int:
        return len(prepared)

    def predict(self, batch: list[list[int]]) -> list[Result]:
        return [{"prediction": self._continued(ids)} for ids in batch]

    def _continued(self, ids: list[int]) -> str:
        vocabulary = self.module.vocabulary
        tokens = self.sampling(
            self.module.model,
            torch.tensor([ids], device=self.device),
            num_ids=vocabulary.num_ids,
            never=[] if vocabulary.unknown_id is None else [vocabulary.unknown_id],
            dtype=self.dtype,
            compiled=self.module.compiled_steps,
        )
        return vocabulary.text(tokens[0].tolist())

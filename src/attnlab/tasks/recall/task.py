"""Recall: generated sequences that measure what a mechanism keeps of its past for each byte of its cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attnlab.config.build import instantiate
from attnlab.errors import ConfigError
from attnlab.models import Decoder
from attnlab.models.build import build_model, cache_shape, identity, without_memory
from attnlab.run.device import device_of
from attnlab.tasks.base import TextTask
from attnlab.tasks.restored import Restored

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback

    from attnlab.data.recall.data import RecallData
    from attnlab.tasks.recall.module import Recall
    from attnlab.tasks.recall.score import RecallScore


SHARDED = False  # hardware=fsdp is refused: the models are small


class RecallTask(TextTask):
    """A decoder that answers questions about what stood before them in a generated sequence."""

    batch_key = "batch_size"

    def build(self) -> Decoder:
        return build_model(self.cfg, vocab_size=self.cfg.task.data.vocab_size)

    def grid(self) -> RecallData:
        """The data with its cells, each checked; nothing is drawn."""
        return instantiate(self.cfg.task.data, path="task.data")

    def describe(self, record: dict[str, Any]) -> None:
        """Fill also the predicted bytes of one sequence of each length of the test grid."""
        super().describe(record)
        with without_memory():
            model = self.build()
        dtype = cache_shape(self.cfg.bench).dtype
        lengths = {cell.length for cell in self.grid().cells["test"]}
        record["kv_cache"]["lengths"] = {
            str(length): {"predicted": model.cache_bytes(1, length, dtype=dtype)} for length in sorted(lengths)
        }

    def check(self, directory: Path) -> None:
        data = self.grid()
        instantiate(self.cfg.task.score, path="task.score")
        with without_memory():
            longest = self.build().longest
        if data.longest > longest:
            raise ConfigError(
                f"task.data: sequences of {data.longest} tokens are longer than the {longest} positions of the model "
                "(task.model.max_length) or of its attention"
            )

    def rehearsal(self, model: nn.Module, size: int, device: torch.device) -> Callable[[], Tensor]:
        """A batch of `size` sequences of the longest training cell, with an answer at every second position."""
        from attnlab.data.text.windows import IGNORE

        assert isinstance(model, Decoder)
        module, longest = self._module(model), max(cell.length for cell in self.grid().cells["train"])
        tokens = torch.zeros(size, longest, dtype=torch.long, device=device)
        targets = tokens.clone()
        targets[:, ::2] = IGNORE
        return lambda: module.losses((tokens, targets))[0]

    def decoding_cache(self, model: Decoder, dtype: torch.dtype) -> int:
        """Of the sequences that are read through the caches."""
        rows = self.cfg.task.score.samples
        return max(model.cache_bytes(rows, cell.length, dtype=dtype) for cell in self.grid().cells["test"])

    def module(self, record: dict[str, Any], data: RecallData) -> Recall:
        module = self._module(self.build())
        self.sizes(record, module.model)
        return module

    def _module(self, model: Decoder) -> Recall:
        from attnlab.tasks.recall.module import Recall

        return Recall(model, identity=identity(self.cfg), **self.module_arguments())

    def rebuilt(self, weights: Path) -> Restored:
        return Restored(self.build(), identity(self.cfg))

    def scoring(self, directory: Path, data: RecallData, module: Recall) -> list[Callback]:
        return [self._score().quality(data)]

    def after_scoring(self, record: dict[str, Any], directory: Path, data: RecallData, module: Recall) -> None:
        """Read some sequences through the caches."""
        cfg = self.cfg
        sections = self._score().read(module, data, device_of(cfg), cfg.hardware.precision, directory)
        for section, values in sections.items():
            record[section] |= values

    def _score(self) -> RecallScore:
        return instantiate(self.cfg.task.score, path="task.score")

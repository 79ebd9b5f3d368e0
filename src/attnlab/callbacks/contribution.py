"""Callbacks that contribute sections to the record, and what they read of each scored batch."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from attnlab.metrics.base import IndexedMetric, Row

Sections = dict[str, dict[str, Any]]  # values by section of the record


@dataclass(frozen=True)
class Scored:
    """One batch as a module's `test_step` returns it.

    Args:
        index: (B,) the items' indices in the corpus.
        update: further arguments of the metric's `update`, by name; a metric gets those that it takes.
        rows: lines of predictions.tsv: id, source, reference, hypothesis.  None: the task has none.
        seconds: time of the model alone, the device synchronised before and after.
        units: what `seconds` produced: tokens of best hypotheses, or images.
        cache_bytes: of the caches of this batch, as measured and as predicted.
    """

    index: Tensor
    update: Mapping[str, Any]
    rows: list[Row] | None = None
    seconds: float = 0.0
    units: int = 0
    cache_bytes: tuple[int, int] = (0, 0)


def update(metric: IndexedMetric, scored: Scored) -> None:
    """Give a metric its fields of a batch."""
    metric.update(scored.index, **{name: scored.update[name] for name in metric.fields})


class Contributor(Callback):
    """A callback that measures something and contributes it to the record.  `run/` writes the record."""

    @abstractmethod
    def contribution(self) -> Sections:
        """Values by section, once the trainer's call has ended; {} if nothing was measured.

        A section's `protocol` describes how its numbers were measured; those of several callbacks are joined.
        """


class ScoringCallback(Callback):
    """A callback that reads every scored batch."""

    @abstractmethod
    def on_scored(self, scored: Scored, loader: int) -> None:
        """Called after each batch of `trainer.test` with the number of its dataloader."""

    def on_test_batch_end(
        self,
        trainer: Trainer,
        module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not isinstance(outputs, Scored):
            raise TypeError(f"{type(module).__name__}.test_step returned {type(outputs).__name__}; expected Scored")
        self.on_scored(outputs, dataloader_idx)


def contributions(callbacks: Iterable[Callback]) -> Sections:
    """The contributions of all callbacks, merged section by section.

    Raises:
        ValueError: two callbacks contribute the same value.
    """
    sections: Sections = {}
    for callback in callbacks:
        if not isinstance(callback, Contributor):
            continue
        for section, values in callback.contribution().items():
            known = sections.setdefault(section, {})
            protocols = [text for text in (known.pop("protocol", ""), values.get("protocol", "")) if text]
            if twice := sorted(known.keys() & values.keys()):
                raise ValueError(f"{type(callback).__name__}: {section}.{twice[0]} is contributed twice")
            known |= values
            if protocols:
                known["protocol"] = "; ".join(protocols)
    return sections


def over_processes(trainer: Trainer, value: float, reduce: str) -> float:
    """`value` reduced over the trainer's processes by "sum", "max" or "mean". Every process must call this."""
    tensor = torch.tensor(value, dtype=torch.float64, device=trainer.strategy.root_device)
    return float(trainer.strategy.reduce(tensor, reduce_op=reduce))

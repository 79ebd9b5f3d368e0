"""Quality of the test set."""

from collections.abc import Mapping
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

from lightning import LightningModule, Trainer
from torchmetrics import Metric

from attnlab.callbacks.contribution import Contributor, Scored, ScoringCallback, Sections, update


class Quality(Contributor, ScoringCallback):
    """Scores what `test_step` returns and contributes the section `quality`.

    Args:
        metrics: a metric for each test dataloader, in their order.  The first one's values are contributed as they
            are; of every other one the first value, prefixed by its key (`{"": disjoint, "sliding_": sliding}` of two
            `Perplexity` gives `perplexity`, `tokens` and `sliding_perplexity`).
        about: values known beforehand, which are added; of two values with one name this one is taken.
    """

    def __init__(self, metrics: Mapping[str, Metric], about: Mapping[str, Any] | None = None) -> None:
        self.metrics, self.about = dict(metrics), dict(about or {})
        self._values: dict[str, Any] = {}

    def on_test_start(self, trainer: Trainer, module: LightningModule) -> None:
        for metric in self.metrics.values():
            metric.reset()
            metric.to(module.device)
            # A trainer of one process must not wait for others that a process group still has.
            metric.distributed_available_fn = lambda: trainer.world_size > 1

    def on_scored(self, scored: Scored, loader: int) -> None:
        update(list(self.metrics.values())[loader], scored)

    def on_test_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._values = {}
        for number, (prefix, metric) in enumerate(self.metrics.items()):
            values = metric.compute()
            headline = next(iter(values))
            self._values |= {f"{prefix}{headline}": values[headline]} if number else values

    def contribution(self) -> Sections:
        return {"quality": self._values | self.about} if self._values else {}

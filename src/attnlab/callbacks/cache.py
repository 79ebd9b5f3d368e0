"""Bytes of the key-value caches."""

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

from lightning import LightningModule, Trainer

from attnlab.callbacks.contribution import Contributor, Scored, ScoringCallback, Sections, over_processes


class CacheBytes(Contributor, ScoringCallback):
    """Bytes of the caches of the largest batch, as measured and as predicted, over all processes.

    Contributes `bytes_measured` and `bytes_predicted` to the section `kv_cache`.
    """

    def __init__(self) -> None:
        self.measured = self.predicted = 0

    def on_scored(self, scored: Scored, loader: int) -> None:
        self.measured, self.predicted = max((self.measured, self.predicted), scored.cache_bytes)

    def on_test_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.measured = int(over_processes(trainer, self.measured, "max"))
        self.predicted = int(over_processes(trainer, self.predicted, "max"))

    def contribution(self) -> Sections:
        return {"kv_cache": {"bytes_measured": self.measured, "bytes_predicted": self.predicted}}

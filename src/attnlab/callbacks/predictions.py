"""predictions.tsv of the test set."""

from collections.abc import Sequence
from pathlib import Path

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

from lightning import LightningModule, Trainer

from attnlab.callbacks.contribution import Scored, ScoringCallback
from attnlab.metrics import Predictions
from attnlab.metrics.predictions import Row
from attnlab.run.files import write_text

HEADER: Row = ("id", "source", "reference", "hypothesis")


class PredictionsFile(ScoringCallback):
    """Writes the rows of `Scored` in corpus order, whatever process scored them.

    Args:
        size: number of items in the corpus.
    """

    def __init__(self, size: int, path: Path) -> None:
        self.path, self.rows = path, Predictions(size)

    def on_test_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.rows.reset()
        self.rows.to(module.device)
        self.rows.distributed_available_fn = lambda: trainer.world_size > 1

    def on_scored(self, scored: Scored, loader: int) -> None:
        assert scored.rows is not None
        self.rows.update(scored.index, scored.rows)

    def on_test_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        rows = self.rows.compute()  # on every process: it gathers
        if trainer.is_global_zero:
            write_predictions(self.path, rows)


def write_predictions(path: Path, rows: Sequence[Row]) -> None:
    """Writes id, source, reference and hypothesis, one item a line, atomically.

    Args:
        rows: the items; tabs and line ends inside a text become spaces.
    """
    lines = ("\t".join(" ".join(text.split()) for text in row) + "\n" for row in (HEADER, *rows))
    write_text(path, "".join(lines))

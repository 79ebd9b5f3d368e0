"""The rows of predictions.tsv."""

from collections.abc import Sequence

from torch import Tensor

from attnlab.metrics.base import TextMetric

Row = tuple[str, str, str, str]


class Predictions(TextMetric):
    """Identifier, source, reference and hypothesis of every item.  Args: those of `TextMetric`."""

    def update(self, index: Tensor | Sequence[int], rows: Sequence[Row]) -> None:
        """Adds rows.

        Args:
            index: (B,) corpus indices.
            rows: B rows of id, source, reference, hypothesis.
        """
        self.append_texts(index, rows)

    def compute(self) -> list[Row]:
        """All rows in corpus order."""
        return [(id, source, reference, hypothesis) for id, source, reference, hypothesis in self.texts()]

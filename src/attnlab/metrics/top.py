"""Top-1 and top-5 accuracy of classes."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from attnlab.errors import DataError
from attnlab.metrics.base import INTEGER, IndexedMetric

NOT_FINITE = -1  # the guesses of an image whose logits are NaN or infinite


class TopAccuracy(IndexedMetric):
    """How often the right class is the most probable one, and among the five most probable ones.

    torchmetrics' MulticlassAccuracy counts in float32 sums; here the counts are ints.

    Args:
        classes: number of classes; with fewer than five, "top five" is all of them.
    """

    higher_is_better = True

    def __init__(self, size: int, classes: int, **settings: Any) -> None:
        self.many = min(5, classes)
        super().__init__(size, {"labels": INTEGER, "guesses": INTEGER.new_empty(0, self.many)}, **settings)

    def update(self, index: Tensor | Sequence[int], logits: Tensor, labels: Tensor) -> None:
        """Adds images.

        Args:
            index: (B,) corpus indices.
            logits: (B, classes).
            labels: (B,) right classes.
        """
        guesses = logits.float().topk(self.many).indices
        finite = logits.isfinite().all(-1, keepdim=True)
        self.append(index, labels=labels, guesses=guesses.masked_fill(~finite, NOT_FINITE))

    def compute(self) -> dict[str, Any]:
        """`top1` and `top5` in percent, rounded to three digits, and the number of `images`.

        Raises:
            DataError: logits are NaN or infinite.
        """
        order = self.order()
        guesses = self.column("guesses")[order]
        wrong = (guesses[:, 0] == NOT_FINITE).nonzero().flatten()
        if len(wrong):
            which = f"{len(wrong)} of {self.size} images (the first is number {int(wrong[0])})"
            raise DataError(f"the model's logits are NaN or infinite for {which}")
        hits = guesses == self.column("labels")[order, None]
        shares = {"top1": int(hits[:, 0].sum()), "top5": int(hits.any(-1).sum())}
        return {name: round(100 * right / self.size, 3) for name, right in shares.items()} | {"images": self.size}

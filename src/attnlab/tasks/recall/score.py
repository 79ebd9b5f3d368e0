"""Scores of recall: accuracy for each cell of the grid, and some sequences read through the caches."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge

from attnlab.callbacks.cost import WATCHED, MemoryMeter, now
from attnlab.callbacks.scoring import Quality, write_predictions
from attnlab.data.recall.data import RecallData
from attnlab.data.text.windows import IGNORE
from attnlab.metrics.numbers import RecallAccuracy
from attnlab.run.device import autocast, busy_cores, scoring_dtype
from attnlab.tasks.base import measured_by
from attnlab.tasks.recall.module import Recall


@dataclass(frozen=True)
class RecallScore:
    """Accuracy of answers, computed in parallel; and some sequences of each cell, read through the caches.

    `samples` is the number of these sequences, which predictions.tsv shows.
    """

    samples: Annotated[int, Ge(1)] = 4

    def quality(self, data: RecallData) -> Quality:
        """The callback that computes the record's `quality`."""
        cells = [(cell.name, cell.count) for cell in data.cells["test"]]
        signature = f"mean over sequences of the share of right answers; cells: length x {data.problem.level}"
        return Quality({"": RecallAccuracy(cells)}, {"signature": signature})

    def read(
        self, module: Recall, data: RecallData, device: torch.device, precision: str, directory: Path
    ) -> dict[str, dict[str, Any]]:
        """Read the first sequences of each cell through the caches, on one process, and write predictions.tsv.

        Returns:
            The sections `inference` and `kv_cache` of the record; `kv_cache.lengths` has the bytes of one sequence of
            each length.
        """
        model, low = module.to(device).eval().model, scoring_dtype(precision)
        dtype = low or torch.float32
        sequences, rows, largest = data.sequences("test"), [], (0, 0)
        lengths: dict[str, dict[str, int]] = {}
        seconds, tokens_read, most = 0.0, 0, 0
        busy = busy_cores(WATCHED, advise=False)
        with MemoryMeter(device) as meter, autocast(device, low):
            for first, cell in zip(sequences.starts, sequences.cells, strict=False):
                count = min(self.samples, cell.count)
                tokens, targets = sequences.__getitems__(range(first, first + count))
                began = now(device)
                caches = model.start(count, cell.length, dtype=low, device=device)
                answers = model.step(tokens.to(device), caches).argmax(-1).cpu()
                seconds += now(device) - began
                measured = sum(cache.nbytes for cache in caches)
                predicted = model.cache_bytes(count, cell.length, dtype=dtype)
                largest = max(largest, (measured, predicted))
                lengths[str(cell.length)] = {"predicted": predicted // count, "measured": measured // count}
                tokens_read, most = tokens_read + tokens.numel(), max(most, count)
                for number in range(count):
                    target, real = targets[number], targets[number] != IGNORE
                    text = data.problem.text(tokens[number].numpy(), target.numpy())
                    reference, guess = (" ".join(map(str, row[real].tolist())) for row in (target, answers[number]))
                    rows.append((f"{cell.name}-{number}", text, reference, guess))
        write_predictions(directory / "predictions.tsv", rows)
        longest = max(lengths, key=int)
        kv_cache = {
            "bytes_predicted": largest[1],
            "bytes_measured": largest[0],
            "bytes_per_token": sum(a.cache_bytes_per_token(dtype) for a in model.attentions),  # long texts
            "bytes_per_position": round(lengths[longest]["measured"] / int(longest), 2),  # of the longest sequences
            "lengths": lengths,
        }
        return {
            "inference": {
                "seconds": round(seconds, 3),
                "tokens_per_second": round(tokens_read / seconds, 1),
                **measured_by(meter, most, dtype, busy, f"{len(rows)} sequences, each read at once into the caches"),
            },
            "kv_cache": kv_cache,
        }

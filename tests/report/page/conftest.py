import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.report.conftest import committed, set_values

ROOT = Path(__file__).parents[3]
Write = Callable[..., Path]


@pytest.fixture(scope="session")
def write() -> Write:
    """Writes a run directory: a finished run's record with other values (`__` for a dot), curves and predictions."""

    def run(
        directory: Path,
        losses: list[tuple[int, float]] | None = None,
        predictions: list[tuple[str, str, str]] | None = None,
        **values: Any,
    ) -> Path:
        record = committed("mtla/st_digits/mha_36epochs_epyc.json")
        set_values(record, values)
        directory.mkdir(parents=True)
        (directory / "record.json").write_text(json.dumps(record))
        if losses:
            (directory / "curves").mkdir()
            lines = [f"{step},{value},{value / 2}" for step, value in losses]
            (directory / "curves" / "metrics.csv").write_text("\n".join(["step,loss,val_loss", *lines]) + "\n")
        if predictions:
            lines = ["\t".join((f"id{i}", *texts)) for i, texts in enumerate(predictions)]
            text = "\n".join(["id\tsource\treference\thypothesis", *lines]) + "\n"
            (directory / "predictions.tsv").write_text(text, encoding="utf-8")
        return directory

    return run

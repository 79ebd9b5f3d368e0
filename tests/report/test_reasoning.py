"""Compressed language models as a table and a plot."""

import csv
from pathlib import Path
from typing import Any

import pytest

from attnlab.report.__main__ import main
from tests.report.conftest import Run


def about(accuracy: float) -> dict[str, Any]:
    quality = {"accuracy": accuracy, "accuracy_stderr": 5.0, "loss": 1.25, "loss_stderr": 0.1}
    return {
        "layers": [],
        "rate": {"rate": 4.0, "model_saving_percent": 10.0},
        "quality": {"dense": {**quality, "accuracy": 90.0, "perplexity": 3.0}, "compressed": quality},
    }


def test_table_and_plot(tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, accuracy in ((1, 50.0), (2, 60.0)):
        row = f"task=reasoning task.questions=fever compress=tensorllm compress.keep=0.25 seed={seed}"
        run(f"r{seed}", row, compression=about(accuracy))
    assert main(["--compressed", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    rows = list(csv.reader((tmp_path / "out" / "sweep.csv").open()))
    assert rows[1][1:9] == ["fever", "tensorllm", "0.25", "1", "4.00", "10.0", "90.0 ± 5.0", "50.0 ± 5.0"]
    assert rows[1][-2:] == ["3.00", "not run"]
    points = list(csv.reader((tmp_path / "out" / "accuracy.csv").open()))
    assert points[1] == ["fever", "tensorllm", "0.25", "2", "55.000", "7.071"]
    assert points[2] == ["fever", "dense", "1", "2", "90.000", "0.000"]
    assert (tmp_path / "out" / "accuracy.png").is_file()

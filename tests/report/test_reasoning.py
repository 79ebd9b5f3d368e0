"""Compressed language models as a table and a plot."""

import csv
import re
from pathlib import Path
from typing import Any

import pytest

from attnlab.errors import DataError
from attnlab.report import decoders
from attnlab.report.command import main
from tests.report.conftest import Run

pytestmark = pytest.mark.usefixtures("unrendered")


def about(accuracy: float) -> dict[str, Any]:
    quality = {"accuracy": accuracy, "accuracy_stderr": 5.0, "loss": 1.25, "loss_stderr": 0.1}
    return {
        "layers": [],
        "rate": {"rate": 4.0, "model_saving_percent": 10.0},
        "quality": {"dense": {**quality, "accuracy": 90.0, "perplexity": 3.0}, "compressed": quality},
    }


def read(path: Path) -> list[list[str]]:
    return list(csv.reader(path.open()))


def test_table_and_plot(tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, accuracy in ((1, 50.0), (2, 60.0)):
        row = f"task=reasoning task.questions=fever compress=tensorllm compress.keep=0.25 seed={seed}"
        run(f"r{seed}", row, compression=about(accuracy))
    run("r3", "task=reasoning task.questions=fever compress=tensorllm compress.keep=0.5", compression=about(70.0))
    out = tmp_path / "out"
    assert main(["compressed", str(tmp_path), "--out", str(out)]) == 0
    headers, first, second = read(out / "sweep.csv")
    assert first[:5] == ["sample llama", "fever", "tensorllm", "0.5", ""]
    assert first[5:10] == ["1", "4.00", "10.0", "90.0 ± 5.0", "70.0 ± 5.0"]  # standard errors over the questions
    assert second[3:10] == ["0.25", "", "2", "4.00 ± 0.00", "10.0 ± 0.0", "90.0 ± 0.0", "55.0 ± 7.1"]  # over the seeds
    assert first[-2:] == ["3.00", "not run"] and len(headers) == len(first)
    runs = read(out / "runs.csv")
    assert [[line[3], line[5]] for line in runs[1:]] == [["0.5", "1"], ["0.25", "1"], ["0.25", "2"]]
    assert runs[2][9] == "50" and "compress.keep=0.25 seed=1" in runs[2][-1]
    points = read(out / "accuracy.csv")
    assert points[2] == ["sample llama", "fever", "tensorllm", "0.25", "2", "55.000", "7.071"]
    assert points[3] == ["sample llama", "fever", "dense", "1", "2", "90.000", "0.000"]
    assert (out / "accuracy.png").is_file()
    file = out / "runs.csv"
    for path in decoders.render_again(out, tmp_path / "again")[:4]:
        other = (out / path.name).read_text()
        assert path.read_text() == re.sub(
            r"(70\.0|90\.0|1\.250) ± (5\.0|0\.100)", r"\1", other
        )  # of one seed no line has these
    file.write_text(file.read_text().replace(",50,", ",fifty,"))
    with pytest.raises(DataError, match="runs.csv: .*fifty"):
        decoders.render_again(out, tmp_path / "again")


def test_runs_with_other_settings_or_another_corpus_are_other_rows(tmp_path: Path, run: Run) -> None:
    """And two runs of one seed are one run: the later counts."""
    row = "task=reasoning task.questions=fever compress=tensorllm compress.keep=0.5"
    (tmp_path / "real").mkdir()
    for i, (more, accuracy) in enumerate([("", 50.0), ("", 60.0), ("compress.sweeps=3", 70.0), ("data_root=R", 80.0)]):
        more = more.replace("R", str(tmp_path / "real"))
        run(f"r{i}", f"{row} {more}".rstrip(), compression=about(accuracy), started=f"2026-01-0{i + 1}T00:00:00+00:00")
    out = tmp_path / "out"
    assert main(["compressed", str(tmp_path), "--out", str(out)]) == 0
    rows = [line[1:6] + line[9:10] for line in read(out / "sweep.csv")[1:]]
    assert sorted(rows) == [
        ["fever", "tensorllm", "0.5", "", "1", "60.0 ± 5.0"],
        ["fever", "tensorllm", "0.5", "compress.sweeps=3", "1", "70.0 ± 5.0"],
        ["fever (real)", "tensorllm", "0.5", "", "1", "80.0 ± 5.0"],
    ]

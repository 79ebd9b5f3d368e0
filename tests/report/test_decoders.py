"""Converted and compressed decoders as tables and plots."""

import csv
import re
from pathlib import Path
from typing import Any

import pytest

from attnlab.errors import DataError
from attnlab.report import decoders
from attnlab.report.command import main
from attnlab.run.store import collect
from tests.report.conftest import Run

pytestmark = pytest.mark.usefixtures("unrendered")


def converted(target: str, *scores: float) -> dict[str, Any]:
    names = ("original", "converted", "healed")
    cache = {"original": 400.0, "converted": 100.0, "healed": 100.0}
    points: dict[str, Any] = dict.fromkeys(names, "not run")
    for name, score in zip(names, scores, strict=False):
        points[name] = {"perplexity": score, "cache_bytes_per_token": cache[name]}
    return {"target": target, "seconds": 1.5, "points": points}


def read(path: Path) -> list[list[str]]:
    return list(csv.reader(path.open()))


def test_seeds_points_and_methods(tmp_path: Path, run: Run) -> None:
    for seed, scores in ((1, (4.0, 5.0)), (2, (5.0, 6.0))):
        row = f"task=wikitext2 convert=mla convert.keep=0.25 seed={seed}"
        run(f"r{seed}", row, conversion=converted("mla", *scores))
    healed = converted("mla", 4.0, 5.0, 4.5)
    run("r3", "task=wikitext2 convert=mla seed=1", conversion=healed, started="2026-02-01T00:00:00+00:00")
    row = "task=wikitext2 convert=mla convert.rotary=two_norm"
    run("r4", row, conversion=converted("mla", 4.0, 9.0))
    run("r5", "task=wikitext2 convert=mla", conversion=converted("mla", 4.0, 5.0), status="failed")
    run("r6", "task=wikitext2 convert=mla", status="running")  # nothing of a conversion stands in it yet
    out = tmp_path / "out"
    assert main(["compressed", str(tmp_path), "--out", str(out)]) == 0
    headers, first, second = read(out / "conversions.csv")
    assert first == ["sample", "mla", "25", "100", "2", "4.50 ± 0.71", "5.50 ± 0.71", "4.50", "1.225 ± 0.035", "1.125"]
    assert second[1] == "mla rotary=two_norm" and second[7] == second[9] == "not run" and len(headers) == len(second)
    runs = read(out / "runs.csv")
    assert [line[1:3] for line in runs[1:]] == [["mla", "1"], ["mla", "2"], [second[1], "1"]]
    assert runs[1][5:8] == ["4", "5", "4.5"]  # of the run that trained too, the later one
    points = read(out / "perplexity.csv")
    assert ["sample", "original", "", "100", "2", "4.5000", "4.0000", "5.0000"] in points
    assert (out / "perplexity.png").is_file()
    for path in decoders.render_again(out / "runs.csv", [], tmp_path / "again"):  # `make tables` needs no records
        assert path.suffix == ".png" or path.read_bytes() == (out / path.name).read_bytes()


def test_windows_in_all_layers_have_no_bytes_per_token(tmp_path: Path, run: Run) -> None:
    values = converted("mla", 4.0, 5.0)
    for name, size in (("original", 600), ("converted", 150)):
        values["points"][name] |= {"cache_bytes_per_token": 0.0, "cache_bytes_measured": size}
    path = run("r1", "task=wikitext2 convert=mla", conversion=values)
    (run_,) = decoders.conversions(collect([path])).to_dict("records")
    assert [run_[key] for key in ("Cache, %", *decoders.SIZES)] == [25, 600, 150]


def compressed(accuracy: float) -> dict[str, Any]:
    quality = {"accuracy": accuracy, "accuracy_stderr": 5.0, "loss": 1.25, "loss_stderr": 0.1}
    return {
        "layers": [],
        "rate": {"rate": 4.0, "model_saving_percent": 10.0},
        "quality": {"dense": {**quality, "accuracy": 90.0, "perplexity": 3.0}, "compressed": quality},
    }


def test_table_and_plot(tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, accuracy in ((1, 50.0), (2, 60.0)):
        row = f"task=reasoning task.questions=fever compress=tensorllm compress.keep=0.25 seed={seed}"
        run(f"r{seed}", row, compression=compressed(accuracy))
    run("r3", "task=reasoning task.questions=fever compress=tensorllm compress.keep=0.5", compression=compressed(70.0))
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
    for path in decoders.render_again(out / "runs.csv", [], tmp_path / "again")[:4]:
        other = (out / path.name).read_text()
        without = re.sub(r"(70\.0|90\.0|1\.250) ± (5\.0|0\.100)", r"\1", other)  # of one seed no line has these
        assert path.read_text() == without
    file.write_text(file.read_text().replace(",50,", ",fifty,"))
    with pytest.raises(DataError, match="runs.csv: .*fifty"):
        decoders.render_again(out / "runs.csv", [], tmp_path / "again")


def test_runs_with_other_settings_or_another_corpus_are_other_rows(tmp_path: Path, run: Run) -> None:
    """And two runs of one seed are one run: the later counts."""
    row = "task=reasoning task.questions=fever compress=tensorllm compress.keep=0.5"
    (tmp_path / "real").mkdir()
    for i, (more, accuracy) in enumerate([("", 50.0), ("", 60.0), ("compress.sweeps=3", 70.0), ("data_root=R", 80.0)]):
        settings = f"{row} {more.replace('R', str(tmp_path / 'real'))}".rstrip()
        run(f"r{i}", settings, compression=compressed(accuracy), started=f"2026-01-0{i + 1}T00:00:00+00:00")
    out = tmp_path / "out"
    assert main(["compressed", str(tmp_path), "--out", str(out)]) == 0
    rows = [line[1:6] + line[9:10] for line in read(out / "sweep.csv")[1:]]
    assert sorted(rows) == [
        ["fever", "tensorllm", "0.5", "", "1", "60.0 ± 5.0"],
        ["fever", "tensorllm", "0.5", "compress.sweeps=3", "1", "70.0 ± 5.0"],
        ["fever (real)", "tensorllm", "0.5", "", "1", "80.0 ± 5.0"],
    ]

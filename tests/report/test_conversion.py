"""Converted decoders as a table and a plot."""

import csv
from pathlib import Path
from typing import Any

import pytest

from attnlab.errors import DataError
from attnlab.report import command, decoders
from attnlab.report.command import main
from attnlab.run.store import collect
from tests.report.conftest import Run

pytestmark = pytest.mark.usefixtures("unrendered")


def about(target: str, *scores: float) -> dict[str, Any]:
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
        run(f"r{seed}", f"task=wikitext2 convert=mla convert.keep=0.25 seed={seed}", conversion=about("mla", *scores))
    healed = about("mla", 4.0, 5.0, 4.5)
    run("r3", "task=wikitext2 convert=mla seed=1", conversion=healed, started="2026-02-01T00:00:00+00:00")
    row = "task=wikitext2 convert=mla convert.rotary=two_norm"
    run("r4", row, conversion=about("mla", 4.0, 9.0))
    run("r5", "task=wikitext2 convert=mla", conversion=about("mla", 4.0, 5.0), status="failed")
    run("r6", "task=wikitext2 convert=mla", status="running")  # nothing of a conversion stands in it yet
    out = tmp_path / "out"
    assert main(["compressed", str(tmp_path), "--out", str(out)]) == 0
    headers, first, second = read(out / "conversions.csv")
    assert first == ["sample", "mla", "25", "100", "2", "4.50 ± 0.71", "5.50 ± 0.71", "4.50", "1.225 ± 0.035", "1.125"]
    assert second[1] == "mla rotary=two_norm" and second[7] == second[9] == "not run" and len(headers) == len(second)
    runs = read(out / "runs.csv")
    assert [line[:3] for line in runs[1:]] == [
        ["sample", "mla", "1"],
        ["sample", "mla", "2"],
        ["sample", second[1], "1"],
    ]
    assert runs[1][5:8] == ["4", "5", "4.5"]  # of the run that trained too, the later one
    points = read(out / "perplexity.csv")
    assert ["sample", "original", "", "100", "2", "4.5000", "4.0000", "5.0000"] in points
    assert (out / "perplexity.png").is_file()


def test_windows_in_all_layers_have_no_bytes_per_token(tmp_path: Path, run: Run) -> None:
    values = about("mla", 4.0, 5.0)
    for name, size in (("original", 600), ("converted", 150)):
        values["points"][name] |= {"cache_bytes_per_token": 0.0, "cache_bytes_measured": size}
    path = run("r1", "task=wikitext2 convert=mla", conversion=values)
    (run_,) = decoders.conversions(collect([path])).to_dict("records")
    assert [run_[key] for key in ("Cache, %", *decoders.SIZES)] == [25, 600, 150]


def test_the_lines_of_the_runs_give_the_same_again(tmp_path: Path, run: Run) -> None:
    """So that `make tables` needs no records; a damaged line is named."""
    run("r1", "task=wikitext2 convert=tpa convert.rank=2", conversion=about("tpa", 4.0, 5.25))
    folder = tmp_path / "experiments/convert/sample"
    assert main(["compressed", str(tmp_path / "runs"), "--out", str(folder)]) == 0
    ((place, report),) = command.folders(tmp_path / "experiments")
    assert place == folder
    for path in report([], tmp_path / "again"):
        assert path.suffix == ".png" or path.read_bytes() == (folder / path.name).read_bytes()
    file = folder / "runs.csv"
    file.write_text(file.read_text().replace(",5.25,", ",five,"))
    with pytest.raises(DataError, match="runs.csv: .*five"):
        report([], tmp_path / "again")

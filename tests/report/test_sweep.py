"""The comparison at the end of a multirun."""

import copy
import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from attnlab.report import sweep
from attnlab.run.directory import locked
from attnlab.run.store import collect
from attnlab.run.sweep import listed
from tests.report.conftest import MUSTC, set_values
from tests.run.test_sweep import note

pytestmark = pytest.mark.usefixtures("unrendered")
Job = Callable[..., Path]


@pytest.fixture
def job(template: dict[str, Any], tmp_path: Path) -> Job:
    """Writes a job's directory below tmp_path/runs: the record of one run, with other settings and numbers."""

    def make(name: str, setting: str, **values: Any) -> Path:
        record = copy.deepcopy(template) | {"command": f"python -m attnlab task=mustc {setting}"}
        chosen = dict(word.split("=") for word in setting.split())
        record |= {"attention": chosen["attention"], "seed": int(chosen.get("seed", 1))}
        record["stride"] = 2 if chosen["attention"] == "mtla" else None
        record["parameters"]["total"], record["kv_cache"]["elements_per_token_per_layer"] = 1000, 640
        record["training"]["tokens_per_second"], record["inference"]["tokens_per_second"] = 50.0, 300.0
        record["training"]["steps"] = 10 * record["seed"]
        set_values(record, values)
        directory = tmp_path / "runs" / name
        directory.mkdir(parents=True)
        (directory / "record.json").write_text(json.dumps(record))
        note(directory.parent, int(directory.name.partition("_")[0]), directory.name, settings=setting.split())
        return directory / "record.json"

    return make


def jobs_in(folder: Path) -> pd.DataFrame:
    """The jobs of a multirun, which have all finished."""
    every = listed(folder)
    return sweep.jobs_of([(job, collect([job.directory])[0]) for job in every], every)


def rows(directory: Path, name: str = "comparison") -> list[dict[str, str]]:
    with (directory / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_for_each_job_and_the_mean_of_its_seeds(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed, bleu in enumerate((20.0, 23.0), 1):
        job(f"{seed}_mha", f"attention=mha seed={seed}", quality={"bleu": bleu, "signature": "s"})
        speed = {"inference__tokens_per_second": 100.0 * seed, "inference__busy_cores_before": 1.5}
        values = {"quality": {"bleu": bleu + 1}, "kv_cache__elements_per_token_per_layer": 144.0}
        job(f"1{seed}_mtla", f"attention=mtla seed={seed}", **values, **speed)
    failed = {"status": "failed", "error": "killed by SIGKILL\n(out of memory?)", "quality": {}}
    job("13_mtla", "attention=mtla seed=3", training__tokens_per_second="not run", **failed)
    assert sweep.render(tmp_path / "nothing") == []
    note(tmp_path / "runs", 14, "14_mtla")
    paths = sweep.render(tmp_path / "runs")
    names = ["comparison.md", "comparison.csv", "comparison_unfinished.csv"]
    names += ["comparison_points.csv", "comparison_points.png"]
    assert [path.name for path in paths] == names
    table = rows(tmp_path / "runs")
    headings = ["Job", "Mechanism", "Seed", "BLEU", "Difference", "Parameters", "Cache per token and layer, numbers"]
    assert list(table[0]) == [*headings, "Updates", "Training, tokens/s", "Decoding, tokens/s"]
    jobs = ["1_mha", "2_mha", "11_mtla", "12_mtla", "mean ± sd", "mean ± sd"]
    assert [row["Job"] for row in table] == jobs  # by number, not by letter
    assert list(table[0].values()) == ["1_mha", "mha", "1", "20", "", "1000", "640", "10", "50.0", "300.0"]
    mean = ["mean ± sd", "mtla s=2", "1, 2", "22.50 ± 2.12", "", "1000", "144", "15 ± 7"]
    mean += ["50.0 ± 0.0", "150.0 ± 70.7"]
    assert list(table[5].values()) == mean
    apart = [list(row.values()) for row in rows(tmp_path / "runs", "comparison_unfinished")]
    assert apart == [
        ["13_mtla", "attention=mtla seed=3", "failed", "killed by SIGKILL (out of memory?)"],
        ["14_mtla", "", "without a record", "it was ended before it could write one"],
    ]
    points = [tuple(row.values()) for row in rows(tmp_path / "runs", "comparison_points")]
    assert points[1:3] == [("mha", "2", "640", "23.0"), ("mtla s=2", "1", "144.0", "21.0")] and len(points) == 4
    printed = capsys.readouterr()
    assert not printed.out
    assert "22.50 ± 2.12" in printed.err and "killed by SIGKILL (out of memory?)" in printed.err
    text = (tmp_path / "runs" / "comparison.md").read_text(encoding="utf-8")
    assert "Budgets are unequal, from 10 updates (1_mha) to 20 updates (12_mtla)" in text
    assert "1.5 cores" in text and "| 1,000 |" in text
    assert "# Not finished" in text.partition(f"- Corpus: {MUSTC}.")[2]


def scored(path: Path, nats: float) -> None:
    (path.parent / "windows.tsv").write_text("tokens\tnats\n" + f"10\t{10 * nats}\n" * 40)


def test_a_job_is_compared_with_the_first_one_of_its_seed(job: Job, tmp_path: Path) -> None:
    for number, nats in enumerate((1.0, 0.9, 1.1, 1.0, 1.1, 1.1)):
        setting = f"attention={('mha', 'mla', 'mqa')[number % 3]} seed={number // 3}"
        scored(job(f"{number}_job", setting, quality={"perplexity": round(math.exp(nats), 4)}), nats)
    sweep.render(tmp_path / "runs")
    differences = [row["Difference"] for row in rows(tmp_path / "runs")]
    first = ["", "-0.26, p = 0.001", "+0.29, p = 0.001", "", "+0.29, p = 0.001", "+0.29, p = 0.001"]
    assert differences == [*first, "", "-0.26 to +0.29", "+0.29 to +0.29"]
    text = (tmp_path / "runs" / "comparison.md").read_text(encoding="utf-8")
    assert "Lower perplexity is better. Compared with mha, " in text
    assert "undecided" in text and "disagree): mla; worse: mqa." in text


def test_runs_of_two_corpora_have_no_mean_and_are_not_compared(job: Job, tmp_path: Path) -> None:
    for number, nats in enumerate((1.0, 0.9, 2.0, 2.1)):
        setting = f"attention={'mha' if number % 2 == 0 else 'mla'} data_root={'one' if number < 2 else 'two'}"
        path = job(f"{number}_job", setting, quality={"perplexity": round(math.exp(nats), 4)})
        scored(path, nats)
    table = sweep.table(jobs_in(tmp_path / "runs"))
    place = table.headers.index("Difference")
    assert [(row[2], row[place][:1]) for row in table.rows] == [("one", ""), ("one", "-"), ("two", ""), ("two", "+")]
    assert "better: mla data_root=one; worse: mla data_root=two." in table.notes[-1]


def test_other_settings_have_columns_and_are_not_seeds(job: Job, tmp_path: Path) -> None:
    job("0_a", "attention=mla seed=1 rank=64 lr=1", rank=64)
    job("1_a", "attention=mla seed=1 rank=64 lr=2", rank=64)
    job("2_a", "attention=mla seed=2 rank=64 lr=2", rank=64)
    grid = sweep.table(jobs_in(tmp_path / "runs"))
    assert grid.headers[:4] == ["Job", "Mechanism", "lr", "Seed"]
    assert [row[:4] for row in grid.rows] == [
        *(["0_a", "mla r=64", "1", "1"], ["1_a", "mla r=64", "2", "1"], ["2_a", "mla r=64", "2", "2"]),
        ["mean ± sd", "mla r=64", "2", "1, 2"],
    ]


def test_several_metrics_are_named_in_each_row_and_not_drawn(job: Job, tmp_path: Path) -> None:
    job("0_a", "attention=mha")
    job("1_a", "attention=mla", quality={"wer": 31.5}, parameters__total=1040)
    job("2_a", "attention=mqa", quality={"wer": 0.0}, kv_cache__elements_per_token_per_layer=0)
    jobs = jobs_in(tmp_path / "runs")
    grid = sweep.table(jobs)
    assert [row[grid.headers.index("BLEU, WER")] for row in grid.rows] == ["20", "31.5", "0"]
    assert grid.rows[2][grid.headers.index("Cache per token and layer, numbers")] == "of fixed size"
    assert sweep.points_of(jobs)[1].empty
    assert sum(note.startswith("Parameters differ by 4 %: task.match=parameters") for note in grid.notes) == 1


def test_jobs_that_live_elsewhere(job: Job, tmp_path: Path) -> None:
    """One was finished by another multirun, one has been continued: their settings are those of this multirun."""
    job("old/4_mha", "attention=mha seed=1", command="python -m attnlab resume=somewhere", quality={"bleu": 20.0})
    job("new/1_mha", "attention=mha seed=2", quality={"bleu": 21.0})
    for number, place in enumerate(("../old/4_mha", "1_mha", "2_mha")):
        words = ["attention=mha", f"seed={number}", f"task.dropout={number}"]
        note(tmp_path / "runs" / "new", number, f"{number}_mha", place, words)
    sweep.render(tmp_path / "runs" / "new")
    table = rows(tmp_path / "runs" / "new")
    assert [(row["BLEU"], row["task.dropout"]) for row in table] == [("20", "0"), ("21", "1")]
    (missing,) = rows(tmp_path / "runs" / "new", "comparison_unfinished")
    assert (missing["Job"], missing["Status"]) == ("2_mha", "without a record")


@pytest.mark.parametrize(
    ("settings", "over", "expected"),
    [
        (["compress=irratt rank=4", "compress=irratt rank=8"], "rank", [("r=4", 4.0), ("r=8", 8.0)]),
        (["compress=laser compress.keep=0.5", "compress=laser compress.keep=0.2"], "compression rate",
         [("keep=0.2", 5.0), ("keep=0.5", 2.0)]),
        (["task.dropout=0.1", "task.dropout=0.2"], "cached", [("dropout=0.1", 640.0), ("dropout=0.2", 640.0)]),
    ],
)  # fmt: skip
def test_a_plot_is_over_what_the_sweep_varies(
    settings: list[str], over: str, expected: list[tuple[str, float]], job: Job, tmp_path: Path
) -> None:
    for number, words in enumerate(settings):
        chosen = dict(word.split("=") for word in words.split())
        more: dict[str, Any] = {"rank": int(chosen["rank"]) if "rank" in chosen else None}
        if keep := chosen.get("compress.keep"):
            more["compression"] = {"rate": {"rate": 1 / float(keep)}}
        job(f"{number}_a", f"attention=mha seed=1 {words}", **more)
    x, points = sweep.points_of(jobs_in(tmp_path / "runs"))
    drawn = [(row[0].partition(" ")[2], float(row[2])) for row in points.to_numpy()]
    assert x.startswith(over) and sorted(drawn) == expected


def test_jobs_that_are_left_to_another_process(job: Job, tmp_path: Path) -> None:
    """One that runs there with a record, and one that has none yet."""
    path = job("1_mha", "attention=mha", status="running")
    note(path.parents[1], 2, "2_mha")
    (path.parents[1] / "2_mha").mkdir()
    with locked(path.parent), locked(path.parents[1] / "2_mha"):
        sweep.render(path.parents[1])
    unfinished = rows(path.parents[1], "comparison_unfinished")
    assert [row["Status"] for row in unfinished] == ["running", "without a record"]
    assert all(row["Error"].startswith("in progress elsewhere (process ") for row in unfinished)

"""Tables of papers from hand-made records."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from attnlab.config.build import CONF
from attnlab.errors import ConfigError, DataError
from attnlab.report.command import main
from attnlab.report.figure import read_curves
from attnlab.report.render import table
from attnlab.report.spec import Spec, read_spec
from attnlab.report.table import Grid
from attnlab.run.store import SavedRecord, collect
from tests.report.conftest import MUSTC, Run

SPEC = CONF.parent / "experiments" / "mtla" / "table1.yaml"
PAPER = "task=mustc scale=paper attention"


def rendered(tmp_path: Path) -> Grid:
    return table(read_spec(SPEC), collect([tmp_path / "runs"]))


def cell(grid: Grid, row: str, column: str) -> str:
    lines = [line for line in grid.rows if re.sub(r" \[\w\]$", "", line[0]) == row]
    headers = [re.sub(r" \[\w\]", "", header) for header in grid.headers]
    assert len(lines) == 1
    return lines[0][headers.index(column)]


def notes(grid: Grid, word: str) -> list[str]:
    return [note for note in grid.notes if word in note]


def test_one_run_each(tmp_path: Path, run: Run) -> None:
    run("a", f"{PAPER}=mha", inference__seconds=120.0, inference__mean_memory_mib=900.0)
    elsewhere = MUSTC.replace("/some/where", "another place")
    values = {"inference__seconds": 60.0, "inference__mean_memory_mib": 300.0, "quality": {"bleu": 23.456}}
    run("b", f"{PAPER}=mtla stride=2", corpus=elsewhere, scale="renamed", task="renamed", **values)
    grid = rendered(tmp_path)
    assert cell(grid, "MTLA, s = 2", "BLEU, ours") == "23.46"
    assert cell(grid, "MTLA, s = 2", "Time (s), ours") == "60.0"
    assert cell(grid, "MTLA, s = 2", "Speed-up, ours") == "2.00 (R1/R2)"
    assert cell(grid, "MTLA, s = 2", "Memory reduction, ours") == "3.00 (R1/R2)"
    assert cell(grid, "MTLA, s = 3", "BLEU, ours") == "not run"
    about = grid.records[1]
    assert about["Record"] == "R2" and about["Row"] == "MTLA, s = 2" and about["File"].endswith("b/record.json")
    assert "train 229703" in about["Corpus"] and "another place" not in about["Corpus"] and not notes(grid, "NOT")
    assert not notes(grid, "not run: MHA") and notes(grid, "not run: MLA")


def test_seeds_and_the_newest_run_of_each(tmp_path: Path, run: Run) -> None:
    run("new", f"{PAPER}=mla", started="2026-03-01", quality={"bleu": 21.0})
    run("old", f"{PAPER}=mla", started="2026-01-01", quality={"bleu": 1.0})
    run("other", f"{PAPER}=mla", "seed=2", started="2026-02-01", quality={"bleu": 22.0})
    grid = rendered(tmp_path)
    assert cell(grid, "MLA", "BLEU, ours") == "21.50 (21.00–22.00, 2 seeds)"
    assert [about["Row"] for about in grid.records] == ["MLA", "MLA"] and notes(grid, "Records: 2 files in")


@pytest.mark.parametrize(
    "values",
    [
        {"row": "task=mustc attention=mtla"},
        {"row": f"{PAPER}=mtla stride=2 task.train.max_steps=10"},
        {"row": f"{PAPER}=mtla stride=2", "more": "task.encoder_checkpoint=null"},
        {"row": f"{PAPER}=mla"},
        {"row": f"{PAPER}=mtla stride=3"},
        {"row": f"{PAPER}=mtla rank=8"},
        {"status": "running"},
        {"status": "failed", "error": "x"},
        {"mode": "bench"},
        {"mode": "test"},
        {"quality": {"wer": 3.0}},
        {"quality": {"bleu": "not run"}},
        {"corpus": "sample"},
        {"corpus": "MuST-C en-de at x: train 3000, dev 120, tst-COMMON 240 segments"},
        {"corpus": MUSTC.replace("229703", "250942")},
        {"corpus": MUSTC.replace("en-de", "en-fr")},
    ],
)
def test_what_never_stands_for_a_row(tmp_path: Path, run: Run, values: dict[str, Any]) -> None:
    defaults = {"row": f"{PAPER}=mtla stride=2", "more": "task.data.num_workers=4"}
    row, more, *_ = (defaults | values).values()
    run("a", row, more, **{key: value for key, value in values.items() if key not in defaults})
    grid = rendered(tmp_path)
    assert cell(grid, "MTLA, s = 2", "BLEU, ours") == "not run"
    left = notes(grid, "Left out: 1 scored record(s) of ")
    assert len(left) == ("corpus" in values)
    assert all(("sample corpus" in note) == (values["corpus"] == "sample") for note in left)


@pytest.mark.parametrize(
    "change", [{"inference__beam": 5}, {"inference__protocol": "x"}, {"environment__device": "gpu"}]
)
def test_no_ratio_across_protocols(tmp_path: Path, run: Run, change: dict[str, object]) -> None:
    run("a", f"{PAPER}=mha")
    run("b", f"{PAPER}=mla", **change)
    assert cell(rendered(tmp_path), "MLA", "Speed-up, ours") == "protocols differ"


def test_broken_specifications(tmp_path: Path) -> None:
    good = SPEC.read_text()
    broken = {
        "a: [": "while parsing",
        "title: x": "'source' and 'command'",
        good.replace("baseline: MHA", "baseline: mha"): "baseline 'mha'",
        good.replace("note: gate", "note: gait"): "note 'gait'",
        good.replace("note: gate", "baseline: MLB"): "baseline 'MLB' is the label of no row",
        good.replace("note: gate", "corpus: MuST-C"): "its baseline 'MHA' has another corpus",
        good + "picture: rank": "'rank': expected ranks or fusion or context",
        good.replace("baseline: MHA\n", ""): "baseline '' is the label of no row",
        good.replace("digits: 2", "digit: 2"): "digit",
    }
    for text, expected in broken.items():
        (tmp_path / "t.yaml").write_text(text)
        with pytest.raises(ConfigError, match=expected):
            main(["table", str(tmp_path / "t.yaml")])
    with pytest.raises(ConfigError, match="missing.yaml: cannot be read"):
        main(["figure", str(tmp_path / "missing.yaml")])
    with pytest.raises(ConfigError, match="nearest: .*/mtla/table1.yaml"):
        main(["table", str(SPEC.parents[1] / "mlta" / SPEC.name)])


def test_packed_records_give_the_same_table(tmp_path: Path, run: Run, caplog: pytest.LogCaptureFixture) -> None:
    directories = [run(f"{seed}", f"{PAPER}=mha", f"seed={seed}").parent for seed in (1, 2)]
    (directories[0] / "curves").mkdir()
    (directories[0] / "curves" / "metrics.csv").write_text("step,loss\n10,3\n20,2.5\n")
    grid, packed = rendered(tmp_path), tmp_path / "runs" / "records.jsonl"
    for directory in directories:  # one after the other into one file
        assert main(["records", str(directory), "--out", str(packed.parent)]) == 0
        shutil.rmtree(directory)
    assert rendered(tmp_path) == grid and read_curves(collect([packed])[0]) == {"loss": [(10, 3.0), (20, 2.5)]}
    packed.write_text(packed.read_text() + "{\n")
    assert rendered(tmp_path) == grid and "records.jsonl, line 3: skipped" in caplog.text
    with pytest.raises(DataError, match="a line cannot be read"):
        main(["records", str(packed), "--out", str(packed.parent)])


def test_runs_of_other_data_in_outputs_do_not_change_a_table(
    tmp_path: Path, template: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    another = "another at /some/where: train 5 segments"
    places = {"paper/committed": "sample", "outputs/own": MUSTC, "outputs/sample": "sample", "outputs/other": another}
    for place, corpus in places.items():
        Path(place).mkdir(parents=True)
        Path(place, "record.json").write_text(json.dumps(template | {"corpus": corpus}))
    spec = Path("paper", "table1.yaml")
    spec.write_bytes(SPEC.read_bytes())
    read: list[set[str]] = []

    def write_table(_: Spec, records: list[SavedRecord], stem: Path) -> list[Path]:
        read.append({saved.path.parent.as_posix() for saved in records})
        return [stem]

    monkeypatch.setattr("attnlab.report.command.write_table", write_table)
    assert main(["table", str(spec)]) == 0 and main(["table", str(spec), "--records", "outputs"]) == 0
    assert read[0] == {"paper/committed", "outputs/own"}  # the former is a part of the committed table
    assert read[1] == {"outputs/own", "outputs/sample", "outputs/other"}  # these were asked for


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["table"], ConfigError),
        (["table", "experiments", "--records", "outputs"], ConfigError),
        (["bench", "--out", "outputs"], ConfigError),
        (["table", "."], DataError),  # a folder without specifications
        (["needle", "no"], DataError),
        ([], DataError),  # no outputs/
        ([".", "--output"], ConfigError),
    ],
)
def test_wrong_words(words: list[str], error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiments").mkdir()
    with pytest.raises(error):
        main(words)


@pytest.mark.parametrize("kind", ["bench", "speed", "compressed", "needle"])
def test_records_with_nothing_to_show(kind: str, run: Run) -> None:
    path = run("a", f"{PAPER}=mha")
    with pytest.raises(DataError, match="no finished record"):
        main([kind, str(path)])
    path.write_text(json.dumps({}))
    with pytest.raises(DataError, match="no readable record"):
        main([kind, str(path)])

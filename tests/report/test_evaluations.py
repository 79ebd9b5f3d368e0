"""T6's tables of evaluations and their figures, filled from records as mode=evaluate and mode=train leave them."""

from pathlib import Path
from typing import Any

import pytest

from attnlab.config.build import CONF
from attnlab.modes import evaluate
from attnlab.report.render import table, write_table
from attnlab.report.spec import read_spec
from attnlab.run.store import collect
from tests.report.conftest import Run

T6 = CONF.parent / "experiments" / "t6"
SPEC = read_spec(T6 / "table3.yaml")
FIGURE = read_spec(T6 / "figure3.yaml")
TRAINED = "FineWeb-Edu at /some/where: train 99000000000, validation 99999744, test 99999744 tokens; vocabulary 50257"


def scores(**values: float) -> dict[str, Any]:
    """Of the harness, each 0.5 but for those given."""
    metrics = {column.key: column.value.rpartition(".")[2] for column in SPEC.columns[:-1]}
    return {"tasks": {task: {metric: values.get(task, 0.5)} for task, metric in metrics.items()}}


def both(zero: dict[str, Any], two: dict[str, Any]) -> dict[str, Any]:
    return {"shots": {"0": zero["tasks"], "2": two["tasks"]}}


@pytest.mark.slow
def test_a_row_reads_the_numbers_of_its_shots(run: Run, tmp_path: Path) -> None:
    row = next(row for row in SPEC.rows if row.label == "TPA")
    settings = SPEC.overrides(row)
    corpus = f"{SPEC.corpus['name']} at /some/where: train 99000000000, validation 9 tokens"
    made = {"mode": "evaluate", "corpus": corpus, "quality": scores()}
    quality = both(scores(arc_easy=0.95), scores(arc_easy=0.68))
    quality["shots"]["2"]["arc_easy"]["acc_norm_stderr"] = 0.0125
    run("both", "", *settings, **made | {"quality": quality})
    newer = {"started": "2026-01-03T00:00:00+00:00"}
    run("two", "", *settings, "task.evaluation.num_fewshot=2", **made, **newer)  # not the paper's evaluation
    run("sample", "", *settings, **made | {"corpus": f"{corpus.partition('; trained')[0]}; trained on sample"})
    grid = table(SPEC, collect([tmp_path / "runs"]))
    cells = dict(zip(grid.headers, next(cells for cells in grid.rows if cells[0].startswith("TPA [")), strict=True))
    assert (cells["ARC-E, ours"], cells["ARC-C, ours"]) == ("68.00 ± 1.25", "50.00")
    assert cells["Avg., ours"] == f"{100 * (0.68 + 8 * 0.5) / 9:.2f}" and cells["Avg. [d], published"] == "53.04"
    assert not any("NOT the row's recipe" in note for note in grid.notes)
    assert len(grid.records) == 1
    assert [note for note in grid.notes if "MHA: `python" in note] and not [n for n in grid.notes if ": TPA: `" in n]
    (last,) = [note for note in grid.notes if "run directory of each row" in note]
    assert "`python -m src.run mode=evaluate checkpoint=RUN`" in last
    zero = table(read_spec(T6 / "table2.yaml"), collect([tmp_path / "runs"]))
    assert "95.00" in next(cells for cells in zero.rows if cells[0].startswith("TPA ["))


def test_an_evaluation_names_what_its_model_was_trained_on(run: Run) -> None:
    path = run("trained", "task=fineweb_edu attention=tpa", corpus=TRAINED)
    assert evaluate._trained_on(str(path.parent)) == TRAINED
    path.unlink()
    assert evaluate._trained_on(str(path.parent)) == evaluate._trained_on(None) == ""


@pytest.mark.slow
def test_a_figure_draws_the_runs_of_its_rows_alone(run: Run, tmp_path: Path) -> None:
    row = next(row for row in FIGURE.rows if row.label == "TPA")
    settings, made = (
        FIGURE.overrides(row),
        {"corpus": TRAINED, "quality": {"perplexity": 17.5}, "training__best_val_loss": 2.75},
    )
    for name, more in (("exact", []), ("other", ["task.train.clip=0.5"])):
        folder = run(name, "", *settings, *more, **made).parent / "curves"
        folder.mkdir()
        (folder / "metrics.csv").write_text("step,epoch,loss,val_loss\n10,0,3.5,\n10,0,,3.25\n")
    paths = write_table(FIGURE, collect([tmp_path / "runs"]), tmp_path / "figure3")
    assert [path.name for path in paths[3:]] == ["figure3_curves.csv", "figure3_curves.png"]
    assert (tmp_path / "figure3_curves.csv").read_text().splitlines() == [
        "panel,run,seed,update,value",
        "training loss in nats per token,TPA,1,10,3.5",
        "validation loss in nats per token,TPA,1,10,3.25",
    ]
    assert "| TPA | 353,992,704 | 444 | 2.7500 | 17.50 |" in (tmp_path / "figure3.md").read_text()

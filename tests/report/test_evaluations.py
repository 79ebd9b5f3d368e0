"""A figure of T6 from records as mode=train leaves them, and the corpus of an evaluation."""

from pathlib import Path

import pytest

from attnlab.config.build import CONF
from attnlab.modes import evaluate
from attnlab.report.render import write_table
from attnlab.report.spec import read_spec
from attnlab.run.store import collect
from tests.report.conftest import Run

T6 = CONF.parent / "experiments" / "t6"
FIGURE = read_spec(T6 / "figure3.yaml")
TRAINED = "FineWeb-Edu at /some/where: train 99000000000, validation 99999744, test 99999744 tokens; vocabulary 50257"


def test_an_evaluation_names_what_its_model_was_trained_on(run: Run) -> None:
    path = run("trained", "task=fineweb_edu attention=tpa", corpus=TRAINED)
    assert evaluate.trained_on(str(path.parent)) == TRAINED
    path.unlink()
    assert evaluate.trained_on(str(path.parent)) == evaluate.trained_on(None) == ""


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
    assert [path.name for path in paths[4:]] == ["figure3_curves.csv", "figure3_curves.png"]
    assert (tmp_path / "figure3_curves.csv").read_text().splitlines() == [
        "panel,run,seed,update,value",
        "training loss in nats per token,TPA,1,10,3.5",
        "validation loss in nats per token,TPA,1,10,3.25",
    ]
    assert "| TPA | 353,992,704 | 444 | 2.7500 | 17.50 |" in (tmp_path / "figure3.md").read_text()

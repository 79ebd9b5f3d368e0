"""The corpus of an evaluation."""

from attnlab.modes import evaluate
from tests.report.conftest import Run

TRAINED = "FineWeb-Edu at /some/where: train 99000000000, validation 99999744, test 99999744 tokens; vocabulary 50257"


def test_an_evaluation_names_what_its_model_was_trained_on(run: Run) -> None:
    path = run("trained", "task=fineweb_edu attention=tpa", corpus=TRAINED)
    assert evaluate.trained_on(str(path.parent)) == TRAINED
    path.unlink()
    assert evaluate.trained_on(str(path.parent)) == evaluate.trained_on(None) == ""

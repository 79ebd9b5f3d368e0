"""TensorLLM, tables II to IV: every printed rate from the ranks of its row, quoted numbers marked, hybrids compared."""

import pytest

from attnlab.config.build import CONF
from attnlab.report.render import table
from attnlab.report.spec import Row, Spec, read_spec

SPECS = {i: read_spec(CONF.parent / "experiments" / "tensorllm" / f"table{i}.yaml") for i in (2, 3, 4)}


def test_the_rates_of_table_2_to_the_printed_digit() -> None:
    """That they are what mode=describe gives is in test_experiments.py."""
    rows = [row for row in SPECS[2].rows if "rate" in row.published]
    assert len(rows) == 12 and len({row.published["rate"] for row in rows}) == 10
    for row in rows:
        assert f"{row.computed['rate']:.2f}" == row.published["rate"], row.label


def test_every_published_cell_is_there() -> None:
    cells = {i: sum(len(row.published) for row in spec.rows) for i, spec in SPECS.items()}
    assert cells == {2: 12 * 4 + 12, 3: 36 * 2, 4: 24 * 2}


def test_what_was_quoted_is_marked() -> None:
    for i, mark in ((2, "original"), (3, "case 1"), (4, "original")):
        for row in SPECS[i].rows:
            assert (mark in row.label) == (row.note in ("quoted", "miscopied")), row.label
    (wrong,) = [row for row in SPECS[2].rows if row.note == "miscopied"]
    other = by_label(SPECS[2], "LLaMA2, Bios Profession, original")
    assert wrong.label.startswith("LLaMA2, WikidataQA") and wrong.published["loss"] == other.published["loss"] == "4.19"


def test_5_of_12_hybrids_are_worse_than_tensorllm_alone() -> None:
    worse = []
    for row in SPECS[3].rows:
        place, _, case = row.label.rpartition(", ")
        if case.startswith("case 3"):
            alone = by_label(SPECS[2], f"{place}, TensorLLM")
            if float(row.published["accuracy"]) < float(alone.published["accuracy"]):
                worse.append(row.label)
    assert worse == [row.label for row in SPECS[3].rows if row.note == "worse"] and len(worse) == 5


def test_the_ablation_quotes_table_2() -> None:
    for row in SPECS[4].rows:
        place, _, what = row.label.rpartition(", ")
        if what == "all four":
            twin = by_label(SPECS[2], f"{place}, TensorLLM")
            assert row.published.items() <= twin.published.items() and row.computed == twin.computed


@pytest.mark.parametrize("number", SPECS)
def test_what_was_not_measured_has_its_command(number: int) -> None:
    grid = table(SPECS[number], [])
    ours = [i for i, header in enumerate(grid.headers) if header.endswith(", ours")][:2]
    assert all(row[i] == "not run" for row in grid.rows for i in ours)
    commands = [note for note in grid.notes if note.startswith("not run: ")]
    assert len(commands) == len(SPECS[number].rows)
    assert all("task.compat=true data_root=QUESTIONS" in note for note in commands)


def by_label(spec: Spec, label: str) -> Row:
    (row,) = [row for row in spec.rows if row.label == label]
    return row

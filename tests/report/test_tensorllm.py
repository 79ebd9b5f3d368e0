"""TensorLLM, tables II to IV: quoted numbers are marked, hybrids compared."""

from attnlab.config.build import CONF
from attnlab.report.spec import Row, Spec, read_spec

SPECS = {i: read_spec(CONF.parent / "experiments" / "tensorllm" / f"table{i}.yaml") for i in (2, 3, 4)}


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


def by_label(spec: Spec, label: str) -> Row:
    (row,) = [row for row in spec.rows if row.label == label]
    return row

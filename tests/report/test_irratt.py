"""IrrAtt's table 1: every percentage from the configuration of its row, to the printed digit but for one."""

from attnlab.config.build import CONF
from attnlab.report.render import table
from attnlab.report.spec import read_spec

SPEC = read_spec(CONF.parent / "experiments" / "irratt" / "table1.yaml")
COLUMNS = ("attention", "flops", "parameters")


def test_the_48_percentages() -> None:
    """That they are what mode=describe gives is in test_experiments.py."""
    rows = [row for row in SPEC.rows if "compress=" in row.command and "model=" not in row.command]
    cells = [(row, column) for row in rows for column in COLUMNS]
    assert len(cells) == 48
    for row, column in cells:
        printed, ours = float(row.published[column]), row.computed[column]
        if column in row.differs:  # 49.614, printed 49.7
            assert f"{ours:.1f}" == "49.6" and abs(ours - printed) < 0.1
        else:
            assert f"{ours:.1f}" == f"{printed:.1f}", (row.label, column)


def test_the_table_has_computed_columns_and_commands_for_the_rest() -> None:
    grid = table(SPEC, [])
    row = next(row for row in grid.rows if row[0].startswith("DeiT-Small, IrrAtt 192"))
    cells = dict(zip(grid.headers, row, strict=True))
    assert (cells["QK rank"], cells["VO rank"], cells["MLP rank"]) == ("192", "32", "–")
    assert cells["MHSA multiply-adds, %, ours"] == "50.957"
    assert cells["Top-1, %, ours"] == cells["Drop, points, ours"] == "not run"
    assert any("compress=irratt rank=192 data_root=IMAGENET" in note for note in grid.notes)

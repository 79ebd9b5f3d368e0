"""Curves of several runs on one axis: what is drawn, of which rows, and that no name lies on another."""

from pathlib import Path

from attnlab.report.figure import draw_together, together
from attnlab.report.spec import Panel

PANELS = [Panel("loss", "training loss"), Panel("val_loss", "perplexity, B", exp=True, rows="B")]


def runs(tmp_path: Path, *names: str) -> list[tuple[str, int, Path]]:
    runs = []
    for seed, name in enumerate(names):
        folder = tmp_path / f"{seed}" / "curves"
        folder.mkdir(parents=True)
        (folder / "metrics.csv").write_text(f"step,epoch,loss,val_loss\n10,0,{3 + seed},\n20,0,2.5,\n20,0,,1.0\n")
        runs.append((name, seed, folder.parent))
    return runs


def test_the_data_has_every_point_of_the_rows(tmp_path: Path) -> None:
    data = together([*runs(tmp_path, "A", "B", "B"), ("C", 1, tmp_path / "none")], PANELS)
    rows = {name: panel.to_numpy().tolist() for name, panel in data.groupby("panel")}
    assert [row[1:] for row in rows["training loss"]] == [
        [name, seed, update, value]
        for seed, name in enumerate("ABB")
        for update, value in ((10, 3.0 + seed), (20, 2.5))
    ]
    assert [row[1:] for row in rows["perplexity, B"]] == [["B", seed, 20, 2.718281828459045] for seed in (1, 2)]


def test_a_run_of_one_panel_alone_is_named(tmp_path: Path) -> None:
    panels = [Panel("loss", "A's loss", rows="A"), Panel("loss", "B's loss", rows="B")]
    (legend,) = draw_together(together(runs(tmp_path, "A", "B"), panels)).legends
    assert [text.get_text() for text in legend.get_texts()] == ["A", "B"]

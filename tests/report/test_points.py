"""Points and lines of quality over a size: what is drawn, and that no label covers another or a point."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Annotation

from attnlab.report.figure import POINTS, frontier, scatter, seeds
from attnlab.report.spec import Plot


@pytest.mark.parametrize("log_x", [False, True])
def test_labels_of_a_plot_cover_neither_points_nor_each_other(log_x: bool) -> None:
    points = [("MHA", 6144, 61.5), ("GQA", 2048, 62.9), ("MLA", 2304, 63.7), ("TPA", 2752, 66.9), ("far", 150, 81.4)]
    points += [("MTLA, s = 2", 1152, 67.2), ("at the right", 6000, 66.0)]
    data = pd.DataFrame([(label, 1, x, y) for label, x, y in points], columns=POINTS)
    figure = scatter(data, Plot("a.b", "c.d", "bytes", "perplexity", log_x=log_x), "a title")
    figure.draw_without_rendering()
    (axes,) = figure.axes
    boxes = [text.get_window_extent() for text in axes.texts]
    assert [text.get_text() for text in axes.texts] == [label for label, _, _ in points]
    assert axes.get_title() == "a title" and axes.get_xscale() == ("log" if log_x else "linear")
    assert not [(i, j) for i in range(len(boxes)) for j in range(i) if boxes[i].overlaps(boxes[j])]
    centres = axes.transData.transform([(x, y) for _, x, y in points])
    assert not any(box.contains(x, y) for box in boxes for x, y in centres)
    assert all(axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1 for box in boxes)


def test_every_seed_is_drawn_and_the_label_stands_at_the_mean() -> None:
    rows = [["a", "1", "2.0", "10.0"], ["a", "2", "4.0", "20.0"], ["b", "1", "3.0", "5.0"]]
    (axes,) = scatter(pd.DataFrame(rows, columns=POINTS), Plot("", "", "x", "y")).axes
    drawn = [np.asarray(line.get_xydata()).tolist() for line in axes.lines]
    assert drawn == [[[2.0, 10.0], [4.0, 20.0]], [[3.0, 15.0]], [[3.0, 5.0]]]
    assert [text.xy for text in axes.texts if isinstance(text, Annotation)] == [(3.0, 15.0), (3.0, 5.0)]


def test_lines_go_through_the_means_and_bars_are_the_spread() -> None:
    rows = [["a", "1", "8", "10.0"], ["a", "2", "8", "20.0"], ["a", "1", "4", "5.0"], ["b", "1", "4", "7.0"]]
    page = seeds(pd.DataFrame(rows, columns=POINTS), Plot("", "", "rank", "top1"))
    (axes,) = page.axes
    a, b = axes.containers
    assert np.asarray(a[0].get_xydata()).tolist() == [[4.0, 5.0], [8.0, 15.0]]
    (bars,) = a[2]
    assert [segment.tolist() for segment in bars.get_segments()] == [[[4, 5], [4, 5]], [[8, 10], [8, 20]]]
    assert [text.get_text() for text in page.legends[0].texts] == ["a", "b"]


def test_the_frontier_joins_what_no_smaller_size_surpasses() -> None:
    points = [(8.0, 0.5), (4.0, 0.5), (2.0, 0.1), (16.0, 0.9), (4.0, 0.3), (32.0, 0.8)]
    assert frontier(points, "max") == [(2.0, 0.1), (4.0, 0.5), (16.0, 0.9)]
    assert frontier(points, "min") == [(2.0, 0.1)]
    rows = [[f"r{i}", "1", str(x), str(y)] for i, (x, y) in enumerate(points)]
    (axes,) = scatter(pd.DataFrame(rows, columns=POINTS), Plot("", "", "x", "y", frontier="max")).axes
    assert np.asarray(axes.lines[-1].get_xydata()).tolist() == [[2.0, 0.1], [4.0, 0.5], [16.0, 0.9]]

"""Quality over a size or a speed: a point or a line for each row of a table, with all its seeds."""

from collections.abc import Sequence
from statistics import mean
from typing import TYPE_CHECKING

from attnlab.report.grid import Grid
from attnlab.report.spec import Plot

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEADERS = ["row", "seed", "x", "y"]
SIDES = (  # of a point: offsets to the right and up, and the text's side that lies there; the last if none is free
    (8, 0, "left", "center"), (-8, 0, "right", "center"), (0, 8, "center", "bottom"), (0, -8, "center", "top"),
    (7, 7, "left", "bottom"), (7, -7, "left", "top"), (-7, 7, "right", "bottom"), (-7, -7, "right", "top"),
    (0, 20, "center", "bottom"), (0, -20, "center", "top"), (0, 32, "center", "bottom"), (0, -32, "center", "top"),
    (0, -44, "center", "top"),
)  # fmt: skip
MANY = 16  # labels for which a page is larger
STYLES = ("-", "--", ":", "-.")  # of lines, after each ten colours


def scatter(points: Grid, plot: Plot) -> "Figure":
    """A point for each row at the mean of its seeds, with the row's label beside it and a small dot for each seed.

    Args:
        points: with HEADERS.
        plot: the labels of the axes.
    """
    page, axes = _page(points, plot)
    rows, means = _rows(points), []
    if len(rows) > MANY:
        page.set_size_inches(10, 6.5)
    for number, (label, seeds) in enumerate(rows.items()):
        x, y = (mean(values) for values in zip(*seeds, strict=True))
        means.append((label, x, y))
        if len(seeds) > 1:
            axes.plot(*zip(*seeds, strict=True), "o", markersize=3, color=f"C{number}", alpha=0.6)
        axes.plot(x, y, "o", markersize=7, color=f"C{number}")
    if plot.frontier:
        best = frontier([(x, y) for _, x, y in means], plot.frontier)
        axes.plot(*zip(*best, strict=True), color="gray", linewidth=1, linestyle="--", zorder=0, drawstyle="steps-post")
    if not plot.log_x:
        axes.set_xlim(0, None)  # after the points: from here on the limits stay as they are
    place_labels(page, means)
    return page


def frontier(found: Sequence[tuple[float, float]], better: str) -> list[tuple[float, float]]:
    """The points that no other surpasses at as small an x, from the smallest x on (Pareto).

    Args:
        found: x and y of each.
        better: "max" or "min": which y are better; of x smaller ones are.
    """
    sign = 1 if better == "max" else -1
    best: list[tuple[float, float]] = []
    for x, y in sorted(found, key=lambda point: (point[0], -sign * point[1])):
        if not best or sign * y > sign * best[-1][1]:
            best.append((x, y))
    return best


def lines(points: Grid, plot: Plot) -> "Figure":
    """A line for each row through the means at each x, with the spread of the seeds (least to most); names below.

    Args:
        points: with HEADERS.
        plot: the labels of the axes.
    """
    page, axes = _page(points, plot)
    rows = _rows(points)
    for number, (label, seeds) in enumerate(rows.items()):
        at = {x: [y for other, y in seeds if other == x] for x in sorted({x for x, _ in seeds})}
        middles = [mean(values) for values in at.values()]
        spread = [[m - min(v) for m, v in zip(middles, at.values(), strict=True)]]
        spread.append([max(v) - m for m, v in zip(middles, at.values(), strict=True)])
        style = STYLES[number // 10 % len(STYLES)]
        axes.errorbar(
            list(at),
            middles,
            yerr=spread,
            fmt="o" + style,
            color=f"C{number % 10}",
            capsize=2,
            markersize=5,
            label=label,
        )
    name_below(page, list(rows))
    return page


def name_below(page: "Figure", names: Sequence[str]) -> None:
    """A legend below the panels, in as many columns as there is room for; the page grows by its rows.

    Args:
        page: whose panels have labelled lines; each label stands once.
        names: the labels.
    """
    wide = 0.6 + 0.065 * max(map(len, names))  # inches of one name at 8 points, with its line
    columns = max(1, min(len(names), int(page.get_figwidth() / wide)))
    page.set_figheight(page.get_figheight() + 0.2 * -(-len(names) // columns))
    handles: dict[str, Artist] = {}
    for axes in page.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(str(label), handle)
    page.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=columns, frameon=False, fontsize=8
    )


def place_labels(page: "Figure", points: Sequence[tuple[str, float, float]]) -> None:
    """Write a label beside each point, on the first side on which it covers no point and no other label.

    Args:
        page: of one panel, whose points are drawn and whose scales are set.
        points: label, x and y.
    """
    from matplotlib.transforms import Bbox

    (axes,) = page.axes
    page.draw_without_rendering()  # the layout decides where the points are
    dot = 6 * page.dpi / 72  # half the side of the square around a point, with room for the line of its circle
    centres = axes.transData.transform([(x, y) for _, x, y in points])
    taken = [Bbox.from_bounds(x - dot, y - dot, 2 * dot, 2 * dot) for x, y in centres]
    for label, x, y in points:
        for right, up, horizontal, vertical in SIDES:
            text = axes.annotate(
                label, (x, y), textcoords="offset points", xytext=(right, up), fontsize=9, ha=horizontal, va=vertical
            )
            box = text.get_window_extent()
            inside = axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1
            if (inside and not box.count_overlaps(taken)) or (right, up, horizontal, vertical) == SIDES[-1]:
                taken.append(box)
                break
            text.remove()


def _page(points: Grid, plot: Plot) -> "tuple[Figure, Axes]":
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    page = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = page.subplots()
    axes.set(xlabel=plot.x_label, ylabel=plot.y_label)
    if points.title:
        axes.set_title(points.title, fontsize=10)
    axes.margins(0.12)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if plot.log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ScalarFormatter())
    return page, axes


def _rows(points: Grid) -> dict[str, list[tuple[float, float]]]:
    """x and y of each seed, by row."""
    rows: dict[str, list[tuple[float, float]]] = {}
    for label, _, x, y in points.rows:
        rows.setdefault(label, []).append((float(x), float(y)))
    return rows

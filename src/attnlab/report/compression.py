"""Records of compressed models: a table and a plot of top-1 over multiply-adds, ranks of heads, fusion matrices."""

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from attnlab.errors import DataError
from attnlab.report import figure
from attnlab.report.grid import Grid, facts
from attnlab.report.significance import standard_error
from attnlab.report.variants import (
    DENSE,
    POINTS,
    VO_RANK,
    columns_of,
    error_of,
    layers_of,
    means_table,
    value_ranks,
    variants,
)
from attnlab.run.record import NOT_RUN
from attnlab.run.store import SavedRecord

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

    Vector = np.ndarray[Any, np.dtype[np.float64]]

HEADERS = ["Record", "Method", "Rank", "Seed", "Columns of a layer", "Relative error", "Attention multiply-adds, %"]
HEADERS += ["Multiply-adds, %", "Parameters, %", "Top-1 dense", "compressed", "fine-tuned"]
COMPRESSED = "compressed"  # the folder of a run directory that holds the model


def render(records: Sequence[SavedRecord], directory: Path) -> list[Path]:
    """Write the table sweep.{md,csv,tex}, and figures with their data as CSV beside them.

    With several seeds also means.{md,csv,tex}, a row for each setting. top1: top-1 over multiply-adds. For each method
    whose heads' ranks differ, ranks_<method>: those of the record in the middle of its ranks. fusion_<method>: the
    fusion matrices of the same record, where its run directory still has the compressed model. Methods that differ in
    other settings than ranks have these in the names of their files.

    Args:
        records: records of mode=train with compress=.
        directory: where to write.

    Returns:
        The paths written.

    Raises:
        DataError: no record has a compressed model.
    """
    found = [f for f in records if f.record["status"] == "finished" and layers_of(f)]
    if not found:
        raise DataError("no finished record of a compressed model among those given")
    paths = sweep_table(found).write(directory / "sweep", "md", "csv", "tex")
    if len({f.record["seed"] for f in found}) > 1:
        paths += means_table(found).write(directory / "means", "md", "csv", "tex")
    paths += figure.write(directory / "top1", sweep_points(found), sweep_plot)
    named = variants(found)
    for name in sorted(set(named.values())):
        method = re.sub(r"[ =]", "_", name)
        mine = sorted((f for f in found if named[f.path] == name), key=columns_of)
        middle = mine[(len(mine) - 1) // 2]
        ranks = [layer["ranks"] for layer in layers_of(middle)]
        if any(isinstance(each, list) and len(set(each)) > 1 for each in ranks):
            paths += figure.write(directory / f"ranks_{method}", head_ranks(middle), ranks_plot)
        folder = middle.path.parent / COMPRESSED
        if folder.is_dir() and (fusion := fusions(middle, folder)).rows:
            paths += figure.write(directory / f"fusion_{method}", fusion, fusion_plot)
    return paths


def sweep_table(found: Sequence[SavedRecord]) -> Grid:
    """A row for each record: sizes in percent of the dense model, top-1 before and after fine-tuning, in percent.

    Args:
        found: finished records of compressed models.
    """
    grid = Grid("Compressed attention: top-1 before and after fine-tuning", HEADERS)
    names, own_ranks = variants(found), value_ranks(found)
    if own_ranks:
        grid.headers = [*HEADERS[:3], VO_RANK, *HEADERS[3:]]

    def order(one: SavedRecord) -> tuple[Any, ...]:
        return names[one.path], own_ranks.get(one.path, 0), columns_of(one), one.record["seed"]

    ordered = sorted(found, key=order)
    for i, one in enumerate(ordered, 1):
        record, about = one.record, one.record["compression"]
        left, quality = about["remaining"], about["quality"]
        cells = [f"R{i}", names[one.path], str(record["rank"])]
        cells += [str(own_ranks[one.path])] if own_ranks else []
        cells += [str(record["seed"]), f"{columns_of(one):g}"]
        cells += [f"{error_of(one):.3f}"]
        cells += [f"{left[f'{key}_percent']:.1f}" for key in ("attention", "multiply_adds", "parameters")]
        cells += [_top1(quality[point]) for point in ("dense", *POINTS)]
        grid.rows.append(cells)
    grid.list_records([facts(f"R{i}", one) for i, one in enumerate(ordered, 1)])
    grid.notes.insert(0, "Columns of a layer: query-key columns of all heads together, mean over the layers.")
    errors = [error for one in found if (error := standard_error(one, "quality.top1")) is not None]
    if errors:
        span = " to ".join(dict.fromkeys(f"{error:.1f}" for error in (min(errors), max(errors))))
        grid.notes.insert(1, f"Standard error of a top-1 after fine-tuning, over the images: {span} points.")
    grid.notes.insert(1, "Relative error: of the query-key weights, Frobenius norm, mean over the layers.")
    return grid


def sweep_points(found: Sequence[SavedRecord]) -> Grid:
    """The data of :func:`sweep_plot`: the mean over the seeds of each method and each share of multiply-adds.

    With several seeds also the least and the most of them; with several value-output ranks these too.

    Args:
        found: finished records of compressed models.
    """
    names, own_ranks = variants(found), value_ranks(found)
    several = len({f.record["seed"] for f in found}) > 1
    headers = ["point", "method", "multiply-adds, %", "top-1, %", *["least", "most"] * several]
    grid = Grid("Top-1 over multiply-adds", [*headers, *[VO_RANK] * bool(own_ranks)])
    for point in POINTS:
        values: dict[tuple[int, str, float], list[float]] = {}
        for one in found:
            about = one.record["compression"]
            if isinstance(about["quality"][point], dict):
                place = names[one.path], about["remaining"]["multiply_adds_percent"]
                values.setdefault((own_ranks.get(one.path, 0), *place), []).append(about["quality"][point]["top1"])
        for (value_rank, method, x), mine in sorted(values.items()):
            cells = [point, method, repr(x), repr(mean(mine)), *[repr(min(mine)), repr(max(mine))] * several]
            grid.rows.append([*cells, *[str(value_rank)] * bool(own_ranks)])
    dense = mean(f.record["compression"]["quality"]["dense"]["top1"] for f in found)
    grid.rows.append([DENSE, "", "", repr(dense), *[""] * (len(grid.headers) - 4)])
    return grid


def sweep_plot(points: Grid) -> "Figure":
    """Top-1 before and after fine-tuning over the share of multiply-adds, a line for each method.

    Bars reach from the least to the most of the seeds; each value-output rank has a row of panels.

    Args:
        points: as :func:`sweep_points` gives them.
    """
    from matplotlib.figure import Figure

    dense = next(float(row[3]) for row in points.rows if row[0] == DENSE)
    cells = [dict(zip(points.headers, row, strict=True)) for row in points.rows if row[0] != DENSE]
    ranks = sorted({row.get(VO_RANK, "") for row in cells}, key=lambda rank: int(rank or 0))
    methods = sorted({row["method"] for row in cells})
    page = Figure(figsize=(11, 4.2 * len(ranks)), layout="constrained")
    panels = page.subplots(len(ranks), 2, sharey="row", squeeze=False)
    for pair, rank in zip(panels, ranks, strict=True):
        for axes, (point, title) in zip(pair, POINTS.items(), strict=True):
            for i, method in enumerate(methods):
                mine = [
                    row for row in cells if (row["point"], row["method"], row.get(VO_RANK, "")) == (point, method, rank)
                ]
                if not mine:
                    continue
                x, y = ([float(row[name]) for row in mine] for name in ("multiply-adds, %", "top-1, %"))
                if "least" in points.headers:
                    ends = [[float(row[name]) for row in mine] for name in ("least", "most")]
                    reach = [[b - a for a, b in zip(ends[0], y, strict=True)]]
                    reach += [[a - b for a, b in zip(ends[1], y, strict=True)]]
                    axes.errorbar(x, y, reach, marker="o", capsize=3, color=f"C{i}", label=method)
                else:
                    axes.plot(x, y, marker="o", color=f"C{i}", label=method)
            axes.axhline(dense, color="grey", linewidth=0.8, linestyle="--", label="dense, not fine-tuned")
            axes.set(title=title + (f", VO rank {rank}" if rank else ""))
            axes.set(xlabel="multiply-adds of the model, % of the dense one's")
            axes.grid(alpha=0.3)
        pair[0].set(ylabel="top-1, %")
        pair[1].legend(fontsize=8)
    return page


def head_ranks(one: SavedRecord) -> Grid:
    """The data of :func:`ranks_plot`; no rows where the heads of a layer share their columns.

    Args:
        one: the record of a compressed model.
    """
    grid = Grid(_title(one), ["layer", "head by rank", "rank"])
    for layer, about in enumerate(layers_of(one)):
        if isinstance(about["ranks"], list):
            ranks = sorted(about["ranks"], reverse=True)
            grid.rows += [[str(layer), str(head), str(rank)] for head, rank in enumerate(ranks)]
    return grid


def ranks_plot(ranks: Grid) -> "Figure":
    """IrrAtt, figure 2: the ranks of each layer's heads, and over the layers the density of each head's rank.

    As in the paper the heads of a layer are sorted by rank; the density is that of the smallest rank of each layer, of
    the second smallest, and so on.

    Args:
        ranks: as :func:`head_ranks` gives them.
    """
    import numpy as np
    from matplotlib.figure import Figure

    numbers = [[int(cell) for cell in row] for row in ranks.rows]
    layers, heads = 1 + max(row[0] for row in numbers), 1 + max(row[1] for row in numbers)
    left = 1.2 + 0.9 * layers
    page = Figure(figsize=(left + 4.6, 3.6), layout="constrained")
    axes, densities = page.subplots(1, 2, width_ratios=[left, 4.6])
    for layer, head, rank in numbers:
        axes.bar(layer + (head - (heads - 1) / 2) * 0.8 / heads, rank, 0.7 / heads, color=f"C{head}")
    axes.set_xticks(range(layers), [str(layer) for layer in range(layers)])
    axes.set(xlabel="layer; its heads by rank", ylabel="rank of the head")
    axes.grid(alpha=0.3, axis="y")
    at = np.linspace(0, 1.2 * max(row[2] for row in numbers) + 1, 300)
    for head in reversed(range(heads)):
        mine = [rank for _, other, rank in numbers if other == head]
        densities.plot(at, density(mine, at), color=f"C{head}", label=str(heads - head))
        densities.plot(mine, [0.0] * len(mine), "|", color=f"C{head}", clip_on=False)
    densities.set(xlabel="rank of the head", ylabel="density over the layers", ylim=(0, None))
    densities.legend(title="head, the smallest first", fontsize=8, title_fontsize=8, ncols=2, frameon=False)
    page.suptitle(ranks.title, fontsize=10)
    return page


def density(ranks: Sequence[int], at: "Vector") -> "Vector":
    """A Gaussian kernel density of integers, with Scott's width and at least that of the integers, 0.5.

    Args:
        ranks: one for each layer.
        at: (n,) where.

    Returns:
        (n,) the density.
    """
    import numpy as np

    values = np.asarray(ranks, dtype=float)
    spread = values.std(ddof=1) if len(values) > 1 else 0.0
    width = max(0.5, float(spread) * len(values) ** -0.2)
    kernels = np.exp(-0.5 * ((at[:, None] - values) / width) ** 2) / (width * np.sqrt(2 * np.pi))
    return kernels.mean(-1)


def fusions(one: SavedRecord, folder: Path) -> Grid:
    """The data of :func:`fusion_plot`, after fine-tuning; no rows where the fusion is the identity.

    Args:
        one: the record, for the title.
        folder: its compressed model.
    """
    from attnlab.compression import folder as folders

    grid = Grid(_title(one), ["layer", "head", "term", "weight"])
    layers = [m for _, m in folders.load(folder).named_modules() if getattr(m, "fusion", None) is not None]
    for i, layer in enumerate(layers):
        fusion = layer.weights.detach().float().tolist()
        grid.rows += [
            [str(i), str(head), str(term), f"{weight:.6g}"]
            for head, weights in enumerate(fusion)
            for term, weight in enumerate(weights)
        ]
    return grid


def fusion_plot(fusion: Grid) -> "Figure":
    """IrrAtt, figure 3: the weight of each term (columns) in each head's logits (rows), absolute values.

    Above as fine-tuned (a), below with columns rescaled and both reordered (b).

    Args:
        fusion: as :func:`fusions` gives it.
    """
    import numpy as np
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    layers: dict[str, dict[tuple[int, int], float]] = {}
    for layer, head, term, weight in fusion.rows:
        layers.setdefault(layer, {})[int(head), int(term)] = abs(float(weight))
    page = Figure(figsize=(1.4 + 2.2 * len(layers), 5.2), layout="constrained")
    panels = page.subplots(2, len(layers), squeeze=False)
    norm = LogNorm(1e-4, 1)
    for (above, below), (layer, weights) in zip(panels.T, layers.items(), strict=True):
        shown = np.zeros([1 + max(place[k] for place in weights) for k in (0, 1)])
        for place, value in weights.items():
            shown[place] = value
        order, blocks = reordered(shown)
        largest = shown.max() or 1.0
        above.imshow((shown / largest).clip(1e-4), norm=norm, aspect="auto", interpolation="nearest")
        image = below.imshow(blocks.clip(1e-4), norm=norm, aspect="auto", interpolation="nearest")
        above.set(title=f"layer {layer}", xlabel="term")
        below.set(xlabel="term, by its head")
        below.set_yticks(range(len(order)), [str(head) for head in order], fontsize=7)
    panels[0, 0].set(ylabel="head (a)")
    panels[1, 0].set(ylabel="head (b)")
    page.colorbar(image, ax=panels.ravel().tolist(), label="of the largest; in (b) of its column")
    page.suptitle(fusion.title, fontsize=9)
    return page


def reordered(weights: "Vector") -> "tuple[list[int], Vector]":
    """A fusion matrix with its columns scaled to a largest absolute value of 1, and rows and columns in blocks.

    A column belongs to the head with its largest weight (IrrAtt, section 3.1). Heads with more columns come first.

    Args:
        weights: (heads, terms) absolute values.

    Returns:
        The heads in their new order, and the (heads, terms) matrix in the order of the blocks.
    """
    import numpy as np

    scaled = weights / np.where(weights.max(0) > 0, weights.max(0), 1)
    owner = weights.argmax(0)
    sizes = np.bincount(owner, minlength=len(weights))
    order = np.argsort(-sizes, kind="stable")
    place = np.argsort(order)
    return order.tolist(), scaled[order][:, np.argsort(place[owner], kind="stable")]


def _title(one: SavedRecord) -> str:
    return f"{one.record['compress']}, {columns_of(one):g} columns a layer"


def _top1(quality: Any) -> str:
    return f"{quality['top1']:.1f}" if isinstance(quality, dict) else NOT_RUN

"""Records of compressed models: a table and a plot of top-1 over multiply-adds, ranks of heads, fusion matrices."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from attnlab.errors import DataError
from attnlab.report import figure
from attnlab.report.grid import Grid
from attnlab.report.significance import standard_error
from attnlab.runs.record import NOT_RUN
from attnlab.runs.store import Found

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

    Vector = np.ndarray[Any, np.dtype[np.float64]]

HEADERS = ["Record", "Method", "Rank", "Seed", "Columns of a layer", "Relative error", "Attention multiply-adds, %"]
HEADERS += ["Multiply-adds, %", "Parameters, %", "Top-1 dense", "compressed", "fine-tuned"]
POINTS = {"compressed": "before fine-tuning", "finetuned": "after fine-tuning"}
DENSE = "dense"
COMPRESSED = "compressed"  # the folder of a run directory that holds the model


def render(records: Sequence[Found], directory: Path) -> list[Path]:
    """Write the table sweep.{md,csv,tex}, and figures with their data as CSV beside them.

    top1: top-1 over multiply-adds. For each method whose heads' ranks differ, ranks_<method>: those of the record in
    the middle of its ranks. fusion_<method>: the fusion matrices of the same record, where its run directory still
    has the compressed model.

    Args:
        records: records of mode=train with compress=.
        directory: where to write.

    Returns:
        The paths written.

    Raises:
        DataError: no record has a compressed model.
    """
    found = [f for f in records if f.record["status"] == "finished" and _layers(f)]
    if not found:
        raise DataError("no finished record of a compressed model among those given")
    paths = sweep_table(found).write(directory / "sweep", "md", "csv", "tex")
    paths += figure.write(directory / "top1", sweep_points(found), sweep_plot)
    for method in sorted({f.record["compress"] for f in found}):
        mine = sorted((f for f in found if f.record["compress"] == method), key=_total)
        middle = mine[(len(mine) - 1) // 2]
        ranks = [layer["ranks"] for layer in _layers(middle)]
        if any(isinstance(each, list) and len(set(each)) > 1 for each in ranks):
            paths += figure.write(directory / f"ranks_{method}", head_ranks(middle), ranks_plot)
        folder = middle.path.parent / COMPRESSED
        if folder.is_dir() and (fusion := fusions(middle, folder)).rows:
            paths += figure.write(directory / f"fusion_{method}", fusion, fusion_plot)
    return paths


def sweep_table(found: Sequence[Found]) -> Grid:
    """A row for each record: sizes in percent of the dense model, top-1 before and after fine-tuning, in percent.

    Args:
        found: finished records of compressed models.
    """
    grid = Grid("Compressed attention: top-1 before and after fine-tuning", HEADERS)
    for i, one in enumerate(sorted(found, key=lambda f: (f.record["compress"], _total(f), f.record["seed"])), 1):
        record, about = one.record, one.record["compression"]
        left, quality = about["remaining"], about["quality"]
        cells = [f"R{i}", record["compress"], str(record["rank"]), str(record["seed"]), f"{_total(one):g}"]
        cells += [f"{_error(one):.3f}"]
        cells += [f"{left[f'{key}_percent']:.1f}" for key in ("attention", "multiply_adds", "parameters")]
        cells += [_top1(quality[point]) for point in ("dense", *POINTS)]
        grid.rows.append(cells)
        grid.notes.append(
            f"R{i}: `{record['command']}`; {record['corpus']}; {record['environment']['device']}, "
            f"git {record['environment']['git']}"
        )
    grid.notes.insert(0, "Columns of a layer: query-key columns of all heads together, mean over the layers.")
    errors = [error for one in found if (error := standard_error(one, "quality.top1")) is not None]
    if errors:
        span = " to ".join(dict.fromkeys(f"{error:.1f}" for error in (min(errors), max(errors))))
        grid.notes.insert(1, f"Standard error of a top-1 after fine-tuning, over the images: {span} points.")
    grid.notes.insert(1, "Relative error: of the query-key weights, Frobenius norm, mean over the layers.")
    return grid


def sweep_points(found: Sequence[Found]) -> Grid:
    """The data of :func:`sweep_plot`: the mean over the seeds of each method and each share of multiply-adds.

    Args:
        found: finished records of compressed models.
    """
    grid = Grid("Top-1 over multiply-adds", ["point", "method", "multiply-adds, %", "top-1, %"])
    for point in POINTS:
        values: dict[tuple[str, float], list[float]] = {}
        for one in found:
            about = one.record["compression"]
            if isinstance(about["quality"][point], dict):
                place = one.record["compress"], about["remaining"]["multiply_adds_percent"]
                values.setdefault(place, []).append(about["quality"][point]["top1"])
        grid.rows += [[point, method, repr(x), repr(mean(values[method, x]))] for method, x in sorted(values)]
    dense = mean(f.record["compression"]["quality"]["dense"]["top1"] for f in found)
    grid.rows.append([DENSE, "", "", repr(dense)])
    return grid


def sweep_plot(points: Grid) -> "Figure":
    """Top-1 before and after fine-tuning over the share of multiply-adds, a line for each method.

    Args:
        points: as :func:`sweep_points` gives them.
    """
    from matplotlib.figure import Figure

    page = Figure(figsize=(11, 4.2), layout="constrained")
    panels = page.subplots(1, 2, sharey=True)
    dense = next(float(row[3]) for row in points.rows if row[0] == DENSE)
    for axes, (point, title) in zip(panels, POINTS.items(), strict=True):
        rows = [row for row in points.rows if row[0] == point]
        for method in sorted({row[1] for row in rows}):
            line = [(float(row[2]), float(row[3])) for row in rows if row[1] == method]
            axes.plot(*zip(*line, strict=True), marker="o", label=method)
        axes.axhline(dense, color="grey", linewidth=0.8, linestyle="--", label="dense, not fine-tuned")
        axes.set(title=title, xlabel="multiply-adds of the model, % of the dense one's")
        axes.grid(alpha=0.3)
    panels[0].set(ylabel="top-1, %")
    panels[1].legend(fontsize=8)
    return page


def head_ranks(one: Found) -> Grid:
    """The data of :func:`ranks_plot`; no rows where the heads of a layer share their columns.

    Args:
        one: the record of a compressed model.
    """
    grid = Grid(_title(one), ["layer", "head by rank", "rank"])
    for layer, about in enumerate(_layers(one)):
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


def fusions(one: Found, folder: Path) -> Grid:
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


def _layers(one: Found) -> list[dict[str, Any]]:
    """The entries of the record for each compressed attention layer."""
    return [layer for layer in one.record.get("compression", {}).get("layers", []) if "qk_error" in layer]


def _total(one: Found) -> float:
    """Query-key columns of a layer."""
    ranks = [layer["ranks"] for layer in _layers(one)]
    return mean(sum(each) if isinstance(each, list) else each for each in ranks)


def _error(one: Found) -> float:
    return mean(layer["qk_error"] for layer in _layers(one))


def _title(one: Found) -> str:
    return f"{one.record['compress']}, {_total(one):g} columns a layer"


def _top1(quality: Any) -> str:
    return f"{quality['top1']:.1f}" if isinstance(quality, dict) else NOT_RUN

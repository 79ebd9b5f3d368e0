"""Records of compressed vision models: a table, means over seeds, and plots of top-1, ranks and fusion matrices."""

import re
from collections.abc import Sequence
from functools import partial
from math import isnan, nan
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import pandas as pd

from attnlab.report import figure
from attnlab.report.significance import holm, over_seeds, standard_error
from attnlab.report.table import Grid, differing, facts, finished, frame, spread
from attnlab.run.store import SavedRecord

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

    Vector = np.ndarray[Any, np.dtype[np.float64]]

SHARES = {"attention": "Attention multiply-adds, %", "multiply_adds": "Multiply-adds, %", "parameters": "Parameters, %"}
POINTS = {"compressed": "before fine-tuning", "finetuned": "after fine-tuning"}
DENSE = "dense"
VO_RANK = "VO rank"
BASELINE = "truncatt"
OF_ONE_LINE = ("rank", "vo_rank", "start_seed")  # settings that differ between the points of a line
COMPRESSED = "compressed"  # the folder of a run directory that holds the model
X, Y = "multiply-adds, %", "top-1, %"  # of the plot


def render(records: Sequence[SavedRecord], directory: Path) -> list[Path]:
    """Write sweep.{md,csv,tex}, with several seeds means.{md,csv,tex}, and figures with their data as CSV.

    top1 shows top-1 over multiply-adds. For the record in the middle of a method's ranks, ranks_<method> shows the
    ranks of its heads if they differ. fusion_<method> shows its fusion matrices if its run directory has the model.
    DataError if no record has a compressed model.
    """
    models = models_of(finished(records, layers_of, "of a compressed model"))
    paths = sweep_table(models).write(directory / "sweep", "md", "csv", "tex")
    if models["seed"].nunique() > 1:
        paths += means_table(models).write(directory / "means", "md", "csv", "tex")
    paths += figure.write(directory / "top1", sweep_points(models), sweep_plot)
    drawn = set()  # pictures that would be the same are drawn once
    for name, same in models.groupby("method"):
        method = re.sub(r"[ =/\0]", "_", str(name))
        ordered = same.sort_values("columns", kind="stable")["saved"].tolist()
        middle = ordered[(len(ordered) - 1) // 2]
        ranks = middle.record["compress"], head_ranks(middle).to_csv()
        if ranks not in drawn:
            paths += picture(middle, "ranks", directory / f"ranks_{method}")
        drawn.add(ranks)
        paths += picture(middle, "fusion", directory / f"fusion_{method}")
    return paths


def picture(saved: SavedRecord, kind: str, stem: Path) -> list[Path]:
    """Write a figure of one record, "ranks" or "fusion", if it has data."""
    title, folder = f"{saved.record['compress']}, {_columns(saved):g} columns a layer", saved.path.parent / COMPRESSED
    if kind == "ranks":
        return figure.write(stem, head_ranks(saved), partial(ranks_plot, title=title))
    return figure.write(stem, fusions(folder), partial(fusion_plot, title=title)) if folder.is_dir() else []


def models_of(records: Sequence[SavedRecord]) -> pd.DataFrame:
    """The compressed models of finished records with their sizes and top-1 in percent (NaN: not measured)."""
    settings = [saved.record["config"]["compress"] for saved in records]
    variants = [{k: v for k, v in these.items() if k[0] != "_" and k not in OF_ONE_LINE} for these in settings]
    names = [saved.record["compress"] for saved in records]
    models = frame(
        records,
        rank="rank",
        seed="seed",
        vo_rank=lambda saved: int(saved.record["config"]["compress"].get("vo_rank") or 0),  # 0: the default
        columns=_columns,
        error=lambda saved: mean(layer["qk_error"] for layer in layers_of(saved)),
        **{key: f"compression.remaining.{key}_percent" for key in SHARES},
        **{point: f"compression.quality.{point}.top1" for point in (DENSE, *POINTS)},
    ).astype(dict.fromkeys((DENSE, *POINTS), float))
    words = zip(names, differing(names, variants), strict=True)
    return models.assign(method=[f"{name} {shown}".rstrip() for name, shown in words])


def sweep_table(models: pd.DataFrame) -> Grid:
    """A row for each record: sizes in percent of the dense model's, top-1 in percent before and after fine-tuning."""
    several = models["vo_rank"].nunique() > 1
    headers = ["Record", "Method", "Rank", *[VO_RANK] * several, "Seed", "Columns of a layer", "Relative error"]
    headers += [*SHARES.values(), "Top-1 dense", "compressed", "fine-tuned"]
    grid = Grid("Compressed attention: top-1 before and after fine-tuning", headers)
    models = models.sort_values(["method", "vo_rank", "columns", "seed"], kind="stable")
    for i, model in enumerate(models.itertuples(index=False), 1):
        cells = [f"R{i}", model.method, str(model.rank), *[str(model.vo_rank)] * several, str(model.seed)]
        cells += [f"{model.columns:g}", f"{model.error:.3f}", *(f"{getattr(model, key):.1f}" for key in SHARES)]
        grid.rows.append(cells + [spread([getattr(model, point)], ".1f") for point in (DENSE, *POINTS)])
    grid.notes = ["Columns of a layer: query-key columns of all heads together, mean over the layers."]
    grid.notes += ["Relative error: of the query-key weights, Frobenius norm, mean over the layers."]
    errors = [error for saved in models["saved"] if (error := standard_error(saved, "quality.top1")) is not None]
    if errors:
        span = " to ".join(dict.fromkeys(f"{error:.1f}" for error in (min(errors), max(errors))))
        grid.notes.append(f"Standard error of a top-1 after fine-tuning, over the images: {span} points.")
    grid.list_records([facts(f"R{i}", saved) for i, saved in enumerate(models["saved"], 1)])
    return grid


def means_table(models: pd.DataFrame) -> Grid:
    """A row for each setting: means over the seeds, and their standard deviations."""
    several = models["vo_rank"].nunique() > 1
    headers = [*[VO_RANK] * several, "Columns of a layer", "Method", "Seeds", "Relative error"]
    headers += ["Ranks unlike global_svd's", "Fusion in own heads", "Multiply-adds, %"]
    headers += ["Top-1 dense", "compressed", "drop", "fine-tuned"]
    headers += [f"{what} {when}" for what in (f"less {BASELINE}'s,", "p,") for when in POINTS.values()]
    grid = Grid("Compressed attention: means over seeds", headers)
    groups = dict(list(models.groupby(["vo_rank", "columns", "method"])))
    tests: list[dict[int, float]] = [{} for _ in POINTS]  # p by row
    for (vo_rank, columns, name), same in groups.items():
        layers = [layer for saved in same["saved"] for layer in layers_of(saved)]
        cells = [f"{vo_rank:g}"] * several + [f"{columns:g}", name, ", ".join(map(str, sorted(same["seed"])))]
        cells += [spread(same["error"], ".3f"), _discovered(layers), _in_own_heads(layers)]
        cells.append(f"{mean(same['multiply_adds']):.1f}")
        drop = same[DENSE] - same["compressed"]
        cells += [spread(values, ".1f") for values in (same[DENSE], same["compressed"], drop, same["finetuned"])]
        baseline = groups.get((vo_rank, columns, BASELINE), same.iloc[:0])
        latest = baseline.drop_duplicates("seed", keep="last").set_index("seed")
        paired = name != BASELINE and set(same["seed"]) <= set(latest.index)
        changes = [(same.set_index("seed")[point] - latest[point]).reindex(same["seed"]) for point in POINTS]
        cells += [spread(less, ".1f") if paired else "–" for less in changes]
        for less, by_row in zip(changes, tests, strict=True):
            p = over_seeds([(0.0, change) for change in less]).p if paired and len(same) > 1 else nan
            by_row |= {} if isnan(p) else {len(grid.rows): p}
        grid.rows.append([*cells, *["–"] * len(tests)])
    for column, by_row in zip(headers[-len(tests) :], tests, strict=True):
        for (i, p), adjusted in zip(by_row.items(), holm(list(by_row.values())), strict=True):
            grid.rows[i][headers.index(column)] = f"{p:.2g} ({adjusted:.2g})"
    grid.notes = [
        "Mean ± standard deviation over the seeds, each of which has a dense model of its own; drop: dense less "
        "compressed, in points.",
        f"Less {BASELINE}'s: points of top-1 more than {BASELINE} at the same ranks from the same dense model, seed by "
        "seed; p: of Student's paired t-test, and in brackets by Holm's correction for all rows of the column.",
        "Relative error: of the query-key weights, Frobenius norm, mean over the layers.",
        "Ranks unlike global_svd's: heads whose query-key rank is not that of the largest singular values, of all "
        "heads of all layers and seeds.",
        "Fusion in own heads: of CP SlimAtt before fine-tuning, the share of the squared weights of a column that lies "
        "in its own head; 1 is block-diagonal.",
    ]
    return grid


def sweep_points(models: pd.DataFrame) -> pd.DataFrame:
    """The data of :func:`sweep_plot`: means over the seeds of each method and share of multiply-adds."""
    columns = ["point", "method", X, Y, *["least", "most"] * (models["seed"].nunique() > 1)]
    keys = ["vo_rank", "method", "multiply_adds"]
    rows = []
    for point in POINTS:
        groups = models.dropna(subset=point).groupby(keys)[point].agg([mean, min, max])
        rows += [[point, method, x, *ends, rank] for (rank, method, x), *ends in groups.itertuples()]
    rows.append([DENSE, "", "", mean(models[DENSE]), "", "", ""])
    points = pd.DataFrame(rows, columns=["point", "method", X, Y, "least", "most", VO_RANK], dtype=object)
    return points[[*columns, *[VO_RANK] * (models["vo_rank"].nunique() > 1)]]


def sweep_plot(points: pd.DataFrame) -> "Figure":
    """Draw top-1 before and after fine-tuning, a line for each method and size, a panel for each VO rank."""
    (dense,) = points.loc[points["point"] == DENSE, Y].astype(float)
    points = points[points["point"] != DENSE].astype(
        {X: float} | dict.fromkeys({Y, "least", "most"} & {*points}, float)
    )
    panels = list(points.groupby(points[VO_RANK].astype(int) if VO_RANK in points else lambda _: 0))
    sizes = [sorted(set(zip(panel[X], panel["method"], strict=True))) for _, panel in panels]
    heights = [0.3 + 0.2 * len(size) for size in sizes]
    page, every = figure.panels(len(panels), 9, 1 + mean(heights), most=1, height_ratios=heights)
    for axes, (rank, panel), size in zip(every, panels, sizes, strict=True):
        for number, (point, title) in enumerate(POINTS.items()):
            rows = panel[panel["point"] == point]
            lines = [size.index(pair) + 0.3 * number - 0.15 for pair in zip(rows[X], rows["method"], strict=True)]
            bars = [rows[Y] - rows["least"], rows["most"] - rows[Y]] if "least" in rows else None
            axes.errorbar(rows[Y], lines, xerr=bars, linestyle="", capsize=2, label=title, **figure.look(number))
        axes.axvline(dense, color="grey", linewidth=0.8, linestyle="--", label="dense, not fine-tuned")
        axes.set_yticks(range(len(size)), [f"{method}, {share:.1f} %" for share, method in size], fontsize=8)
        of = f", VO rank {rank}" if len(panels) > 1 else ""
        seeds = " (mean, least and most of the seeds)" if "least" in panel else ""
        figure.plain(axes, xlabel=f"{Y}{of}{seeds}", ylabel="multiply-adds, % of the dense model's")
    page.legend(*axes.get_legend_handles_labels(), loc="outside upper right", ncols=3, frameon=False, fontsize=8)
    return page


def head_ranks(saved: SavedRecord) -> pd.DataFrame:
    """The data of :func:`ranks_plot`; no rows if the heads share their columns or all have one rank."""
    layers = [ranks if isinstance(ranks := layer["ranks"], list) else [] for layer in layers_of(saved)]
    if all(len(set(ranks)) < 2 for ranks in layers):
        layers = []
    rows = [(i, head, rank) for i, ranks in enumerate(layers) for head, rank in enumerate(sorted(ranks, reverse=True))]
    return pd.DataFrame(rows, columns=["layer", "head by rank", "rank"])


def ranks_plot(data: pd.DataFrame, title: str = "") -> "Figure":
    """Draw bars for each layer: the ranks of its heads, the largest first. IrrAtt's figure 2 has their densities."""
    layers, heads = (1 + int(data[column].max()) for column in ("layer", "head by rank"))
    page, [axes] = figure.panels(1, 1.2 + 1.2 * layers, 3)
    at = data["layer"] + (data["head by rank"] - (heads - 1) / 2) * 0.8 / heads
    axes.bar_label(axes.bar(at, data["rank"], 0.7 / heads, color=figure.COLOURS[0]), fontsize=7)
    axes.set_xticks(range(layers))
    figure.plain(axes, title=title, xlabel="layer", ylabel="rank of the head")
    axes.locator_params(axis="y", integer=True)
    return page


def fusions(folder: Path) -> pd.DataFrame:
    """The data of :func:`fusion_plot` for the compressed model in a folder; no rows if the fusion is the identity."""
    from attnlab.compression import folder as folders

    layers = [m for _, m in folders.load(folder).named_modules() if getattr(m, "fusion", None) is not None]
    rows = [
        (layer, head, term, f"{weight:.6g}")
        for layer, module in enumerate(layers)
        for head, weights in enumerate(module.weights.detach().float().tolist())
        for term, weight in enumerate(weights)
    ]
    return pd.DataFrame(rows, columns=["layer", "head", "term", "weight"])


def fusion_plot(fusion: pd.DataFrame, title: str = "") -> "Figure":
    """Draw IrrAtt's figure 3: the absolute weight of each term (columns) in each head's logits (rows).

    The upper panels (a) show the fine-tuned weights, the lower (b) the same with reordered heads and scaled columns.
    """
    from matplotlib.colors import LogNorm

    layers = list(fusion.assign(weight=fusion["weight"].astype(float).abs()).groupby("layer", sort=False))
    page, panels = figure.panels(2 * len(layers), 2.2 + 1.4 / len(layers), 2.6, most=len(layers))
    norm = LogNorm(1e-4, 1)
    for above, below, (layer, weights) in zip(panels, panels[len(layers) :], layers, strict=False):
        shown = weights.pivot(index="head", columns="term", values="weight").to_numpy()
        order, blocks = reordered(shown)
        largest = shown.max() or 1.0
        above.imshow((shown / largest).clip(1e-4), norm=norm, aspect="auto", interpolation="nearest")
        image = below.imshow(blocks.clip(1e-4), norm=norm, aspect="auto", interpolation="nearest")
        above.set(title=f"layer {layer}", xlabel="term")
        below.set(xlabel="term, by its head")
        below.set_yticks(range(len(order)), [str(head) for head in order], fontsize=7)
    panels[0].set(ylabel="head (a)")
    panels[len(layers)].set(ylabel="head (b)")
    page.colorbar(image, ax=page.axes, label="of the largest; in (b) of its column")
    page.suptitle(title, fontsize=9)
    return page


def reordered(weights: "Vector") -> "tuple[list[int], Vector]":
    """The heads in their new order and a fusion matrix in blocks, each column scaled to a largest weight of 1.

    `weights` (heads, terms) has absolute values. A column belongs to the head with its largest weight (IrrAtt, section
    3.1). Heads with more columns come first.
    """
    import numpy as np

    scaled = weights / np.where(weights.max(0) > 0, weights.max(0), 1)
    owner = weights.argmax(0)
    sizes = np.bincount(owner, minlength=len(weights))
    order = np.argsort(-sizes, kind="stable")
    place = np.argsort(order)
    return order.tolist(), scaled[order][:, np.argsort(place[owner], kind="stable")]


def layers_of(saved: SavedRecord) -> list[dict[str, Any]]:
    """The entries of a record for each compressed attention layer."""
    return [layer for layer in saved.record.get("compression", {}).get("layers", []) if "qk_error" in layer]


def _columns(saved: SavedRecord) -> float:
    """The mean over the layers of their query-key columns."""
    ranks = [layer["ranks"] for layer in layers_of(saved)]
    return mean(sum(heads) if isinstance(heads, list) else heads for heads in ranks)


def _discovered(layers: Sequence[dict[str, Any]]) -> str:
    """The number of heads whose rank differs from that of the singular values; "–" if unknown."""
    known = [layer for layer in layers if "global_ranks" in layer]
    pairs = [pair for layer in known for pair in zip(layer["ranks"], layer["global_ranks"], strict=True)]
    return f"{sum(a != b for a, b in pairs)} of {len(pairs)}" if pairs else "–"


def _in_own_heads(layers: Sequence[dict[str, Any]]) -> str:
    """The share of CP SlimAtt's fusion that lies in the heads to which its columns belong."""
    shares = [layer["fusion_own"] for layer in layers if "fusion_own" in layer]
    return f"{mean(shares):.3f}" if shares else "–"

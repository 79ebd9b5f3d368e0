"""Records of compressed models: a table and a plot of top-1 over multiply-adds, ranks of heads, fusion matrices."""

import io
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from attnlab.errors import DataError
from attnlab.report.grid import Grid, write
from attnlab.runs.record import NOT_RUN
from attnlab.runs.store import Found

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADERS = ["Record", "Method", "Rank", "Seed", "Columns of a layer", "Relative error", "Attention multiply-adds, %"]
HEADERS += ["Multiply-adds, %", "Parameters, %", "Top-1 dense", "compressed", "fine-tuned"]
POINTS = {"compressed": "before fine-tuning", "finetuned": "after fine-tuning"}
COMPRESSED = "compressed"  # in a run's directory: the model as folder


def render(records: Sequence[Found], directory: Path) -> list[Path]:
    """Writes sweep.{md,csv,tex,png}, and of every method with ranks that differ the ranks and the fusion matrices.

    The pictures of one model show the middle one of a method's ranks. DataError: no record has a compressed model.
    """
    found = [f for f in records if f.record["status"] == "finished" and _layers(f)]
    if not found:
        raise DataError("no finished record of a compressed model among those given")
    paths = sweep_table(found).write(directory / "sweep", "md", "csv", "tex")
    paths.append(write(directory / "sweep.png", _png(sweep_plot(found))))
    for method in sorted({f.record["compress"] for f in found}):
        mine = sorted((f for f in found if f.record["compress"] == method), key=_total)
        middle = mine[(len(mine) - 1) // 2]
        ranks = [layer["ranks"] for layer in _layers(middle)]
        if any(isinstance(each, list) and len(set(each)) > 1 for each in ranks):
            paths.append(write(directory / f"ranks_{method}.png", _png(ranks_plot(middle, ranks))))
        folder = middle.path.parent / COMPRESSED
        if folder.is_dir() and (fusions := _fusions(folder)):
            paths.append(write(directory / f"fusion_{method}.png", _png(fusion_plot(middle, fusions))))
    return paths


def sweep_table(found: Sequence[Found]) -> Grid:
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
    grid.notes.insert(1, "Relative error: of the query-key weights, Frobenius norm, mean over the layers.")
    return grid


def sweep_plot(found: Sequence[Found]) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (point, title) in zip(panels, POINTS.items(), strict=True):
        for method in sorted({f.record["compress"] for f in found}):
            pairs: dict[float, list[float]] = {}
            for one in found:
                about = one.record["compression"]
                if one.record["compress"] == method and isinstance(about["quality"][point], dict):
                    x = about["remaining"]["multiply_adds_percent"]
                    pairs.setdefault(x, []).append(about["quality"][point]["top1"])
            lines = sorted((x, mean(values)) for x, values in pairs.items())
            axes.plot(*zip(*lines, strict=True) if lines else ([], []), marker="o", label=method)
        dense = mean(f.record["compression"]["quality"]["dense"]["top1"] for f in found)
        axes.axhline(dense, color="grey", linewidth=0.8, linestyle="--", label="dense, not fine-tuned")
        axes.set(title=title, xlabel="multiply-adds of the model, % of the dense one's")
        axes.grid(alpha=0.3)
    panels[0].set(ylabel="top-1, %")
    panels[1].legend(fontsize=8)
    return figure


def ranks_plot(one: Found, ranks: Sequence[Sequence[int]]) -> "Figure":
    """IrrAtt, figure 2: the ranks of each layer's heads."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.2 + 0.9 * len(ranks), 3.4), layout="constrained")
    axes = figure.subplots()
    for layer, each in enumerate(ranks):
        for head, rank in enumerate(sorted(each, reverse=True)):
            axes.bar(layer + (head - (len(each) - 1) / 2) * 0.8 / len(each), rank, 0.7 / len(each), color=f"C{head}")
    axes.set_xticks(range(len(ranks)), [str(layer) for layer in range(len(ranks))])
    axes.set(title=_title(one), xlabel="layer; its heads by rank", ylabel="rank of the head")
    axes.grid(alpha=0.3, axis="y")
    return figure


def fusion_plot(one: Found, fusions: Sequence[Any]) -> "Figure":
    """IrrAtt, figure 3: what each head's logits (rows) take of the terms (columns), absolute values."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(0.8 + 2.2 * len(fusions), 2.9), layout="constrained")
    panels = figure.subplots(1, len(fusions), squeeze=False)[0]
    for layer, (axes, fusion) in enumerate(zip(panels, fusions, strict=True)):
        shown = abs(fusion) / abs(fusion).max()
        image = axes.imshow(shown.clip(1e-4), norm=LogNorm(1e-4, 1), aspect="auto", interpolation="nearest")
        axes.set(title=f"layer {layer}", xlabel="term")
    panels[0].set(ylabel="head")
    figure.colorbar(image, ax=list(panels), label="of the largest")
    figure.suptitle(_title(one), fontsize=9)
    return figure


def _fusions(folder: Path) -> list[Any]:
    """Each compressed layer's fusion as an array, after fine-tuning; none where the fusion is the identity."""
    from attnlab.compression import folder as folders

    layers = [m for _, m in folders.load(folder).named_modules() if getattr(m, "fusion", None) is not None]
    return [layer.get_parameter("fusion").detach().float().numpy() for layer in layers]


def _layers(one: Found) -> list[dict[str, Any]]:
    """What the record says of each compressed attention layer."""
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


def _png(figure: "Figure") -> bytes:
    file = io.BytesIO()
    figure.savefig(file, dpi=150, format="png")
    return file.getvalue()

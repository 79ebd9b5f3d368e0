"""Records of compressed models by setting: what tells their methods apart, and the means over their seeds."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from attnlab.report.grid import Grid
from attnlab.run.record import NOT_RUN
from attnlab.run.store import SavedRecord

POINTS = {"compressed": "before fine-tuning", "finetuned": "after fine-tuning"}
DENSE = "dense"
VO_RANK = "VO rank"
BASELINE = "truncatt"
OF_ONE_LINE = ("rank", "vo_rank", "start_seed")  # settings in which the points of a line may differ


def means_table(found: Sequence[SavedRecord]) -> Grid:
    """A row for each setting: means over the seeds, and their standard deviations.

    Args:
        found: finished records of compressed models, of several seeds.
    """
    names, own_ranks = variants(found), value_ranks(found)
    groups: dict[tuple[Any, ...], list[SavedRecord]] = {}
    for one in found:
        groups.setdefault((own_ranks.get(one.path, 0), columns_of(one), names[one.path]), []).append(one)
    headers = ["Method", "Seeds", "Relative error", "Ranks unlike global_svd's", "Fusion in own heads"]
    headers += ["Multiply-adds, %", "Top-1 dense", "compressed", "drop", "fine-tuned"]
    headers += [f"less {BASELINE}'s, {when}" for when in POINTS.values()]
    first = [VO_RANK] * bool(own_ranks) + ["Columns of a layer"]
    grid = Grid("Compressed attention: means over seeds", [*first, *headers])
    for (value_rank, total, name), same in sorted(groups.items()):
        top1 = {point: [_number(one, point) for one in same] for point in (DENSE, *POINTS)}
        drops = [b - a for a, b in zip(top1["compressed"], top1[DENSE], strict=True)]
        cells = [str(value_rank)] * bool(own_ranks)
        cells += [f"{total:g}", name, ", ".join(str(seed) for seed in sorted(one.record["seed"] for one in same))]
        cells += [_spread([error_of(one) for one in same], 3), _discovered(same), _own(same)]
        cells += [f"{mean(one.record['compression']['remaining']['multiply_adds_percent'] for one in same):.1f}"]
        cells += [_spread(values, 1) for values in (top1[DENSE], top1["compressed"], drops, top1["finetuned"])]
        baseline = groups.get((value_rank, total, BASELINE), [])
        cells += [_paired(same, baseline, point) if baseline is not same else "–" for point in POINTS]
        grid.rows.append(cells)
    grid.notes = [
        "Mean ± standard deviation over the seeds, each of which has a dense model of its own; drop: dense less "
        "compressed, in points.",
        f"Less {BASELINE}'s: points of top-1 more than {BASELINE} at the same ranks from the same dense model, seed by "
        "seed.",
        "Relative error: of the query-key weights, Frobenius norm, mean over the layers.",
        "Ranks unlike global_svd's: heads whose query-key rank is not that of the largest singular values, of all "
        "heads of all layers and seeds.",
        "Fusion in own heads: of CP SlimAtt before fine-tuning, the share of the squared weights of a column that lies "
        "in its own head; 1 is block-diagonal.",
    ]
    return grid


def variants(found: Sequence[SavedRecord]) -> dict[Path, str]:
    """The name of each record's method, with the settings in which the records of this method differ.

    Ranks and seeds are left out: a line of the picture goes over the ranks.

    Args:
        found: records of compressed models.
    """
    named: dict[Path, str] = {}
    for one in found:
        mine, own = one.record["compress"], _settings(one)
        others = [_settings(other) for other in found if other.record["compress"] == mine]
        keys = [k for k in own if k not in OF_ONE_LINE and any(other.get(k) != own[k] for other in others)]
        named[one.path] = " ".join([mine, *(f"{key}={own[key]}" for key in keys)])
    return named


def _settings(one: SavedRecord) -> dict[str, Any]:
    """Those of the method, without its class; empty where a record has no configuration."""
    return {key: value for key, value in one.record.get("config", {}).get("compress", {}).items() if key[0] != "_"}


def value_ranks(found: Sequence[SavedRecord]) -> dict[Path, int]:
    """The value-output rank of each record by its path, 0 for the default; empty where they do not differ.

    Args:
        found: records of compressed models.
    """
    ranks = {one.path: _settings(one).get("vo_rank") for one in found}
    return {path: int(rank or 0) for path, rank in ranks.items()} if len(set(ranks.values())) > 1 else {}


def _discovered(same: Sequence[SavedRecord]) -> str:
    """How many heads have another rank than the singular values give them; "–" where that is not known."""
    layers = [layer for one in same for layer in layers_of(one) if "global_ranks" in layer]
    pairs = [pair for layer in layers for pair in zip(layer["ranks"], layer["global_ranks"], strict=True)]
    return f"{sum(a != b for a, b in pairs)} of {len(pairs)}" if pairs else "–"


def _own(same: Sequence[SavedRecord]) -> str:
    """The share of CP SlimAtt's fusion in the own heads of the columns."""
    shares = [layer["fusion_own"] for one in same for layer in layers_of(one) if "fusion_own" in layer]
    return f"{mean(shares):.3f}" if shares else "–"


def _number(one: SavedRecord, point: str) -> float:
    """Top-1 at a point; NaN where it was not measured."""
    quality = one.record["compression"]["quality"][point]
    return float(quality["top1"]) if isinstance(quality, dict) else float("nan")


def _paired(same: Sequence[SavedRecord], baseline: Sequence[SavedRecord], point: str) -> str:
    """The differences of top-1 to the baseline's of the same seed; "–" where a seed has none."""
    others = {one.record["seed"]: _number(one, point) for one in baseline}
    if any(one.record["seed"] not in others for one in same):
        return "–"
    return _spread([_number(one, point) - others[one.record["seed"]] for one in same], 1)


def _spread(values: Sequence[float], digits: int) -> str:
    """Mean and standard deviation; not run where a value is missing."""
    if any(value != value for value in values):
        return NOT_RUN
    return f"{mean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")


def layers_of(one: SavedRecord) -> list[dict[str, Any]]:
    """The entries of the record for each compressed attention layer.

    Args:
        one: a record of a compressed model.
    """
    return [layer for layer in one.record.get("compression", {}).get("layers", []) if "qk_error" in layer]


def columns_of(one: SavedRecord) -> float:
    """Query-key columns of a layer, the mean over the layers.

    Args:
        one: a record of a compressed model.
    """
    ranks = [layer["ranks"] for layer in layers_of(one)]
    return mean(sum(each) if isinstance(each, list) else each for each in ranks)


def error_of(one: SavedRecord) -> float:
    """The relative error of the query-key tensor, the mean over the layers.

    Args:
        one: a record of a compressed model.
    """
    return mean(layer["qk_error"] for layer in layers_of(one))

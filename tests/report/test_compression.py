"""Compressed models as a table and plots."""

from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any

import numpy as np
import pytest
import timm
import torch

from attnlab.compression import folder
from attnlab.compression.methods.irratt import IrrAtt
from attnlab.compression.transform import compress
from attnlab.report import compression
from attnlab.report.table import Grid
from attnlab.run.store import SavedRecord

VIT: dict[str, Any] = {"img_size": 32, "patch_size": 16, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}


def about(ranks: list[int], before: float, after: float | str, left: float) -> dict[str, Any]:
    layers = [{"path": f"blocks.{i}.attn", "ranks": ranks, "qk_error": 0.1 * (i + 1)} for i in range(2)]
    quality = {"dense": {"top1": 80.0}, "compressed": {"top1": before}}
    quality |= {"finetuned": {"top1": after} if isinstance(after, float) else after}  # type: ignore[dict-item]
    remaining = {f"{key}_percent": left for key in ("attention", "multiply_adds", "parameters")}
    return {"layers": layers, "quality": quality, "remaining": remaining}


def test_the_fusion_shown_is_that_of_the_saved_model(tmp_path: Path) -> None:
    model = timm.create_model("deit_small_patch16_224", **VIT)
    compress(model, IrrAtt(rank=8, vo_rank=4), None)
    with torch.no_grad():
        model.get_parameter("blocks.1.attn.fusion").copy_(torch.tensor([[1.0, 0.5], [0.25, 2.0]]))
    folder.save(model, tmp_path, "deit_small_patch16_224", VIT)
    fusion = compression.fusions(tmp_path)
    assert fusion.loc[fusion["layer"] == 1, "weight"].tolist() == ["1", "0.5", "0.25", "2"]


def of_a_sweep(method: str, seed: int, before: float, after: float, **settings: Any) -> SavedRecord:
    record = {"compress": method, "seed": seed, "rank": 8, "command": "x", "corpus": "sample"}
    record |= {"environment": {"device": "cpu", "git": "0"}, "compression": about([5, 3], before, after, 50.0)}
    for layer in record["compression"]["layers"]:  # type: ignore[index]
        layer |= {"global_ranks": [4, 4], "fusion_own": 0.75} if method == "irratt" else {}
    record["config"] = {"compress": {"_target_": method, "rank": 8, "vo_rank": 2, "start_seed": seed, **settings}}
    return SavedRecord(Path(f"{method}{settings}{seed}.json"), record)


SWEEP = [
    of_a_sweep("irratt", 1, 60.0, 75.0, start="random"),
    of_a_sweep("irratt", 2, 64.0, 77.0, start="random"),
    of_a_sweep("irratt", 1, 50.0, 70.0, start="cp"),
    of_a_sweep("truncatt", 1, 40.0, 71.0, vo_rank=4),
]


def means_table(records: list[SavedRecord]) -> Grid:
    return compression.means_table(compression.models_of(records))


def test_means_over_seeds_tell_variants_of_a_method_apart() -> None:
    grid = means_table(SWEEP)
    rows = {row[2]: dict(zip(grid.headers, row, strict=True)) for row in grid.rows}
    assert list(rows) == ["irratt start=cp", "irratt start=random", "truncatt"]  # by VO rank, columns and name
    random = rows["irratt start=random"]
    assert (random["Seeds"], random["VO rank"], random["Columns of a layer"]) == ("1, 2", "2", "8")
    assert (random["compressed"], random["drop"], random["fine-tuned"]) == ("62.0 ± 2.8", "18.0 ± 2.8", "76.0 ± 1.4")
    assert random["Ranks unlike global_svd's"] == "8 of 8" and random["Fusion in own heads"] == "0.750"
    assert (rows["truncatt"]["VO rank"], rows["truncatt"]["compressed"]) == ("4", "40.0")
    assert rows["truncatt"]["Ranks unlike global_svd's"] == "–"
    assert random["less truncatt's, before fine-tuning"] == "–"  # of other ranks
    paired = [*SWEEP[:2], of_a_sweep("truncatt", 1, 50.0, 70.0), of_a_sweep("truncatt", 2, 51.0, 76.0)]
    assert means_table(paired).rows[0][-2:] == ["11.5 ± 2.1", "3.0 ± 2.8"]
    last = of_a_sweep("truncatt", 2, 1.0, 2.0, vo_rank=4)
    last.record["compression"]["quality"]["finetuned"] = "not run"
    assert dict(zip(grid.headers, means_table([*SWEEP, last]).rows[-1], strict=True))["fine-tuned"] == "not run"


def test_the_density_of_ranks() -> None:
    """Of [2, 4, 9]: three kernels of Scott's width; of equal ranks the narrowest one."""
    at = np.linspace(-30, 40, 7001)
    values = compression.density([2, 4, 9], at)
    width = float(np.std([2, 4, 9], ddof=1)) * 3**-0.2
    expected = fmean(NormalDist(rank, width).pdf(float(at[3321])) for rank in (2, 4, 9))
    assert values[3321] == pytest.approx(expected) and values.sum() * 0.01 == pytest.approx(1)
    assert compression.density([5, 5, 5], at).max() == pytest.approx(NormalDist(5, 0.5).pdf(5))


def test_a_fusion_matrix_in_blocks() -> None:
    weights = np.array([[0.1, 0.0, 4.0, 0.0], [2.0, 0.5, 1.0, 0.0], [0.2, 0.1, 0.4, 0.0], [0.0, 0.4, 0.4, 0.0]])
    order, blocks = compression.reordered(weights)
    assert order == [0, 1, 2, 3]  # heads 0 and 1 have two columns each: the third one, and the last, of zeros
    assert blocks.tolist() == [[1.0, 0.0, 0.05, 0.0], [0.25, 0.0, 1.0, 1.0], [0.1, 0.0, 0.1, 0.2], [0.1, 0.0, 0.0, 0.8]]
    order, blocks = compression.reordered(weights[[2, 1, 0, 3]][:, :3])
    assert order == [1, 2, 0, 3] and blocks.argmax(0).tolist() == [0, 0, 1]

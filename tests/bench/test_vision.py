"""What mode=bench measures for image classification."""

from pathlib import Path
from typing import Literal

import pytest
import torch

from attnlab.bench.workloads.vision import LayerVariant, PerHead
from attnlab.config.check import compose
from attnlab.errors import ConfigError
from tests.bench.small import CPU, QUICK, measured, rows, spoil

FORMS: tuple[Literal["loop"], Literal["compressed"]] = ("loop", "compressed")
SMALL = ["task=imagenet", *QUICK, "task.model.embed_dim=24", "task.model.num_heads=3", "task.model.depth=1"]
METHODS = {
    "truncatt": ["rank=4", "compress.vo_rank=4"],
    "irratt": ["rank=12", "compress.vo_rank=4"],
    "irratt identity": ["rank=12", "compress.vo_rank=4", "compress.fusion=identity"],
    "cp_slimatt": ["rank=12", "compress.vo_rank=4"],
}


@pytest.mark.parametrize("name", METHODS)
def test_the_loop_is_the_layer(name: str) -> None:
    cfg = compose(*SMALL, "bench.what=forward", f"compress={name.split()[0]}", *METHODS[name])
    checks, (row,) = rows(cfg)
    variants = ["compressed", "dense"] + ["loop"] * (name != "cp_slimatt")
    assert list(row["variants"]) == variants
    assert [pair["against"] for pair in row["ratios"]] == variants[1:]
    for pair in row["ratios"]:
        assert 0 < pair["seconds"]["min"] <= pair["seconds"]["median"] <= pair["seconds"]["max"]
    assert row["multiply_adds_percent"] < 100
    assert row["loop_difference"] < 1e-12
    assert checks.get("loop", {"output": 0.0})["output"] == row["loop_difference"]
    if "loop" in variants:
        loop, ours = (LayerVariant(form, cfg).module(torch.float64, CPU) for form in FORMS)
        x = torch.randn(2, 7, 24, dtype=torch.float64)
        torch.testing.assert_close(loop(x), ours(x), rtol=1e-12, atol=1e-12)
        assert float(ours(x).detach().std()) > 1e-4


def test_a_loop_that_is_wrong_gives_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, PerHead, "forward")
    _, (row,) = rows(compose(*SMALL, "bench.what=forward", "compress=irratt"))
    dense, loop = row["ratios"]
    assert "seconds" in dense
    assert loop["not run"] == "loop was not found equal to its reference: output off by 0.01"


@pytest.mark.slow
def test_a_record(tmp_path: Path) -> None:
    cfg = compose(*SMALL, "compress=truncatt", "bench.memory=true")
    record = measured(cfg, tmp_path)
    (row,) = record["bench"]["rows"]
    assert row["tokens"] == (32 // cfg.task.model.patch_size) ** 2 + 1 and len(row["ranks"]) == 3
    assert all(variant["peak_memory_mib"] >= 0 for variant in row["variants"].values())
    assert record["compression"]["remaining"]["attention_percent"] > 0
    with pytest.raises(ConfigError, match="give compress="):
        measured(compose(*SMALL), tmp_path)

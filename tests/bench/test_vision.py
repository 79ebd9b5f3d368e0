"""What mode=bench measures for image classification."""

from pathlib import Path
from typing import Any

import pytest
import torch

from attnlab.bench import Settings
from attnlab.bench.vision import PerHead, layers, measure, uneven
from attnlab.compression.methods.cp_slimatt import CPSlimAtt
from attnlab.compression.methods.irratt import IrrAtt
from attnlab.compression.methods.query_key import QueryKeyMethod
from attnlab.compression.methods.truncatt import TruncAtt
from attnlab.config.check import compose
from attnlab.errors import ConfigError
from attnlab.modes import bench
from attnlab.pretrained import family_of
from attnlab.runs.record import new
from tests.compression.models import vit

METHODS = [TruncAtt(4, 4), IrrAtt(12, 4), IrrAtt(12, 4, fusion="identity"), CPSlimAtt(12, 4)]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: f"{type(m).__name__} {getattr(m, 'fusion', '')}")
def test_the_loop_is_the_layer(method: QueryKeyMethod) -> None:
    model = vit()
    layer = family_of(model).layers(model)[0]
    found = layers(model, layer, method)
    ours = found["compressed"].double()
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    if "loop" in found:
        torch.testing.assert_close(PerHead(ours)(x), ours(x), rtol=1e-12, atol=1e-12)  # type: ignore[arg-type]
    settings = Settings("training", batch=2, rounds=2, warmup=0)
    row = measure(model, layer, method, 7, settings, torch.device("cpu"), lambda: None)
    assert row["loop_difference"] < 1e-12
    assert [pair["against"] for pair in row["ratios"]] == list(found)[1:]
    for pair in row["ratios"]:
        assert 0 < pair["seconds"]["min"] <= pair["seconds"]["median"] <= pair["seconds"]["max"]
    assert row["multiply_adds_percent"] < 100


def test_uneven_ranks() -> None:
    for total, heads in ((6, 6), (7, 3), (192, 6), (10, 1)):
        ranks = uneven(total, heads)
        assert sum(ranks) == total and min(ranks) >= 1 and ranks == sorted(ranks, reverse=True)


def test_a_record(tmp_path: Path) -> None:
    small = [
        "task.model.embed_dim=24",
        "task.model.num_heads=3",
        "task.model.depth=1",
        "bench.rounds=1",
        "bench.batch=2",
    ]
    cfg = compose("task=imagenet", "mode=bench", "compress=irratt", "hardware=cpu", *small)
    record: dict[str, Any] = new(cfg, "test")
    bench.run(cfg, record, tmp_path)
    (row,) = record["bench"]["rows"]
    assert row["tokens"] == (32 // cfg.task.model.patch_size) ** 2 + 1 and sum(row["ranks"]) == 12
    assert record["compression"]["remaining"]["attention_percent"] > 0
    cfg = compose("task=imagenet", "mode=bench", "hardware=cpu", *small)
    with pytest.raises(ConfigError, match="give compress="):
        bench.run(cfg, new(cfg, "test"), tmp_path)

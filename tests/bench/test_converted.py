"""mode=bench of a converted model: beside the original one, from a folder that has sizes alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from attnlab.attention import MTLAWindow
from attnlab.attention.mla import LatentStep
from attnlab.attention.ops.native import Layer
from attnlab.config.check import check
from attnlab.errors import ConfigError
from attnlab.run.loading import load
from attnlab.run.record import NOT_RUN
from tests.bench.small import CPU, rows, spoil, variants
from tests.conversion.models import FAMILIES

pytestmark = pytest.mark.usefixtures("short_checks")
QUICK = ("bench.rounds=1", "bench.warmup=0", "bench.memory=false", "bench.text=9", "bench.steps=3", "hardware=cpu")


def config(folder: Path, *words: str, sizes: dict[str, Any] = FAMILIES["llama"]) -> DictConfig:
    (folder / "config.json").write_text(json.dumps(sizes))
    return check(["experiment=convert/bench", f"model='{folder}'", *QUICK, *words], load).jobs[0]


@pytest.mark.parametrize(
    ("words", "smaller"),
    [
        (("convert=mla",), 4.0),
        pytest.param(("convert=mtla", "stride=2"), None, marks=pytest.mark.slow),
        pytest.param(("convert=gqa",), 2.0, marks=pytest.mark.slow),
        pytest.param(("convert=tpa",), 2.0, marks=pytest.mark.slow),
        pytest.param(("convert=tpa", "convert.contextual=true"), 4 / 3, marks=pytest.mark.slow),
    ],
)
def test_decoding_and_reading_beside_the_original(
    words: tuple[str, ...], smaller: float | None, tmp_path: Path
) -> None:
    cfg = config(tmp_path, "bench.context=[40,60]", *words)
    checks, result = rows(cfg)
    assert [(row["what"], row.get("context", row.get("text"))) for row in result] == [
        ("generation", 40), ("generation", 60), ("prefill", 9)
    ]  # fmt: skip
    name = words[0].removeprefix("convert=")
    assert list(checks) == [name, "original"]
    assert all(errors[key] < 1e-4 for errors in checks.values() for key in ("output", "gradient", "steps"))
    for row in result:
        assert list(row["variants"]) == [name, "original"] and row["ratios"][0]["seconds"]["median"] > 0
        if row["what"] == "generation":
            sizes = [variant["cache_bytes"] for variant in row["variants"].values()]
            assert all(size["measured"] == size["predicted"] for size in sizes)
            assert sizes[1]["measured"] == 2 * 32 * 4 * (row["context"] + 4)  # layers, 2 G D, float32
            assert row["ratios"][0]["cache"] == (smaller and pytest.approx(smaller, rel=1e-3)) or (
                smaller is None and row["ratios"][0]["cache"] > 3.9
            )


def test_a_wrong_step_gives_no_ratio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, LatentStep, "read")
    spoil(monkeypatch, Layer, "__call__")
    _, (row,) = rows(config(tmp_path, "bench.what=generation", "bench.context=5"))
    assert "mla was not found equal to its reference: steps off by 0.0" in row["ratios"][0]["not run"]


def test_the_mechanism_is_the_planned_one(tmp_path: Path) -> None:
    cfg = config(tmp_path, "convert=mtla", "convert.keep=0.5", "convert.recent=6")
    converted, original = (variant.mechanism(torch.float32, CPU) for variant in variants(cfg))
    assert isinstance(converted, MTLAWindow) and original.cache_elements_per_token == 32
    assert (converted.rope_dim, converted.latent_dim, converted.recent) == (6, 10, 6)
    model: Any = variants(cfg)[0].model(torch.float32, CPU)
    assert [type(attention) for attention in model.attentions] == [MTLAWindow, MTLAWindow]


def test_positions_that_were_never_learned_are_not_measured(tmp_path: Path) -> None:
    _, (row,) = rows(config(tmp_path, "bench.what=generation", "bench.context=70", sizes=FAMILIES["gpt2"]))
    assert all("has learned 64 positions, not 74" in result[NOT_RUN] for result in row["variants"].values())


def test_a_cache_that_would_not_shrink_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="are no less than the 32"):
        rows(config(tmp_path, "convert.rope_dim=16", "convert.latent_dim=16"))

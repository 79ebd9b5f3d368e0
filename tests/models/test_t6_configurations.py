"""The T6 paper's configurations, to the unit: attention parameters of a layer, totals, cached numbers per token."""

from pathlib import Path
from typing import Any

import pytest

from attnlab.config.build import CONF
from attnlab.config.check import compose
from attnlab.modes import describe

ROOT = CONF.parent
LAYERS = {"small": 12, "medium": 24, "large": 36, "xl": 48}
PUBLISHED = {  # size and mechanism: heads, attention parameters of a layer, cache elements per token and layer, total
    "small mha": (12, 2_359_296, 1536, 123_568_128),
    "small mqa": (23, 2_359_296, 128, 123_568_128),
    "small gqa": (22, 2_359_296, 256, 123_568_128),
    "small tpa_kvonly": (22, 2_426_880, 344, 124_379_136),
    "small tpa": (34, 2_423_808, 392, 124_342_272),
    "medium mha": (16, 4_194_304, 2048, 353_452_032),
    "medium mqa": (31, 4_194_304, 128, 353_452_032),
    "medium gqa": (30, 4_194_304, 256, 353_452_032),
    "medium tpa_kvonly": (29, 4_182_016, 372, 353_157_120),
    "medium tpa": (47, 4_216_832, 444, 353_992_704),
    "large mha": (20, 6_553_600, 2560, 772_131_840),
    "large mqa": (39, 6_553_600, 128, 772_131_840),
    "large gqa": (38, 6_553_600, 256, 772_131_840),
    "large tpa_kvonly": (37, 6_579_200, 404, 773_053_440),
    "large tpa": (61, 6_597_120, 500, 773_698_560),
    "xl mha": (25, 10_240_000, 3200, 1_554_892_800),
    "xl mqa": (49, 10_240_000, 128, 1_554_892_800),
    "xl gqa": (48, 10_240_000, 256, 1_554_892_800),
    "xl tpa_kvonly": (47, 10_336_000, 444, 1_559_500_800),
    "xl tpa": (78, 10_259_200, 568, 1_555_814_400),
    "small mla_t6": (13, 2_319_104, 288, 123_085_824),
    "medium mla_t6": (23, 4_211_456, 288, 353_863_680),
    "large mla_t6": (34, 6_595_328, 288, 773_634_048),
    "xl mla_t6": (49, 10_312_448, 288, 1_558_370_304),
}
WIDTHS = {"small": 768, "medium": 1024, "large": 1280, "xl": 1600}
HEADS = {name: numbers[0] for name, numbers in PUBLISHED.items()}


def row(name: str, heads: int | None = None) -> str:
    """The command line of a size and a mechanism; `heads`: other than the published count."""
    size, attention = name.split()
    return f"task=fineweb_edu scale=paper_{size} attention={attention}" + (
        f" task.attention_heads={heads}" * bool(heads)
    )


OTHERS = {  # the latents and heads that the tables print, heads nearest to MHA's budget, as many heads as the other has
    row("small mla_t6", 12): (12, 2_188_032, 288, 121_512_960),
    "experiment=t6/mla_printed scale=paper_medium": (23, 6_882_816, 544, 417_976_320),
    "experiment=t6/mla_printed scale=paper_large": (34, 10_364_416, 544, 909_321_216),
}


def quick(line: str) -> bool:
    """The rows of the smallest and the largest model."""
    return "paper_small" in line or "paper_xl" in line


ROWS = {row(name): numbers for name, numbers in PUBLISHED.items()} | OTHERS


@pytest.mark.parametrize("line", [pytest.param(line, marks=() if quick(line) else pytest.mark.slow) for line in ROWS])
def test_row(line: str) -> None:
    cfg = compose(*line.split())
    heads, of_a_layer, cache, *total = ROWS[line]
    record: dict[str, Any] = {"kv_cache": {}}
    describe.run(cfg, record, Path())
    size = cfg.scale.removeprefix("paper_")
    assert (cfg.choices.task, cfg.task.attention_heads, cfg.attention.num_heads) == ("fineweb_edu", heads, heads)
    assert record["parameters"]["attention"] == LAYERS[size] * of_a_layer
    assert record["kv_cache"]["elements_per_token_per_layer"] == cache
    d = WIDTHS[size]
    expected = 50304 * d + LAYERS[size] * (of_a_layer + 3 * d * (8 * d // 3))
    assert record["parameters"]["total"] == expected
    assert total in ([], [expected])


def test_a_mechanism_that_was_not_published_has_the_heads_of_mha() -> None:
    cfg = compose("task=fineweb_edu", "scale=paper_xl", "attention=tpa_shared_b")
    assert cfg.attention.num_heads == cfg.task.attention_heads == HEADS["xl mha"]

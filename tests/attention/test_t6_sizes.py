"""Attention parameters and cached numbers of every configuration of the T6 system, to the unit."""

from typing import NamedTuple

import pytest
import torch

from attnlab.attention import MHA, TPA, Attention, MLAQueryLatent, TPAKVOnly

WIDTHS = {"small": 768, "medium": 1024, "large": 1280, "xl": 1600}


class Row(NamedTuple):
    size: str
    mechanism: str
    heads: int
    parameters: int
    cache: int


ROWS = [  # specification of the T6 system, section 3: counted from its official modules
    Row("small", "mha", 12, 2_359_296, 1536),
    Row("small", "mqa", 23, 2_359_296, 128),
    Row("small", "gqa", 22, 2_359_296, 256),
    Row("small", "mla 256/512", 13, 2_319_104, 288),
    Row("small", "mla 256/512", 12, 2_188_032, 288),
    Row("small", "kvonly", 22, 2_426_880, 344),
    Row("small", "tpa", 34, 2_423_808, 392),
    Row("medium", "mha", 16, 4_194_304, 2048),
    Row("medium", "mqa", 31, 4_194_304, 128),
    Row("medium", "gqa", 30, 4_194_304, 256),
    Row("medium", "mla 256/512", 23, 4_211_456, 288),
    Row("medium", "mla 512/1024", 23, 6_882_816, 544),
    Row("medium", "kvonly", 29, 4_182_016, 372),
    Row("medium", "tpa", 47, 4_216_832, 444),
    Row("large", "mha", 20, 6_553_600, 2560),
    Row("large", "mqa", 39, 6_553_600, 128),
    Row("large", "gqa", 38, 6_553_600, 256),
    Row("large", "mla 256/512", 34, 6_595_328, 288),
    Row("large", "mla 512/1024", 34, 10_364_416, 544),
    Row("large", "kvonly", 37, 6_579_200, 404),
    Row("large", "tpa", 61, 6_597_120, 500),
    Row("xl", "mha", 25, 10_240_000, 3200),
    Row("xl", "mqa", 49, 10_240_000, 128),
    Row("xl", "gqa", 48, 10_240_000, 256),
    Row("xl", "mla 256/512", 49, 10_312_448, 288),
    Row("xl", "kvonly", 47, 10_336_000, 444),
    Row("xl", "tpa", 78, 10_259_200, 568),
]


def build(row: Row) -> Attention:
    d = WIDTHS[row.size]
    match row.mechanism.split():
        case ["mha"]:
            return MHA(d, row.heads, bias=False)
        case ["mqa" | "gqa" as name]:
            return MHA(d, row.heads, 1 if name == "mqa" else 2, 64, bias=False)
        case ["mla", latents]:
            latent, query = (int(number) for number in latents.split("/"))
            return MLAQueryLatent(d, row.heads, 64, 32, latent, query)
        case ["kvonly"]:
            return TPAKVOnly(d, row.heads, 64)
    return TPA(d, row.heads, 64)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.size}-{row.mechanism}-{row.heads}")
def test_counts(row: Row) -> None:
    with torch.device("meta"):
        attention = build(row)
        cache = attention.new_cache(1, 10)
    assert sum(parameter.numel() for parameter in attention.parameters()) == row.parameters
    assert attention.cache_elements_per_token == row.cache
    assert sum(buffer.numel() for buffer in cache.buffers()) == 10 * row.cache


@pytest.mark.parametrize(
    ("row", "products"),
    [  # multiply-adds of a cached position, all heads (section 3)
        (ROWS[6], 5528), (ROWS[13], 7348), (ROWS[20], 9308), (ROWS[26], 11688),
        (ROWS[5], 22 * 2 * 64 + 22 * 2 * 64), (ROWS[3], 13 * (2 * 256 + 32)),
    ],
    ids=str,
)  # fmt: skip
def test_multiply_adds_of_a_cached_position(row: Row, products: int) -> None:
    with torch.device("meta"):
        attention = build(row)
    assert attention.multiply_adds(11) - attention.multiply_adds(10) == products


@pytest.mark.parametrize("latent", [0, 257])
def test_a_latent_that_compresses_nothing_is_refused(latent: int) -> None:
    with pytest.raises(ValueError, match=f"latent_dim={latent}: expected 1 to 256"):
        MLAQueryLatent(128, 4, head_dim=32, latent_dim=latent)

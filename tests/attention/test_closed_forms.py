"""Parameters, cache elements and multiply-adds against the closed forms, and the papers' numbers."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from attnlab.attention import MLA, MTLA, TPA, Attention, MLAQueryLatent, TPAKVOnly
from tests.attention.mechanisms import EVERY, NAMES, Mechanism, configured, gates_of_other_steps

PAPER = ("task.model.d_model=512", "task.attention_heads=8", "task.attention_dropout=0.0")


class Form(NamedTuple):
    """What a mechanism costs at width d with H heads of width D = d / H."""

    parameters: int
    elements: int  # cached per token or slot
    state: int = 0  # cached per row, whatever its length
    prefix: int = 0  # cached per prefix, whatever its length
    window: int | None = None  # text positions that are cached at most
    unmerged: int = 0  # newest and first positions that are cached each by itself, with a stride more

    @property
    def per_token(self) -> int:
        """Of long texts."""
        return 0 if self.window else self.elements


def grouped(d: int, heads: int, groups: int) -> Form:
    """Four projections with biases, two of them of `groups` heads only, whose keys and values are cached."""
    cached = groups * d // heads
    return Form(2 * d * (d + cached) + 2 * d + 2 * cached, 2 * cached)


def tied(d: int, heads: int, groups: int) -> Form:
    """Query and output; values of `groups` heads and a rotary key of half a head, which are cached."""
    cached = groups * d // heads + d // heads // 2
    return Form(2 * d * d + d * cached, cached)


def factorised(d: int, heads: int, *, reuse: bool = False) -> Form:
    """Query down, norm, up, with C = 2 D; a key head, a value head or the map of keys and its shares; output."""
    wide = 2 * d // heads
    queries, value = d * wide + wide + wide * heads * wide, wide * wide + wide if reuse else d * wide
    return Form(queries + d * wide + value + heads * wide * d, wide if reuse else 2 * wide)


def latent(d: int, heads: int, *, gate: bool) -> Form:
    """Query, down, LayerNorm, up, output; r = 4 D, d_r = D / 2. Gate: two linears r -> r / 4 with biases."""
    width = d // heads
    r, rotary = 4 * width, width // 2
    plain = d * heads * (width + rotary) + d * (r + rotary) + 2 * r + r * heads * 2 * width + d * d
    return Form(plain + (2 * (r * (r // 4) + r // 4) if gate else 0), r + rotary)


def latents(d: int, heads: int, parts: int, branches: int = 1) -> Form:
    """Query, down, RMS norms, up from r / `parts` to the heads of each branch, output; r = 4 D, d_r = D / 2."""
    width = d // heads
    r, rotary = 4 * width, width // 2
    up = r // parts * branches * heads * 2 * width
    return Form(d * heads * (width + rotary) + d * (r + rotary) + r + up + d * d, r + rotary)


def query_latent(d: int, heads: int) -> Form:
    """Query down, norm, up; down, norm, up, output.  d_c' = 8 D, d_c = 4 D, d_r = D / 2."""
    width = d // heads
    r, q, rotary = 4 * width, 8 * width, width // 2
    queries = d * q + q + q * heads * (width + rotary)
    return Form(queries + d * (r + rotary) + r + r * heads * 2 * width + d * d, r + rotary)


def products(d: int, heads: int, *, a: bool = True, b: bool = True, shared: bool = False, q: bool = True) -> Form:
    """TPA, R_K = R_V = 2 and R_Q = 6 (or as many as H and D allow), and an output projection.

    a, b: whether head and token factors are projected and cached, or learned; shared: keys and values have one token
    factor; q: whether queries are factorised, or projected without factors.
    """
    width = d // heads
    ranks = 4 + (min(6, heads, width) if q else 0)
    head = ranks * heads * (d if a else 1)
    token = (ranks - 2 * shared) * width * (d if b else 1)
    cached = a * 4 * heads + b * (4 - 2 * shared) * width
    return Form(head + token + (1 if q else 2) * d * heads * width, cached)


def multilinear(d: int, rank: int, slots: int, state: int) -> Form:
    """q, k, v; a core; read-outs of the slice and of the prefix's pairs, whose mean R x R is cached."""
    return Form(3 * d * rank + rank + slots * d + rank * d, 0, state, rank**2)


FORMS = {
    "mha": lambda d, heads: grouped(d, heads, heads),
    "gqa": lambda d, heads: grouped(d, heads, 2),
    "mqa": lambda d, heads: grouped(d, heads, 1),
    "gta": lambda d, heads: tied(d, heads, 2),
    "mfa": factorised,
    "mfa reuse=true": lambda d, heads: factorised(d, heads, reuse=True),
    "sliding_window": lambda d, heads: grouped(d, heads, heads)._replace(window=128),
    "mla": lambda d, heads: latent(d, heads, gate=False),
    "gla": lambda d, heads: latents(d, heads, 2),
    "mlra": lambda d, heads: latents(d, heads, 4, 4),
    "mlra branches=2": lambda d, heads: latents(d, heads, 4, 2),
    "mla_window": lambda d, heads: latent(d, heads, gate=False)._replace(window=128),
    "mtla": lambda d, heads: latent(d, heads, gate=True),
    "mtla_window": lambda d, heads: latent(d, heads, gate=True)._replace(unmerged=3),
    "mla_t6": query_latent,
    "tpa": products,
    "tpa_kvonly": lambda d, heads: products(d, heads, q=False),
    "tpa_noncontextual_a": lambda d, heads: products(d, heads, a=False),
    "tpa_noncontextual_b": lambda d, heads: products(d, heads, b=False),
    "tpa_shared_b": lambda d, heads: products(d, heads, shared=True),
    "multilinear": lambda d, _: multilinear(d, 40, 32**2, 2 * 32 * 40),
    "multilinear_absolute": lambda d, _: multilinear(d, 40, 100**2, 2 * 100 * 40),
    "multilinear_summed": lambda d, _: Form(5 * d * 40 + 40 + 80, 0, 2 * 40, 40**2),
    "multilinear_tied": lambda d, _: Form(4 * d * 40 + 40, 0, 40 * 40, 40**2),
}
PUBLISHED = {  # d 512, 8 heads: MTLA paper's system, counted with its official builders; multi-linear: ours, by hand
    "mha": Form(1_050_624, 1024),
    "gqa": Form(656_640, 256),
    "mqa": Form(590_976, 128),
    "gta": Form(512 * (2 * 512 + 2 * 64 + 32), 160),  # m + 1 / 2 heads of the paper's table of caches, by hand
    "mfa": Form(3 * 512 * 128 + 128 + 8 * 128 * 128 + 8 * 128 * 512, 256),  # 3 d C + m C (C + d) and the norm
    "mfa reuse=true": Form(2 * 512 * 128 + 128 + 8 * 128 * 128 + 128 * 129 + 8 * 128 * 512, 128),
    "sliding_window": Form(1_050_624, 1024, window=128),
    "mla": Form(1_065_472, 288),
    "gla": Form(1_065_472 - 256 - 131_072, 288),  # of MLA, without biases of the norm and half of the up-projection
    "mlra": Form(1_065_472 - 256, 288),
    "mlra branches=2": Form(1_065_472 - 256 - 131_072, 288),
    "mla_window": Form(1_065_472, 288, window=128),
    "mtla": Form(1_098_368, 288),
    "mtla_window": Form(1_098_368, 288, unmerged=3),
    # T6's: its closed forms at this width, by hand
    "mla_t6": Form(512 * 512 + 512 + 512 * 8 * 96 + 512 * 288 + 256 + 256 * 8 * 128 + 512 * 512, 288),
    "tpa": Form(512 * 10 * (8 + 64) + 512 * 512, 288),
    "tpa_kvonly": Form(512 * 4 * (8 + 64) + 2 * 512 * 512, 288),
    "tpa_noncontextual_a": Form(10 * (512 * 64 + 8) + 512 * 512, 256),
    "tpa_noncontextual_b": Form(10 * (512 * 8 + 64) + 512 * 512, 32),
    "tpa_shared_b": Form(512 * (10 * 8 + 8 * 64) + 512 * 512, 160),
    "multilinear": Form(606_248, 0, 2_560, 1_600),
    "multilinear_absolute": Form(5_201_960, 0, 8_000, 1_600),
    "multilinear_summed": Form(102_520, 0, 80, 1_600),
    "multilinear_tied": Form(81_960, 0, 1_600, 1_600),
}
every = pytest.mark.parametrize("mechanism", [m for m in EVERY if m.name in FORMS and m.window is None], ids=str)


def of(table: dict[str, Any], mechanism: Mechanism) -> Any:
    """The entry of a mechanism: that of its choice, if this changes a count."""
    return table.get(f"{mechanism.name} {mechanism.choice}", table[mechanism.name])


def test_every_mechanism_has_a_closed_form() -> None:
    assert set(NAMES) == {name.partition(" ")[0] for name in FORMS} and set(FORMS) == set(PUBLISHED), (
        "add the mechanism to FORMS and PUBLISHED, from its paper"
    )
    paper = configured("mtla", "scale=paper").task
    assert (paper.model.d_model, paper.attention_heads) == (512, 8)  # as PAPER has them


@every
def test_parameters_and_cache_at_the_papers_size(mechanism: Mechanism) -> None:
    form = of(PUBLISHED, mechanism)
    assert of(FORMS, mechanism)(512, 8) == form
    with torch.device("meta"):
        attention = mechanism.make(*PAPER)
        cache = attention.new_cache(5, 7, 11)
    assert sum(p.numel() for p in attention.parameters()) == form.parameters
    assert attention.cache_elements_per_token == form.per_token / (mechanism.stride or 1)
    assert sum(buffer.numel() for buffer in cache.buffers()) == attention.cache_elements(5, 7, 11)


@pytest.mark.parametrize(("name", "kind"), [("mla", MLA), ("mtla", MTLA)])
def test_without_sizes_a_latent_mechanism_has_those_of_the_paper(name: str, kind: type[MLA]) -> None:
    """The MTLA paper's r = 4 d_h, d_r = d_h / 2 and g = r / 4; a latent of 2 still has a gate."""
    with torch.device("meta"):
        attention = kind(512, 8)
    assert sum(p.numel() for p in attention.parameters()) == PUBLISHED[name].parameters
    assert attention.cache_elements_per_token == PUBLISHED[name].per_token / (2 if kind is MTLA else 1)
    assert MTLA(64, 4, latent_dim=2).gate_latent.out_features == 1


@every
@pytest.mark.parametrize(("d", "heads"), [(64, 4), (192, 6)])
def test_parameters_and_cache_at_other_sizes(mechanism: Mechanism, d: int, heads: int) -> None:
    form = of(FORMS, mechanism)(d, heads)
    with torch.device("meta"):
        attention = mechanism.make(f"task.model.d_model={d}", f"task.attention_heads={heads}")
    assert sum(p.numel() for p in attention.parameters()) == form.parameters
    assert attention.cache_elements_per_token == form.per_token / (mechanism.stride or 1)


@every
def test_a_row_keeps_one_slot_for_every_stride_positions(mechanism: Mechanism) -> None:
    with torch.device("meta"):
        attention = mechanism.make(*PAPER)
    stride, form = mechanism.stride or 1, of(PUBLISHED, mechanism)
    for length in [*range(1, 20), 127, 128, 129, 500]:
        if attention.max_positions is not None and length > attention.max_positions:
            continue
        slots = math.ceil(min(length, form.window or length) / stride) * form.elements + form.state
        if form.unmerged:
            slots = (form.unmerged + stride + max(0, length - form.unmerged) // stride) * form.elements
        assert attention.cache_elements(3, length) == 3 * (slots + form.prefix)


FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # which torch does not count


def fused_flops(query: list[int], key: list[int], value: list[int], *_: object, **__: object) -> int:
    return 2 * math.prod(query[:3]) * key[2] * (query[3] + value[3])


@every
@pytest.mark.parametrize("context", [1, 2, 37, 140])
def test_multiply_adds_of_a_step_are_as_counted(mechanism: Mechanism, context: int) -> None:
    """Matrix products of one step, as counted by torch. Elementwise products (the gate's inner product) are not."""
    attention = mechanism.make(*PAPER).eval()
    if attention.max_positions is not None and context > attention.max_positions:
        pytest.skip(f"takes {attention.max_positions} positions")
    cache = attention.new_cache(1, context)
    if context > 1:
        attention.extend(torch.randn(1, context - 1, 512), cache)
    with FlopCounterMode(display=False, custom_mapping={FUSED: fused_flops}) as counter:
        attention.extend(torch.randn(1, 1, 512), cache)
    counted = counter.get_total_flops() / 2 + gates_of_other_steps(attention, context)
    assert counted == pytest.approx(attention.multiply_adds(context), rel=1e-4)


@pytest.mark.parametrize("q_rank", [6, 8])
def test_a_step_builds_the_query_where_its_factors_cost_more(q_rank: int) -> None:
    attention, context = TPA(512, 8, 64, q_rank=q_rank).eval(), 11
    cache = attention.new_cache(1, context)
    attention.extend(torch.randn(1, context - 1, 512), cache)
    with FlopCounterMode(display=False, custom_mapping={FUSED: fused_flops}) as counter:
        attention.extend(torch.randn(1, 1, 512), cache)
    assert counter.get_total_flops() / 2 == attention.multiply_adds(context)


@pytest.mark.parametrize(
    ("kind", "sizes", "products"),
    [  # T6's configurations (specification, section 3); their parameters and caches: models/test_t6_configurations.py
        (TPA, (768, 34, 64), 5528),
        (TPA, (1024, 47, 64), 7348),
        (TPA, (1280, 61, 64), 9308),
        (TPA, (1600, 78, 64), 11688),
        (TPAKVOnly, (768, 22, 64), 22 * 2 * 64 + 22 * 2 * 64),
        (MLAQueryLatent, (768, 13, 64, 32, 256, 512), 13 * (2 * 256 + 32)),
    ],
)
def test_multiply_adds_of_a_cached_position(kind: type[Attention], sizes: tuple[int, ...], products: int) -> None:
    with torch.device("meta"):
        attention = kind(*sizes)
    assert attention.multiply_adds(11) - attention.multiply_adds(10) == products


@pytest.mark.parametrize("latent", [0, 257])
def test_a_latent_that_compresses_nothing_is_refused(latent: int) -> None:
    with pytest.raises(ValueError, match=f"latent_dim={latent}: expected 1 to 256"):
        MLAQueryLatent(128, 4, head_dim=32, latent_dim=latent)

"""The kernels of a decoding step against their naive form: in Triton's interpreter on the CPU, and on a GPU."""

import os
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from attnlab.attention.ops import kernels
from attnlab.attention.ops.backends import Backend, prefer
from attnlab.attention.ops.decode import attend_cached
from attnlab.attention.ops.quantised import Coded
from tests.attention import kernel_formulas as naive
from tests.attention.mechanisms import error

pytest.importorskip("triton")
from attnlab.attention.ops.kernels import latent, split
from attnlab.attention.ops.kernels.latent import Blocks, CacheSegment, latent_decode
from attnlab.attention.ops.kernels.merge import merge_slot

CPU = torch.device("cpu")
interpreter = pytest.mark.skipif(not kernels.usable(CPU), reason="needs TRITON_INTERPRET=1, which a GPU does not take")
gpu = pytest.mark.gpu
# The largest error in units of the root mean square; outputs of half precision are rounded to it.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
SMALL = Blocks(16, 16, 4, 2)


class Case(NamedTuple):
    """A step: the text's slots and count; a prefix's, `beam` rows each; widths (r, d_r), or (D, Dv) of G key heads."""

    heads: int
    widths: tuple[int, int]
    slots: int
    counts: str = "int"  # int, one, rows, none
    prefix: int = 0
    ragged: str = "no"  # no, counts, mask
    beam: int = 1
    groups: int | None = None  # None: the value is the key's content
    dtype: torch.dtype = torch.float32
    loud: float = 1.0
    splits: int | None = None

    def __str__(self) -> str:
        return "-".join(str(value).removeprefix("torch.") for value in self if value is not None).replace(" ", "")


def drawn(case: Case, device: torch.device) -> tuple[Tensor, list[CacheSegment], dict[str, int]]:
    """Queries, segments and `value_dim`. What does not exist is NaN."""
    rng, batch = torch.Generator().manual_seed(0), 2 * case.beam
    width = sum(case.widths) if case.groups is None else case.widths[0]

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng).to(device, case.dtype)

    def segment(rows: int, slots: int, kind: str) -> CacheSegment:
        key = draw(rows, case.groups or 1, slots, width)
        value = None if case.groups is None else draw(rows, case.groups, slots, case.widths[1])
        stored = torch.randint(1, slots + 1, (rows,), generator=rng).tolist()
        stored = [slots] * rows if kind == "none" else [stored[0]] * rows if kind in ("int", "one") else stored
        exists = torch.arange(slots) < torch.tensor(stored)[:, None]
        if kind == "mask":
            exists = torch.rand(rows, slots, generator=rng) < 0.6
        for tensor in (key, value):
            if tensor is not None:
                tensor.masked_fill_(~exists.to(device)[:, None, :, None], torch.nan)
        counts = torch.tensor(stored[:1] if kind == "one" else stored, device=device)
        if kind == "mask":
            return CacheSegment(key, value, mask=exists.to(device))
        return CacheSegment(key, value, None if kind == "none" else stored[0] if kind == "int" else counts)

    segments = [segment(batch, case.slots, case.counts)]
    if case.prefix:
        segments.insert(0, segment(2, case.prefix, {"no": "none", "counts": "rows"}.get(case.ragged, "mask")))
    more = {"value_dim": case.widths[0]} if case.groups is None else {}
    return case.loud * draw(batch, case.heads, width), segments, more


def check(case: Case, device: torch.device, blocks: Blocks | None) -> None:
    q, segments, more = drawn(case, device)
    scale = q.shape[-1] ** -0.5
    got = latent_decode(q, segments, scale, blocks=blocks, splits=case.splits, **more)
    want = naive.latent_decode(q.cpu(), [on_cpu(segment) for segment in segments], scale, **more)
    assert got.dtype == case.dtype
    assert error(got.cpu(), want) < TOLERANCE[case.dtype] * (100 if case.loud > 1 else 1)


def on_cpu(segment: CacheSegment) -> CacheSegment:
    return CacheSegment(*(t.cpu() if isinstance(t, Tensor) else t for t in segment))  # type: ignore[arg-type]


FEW = [
    Case(3, (40, 8), 33, "rows", prefix=17, ragged="counts", beam=2, splits=2),
    Case(1, (16, 16), 1, "none"),
    Case(6, (20, 12), 17, "one", prefix=5, ragged="mask", groups=3, dtype=torch.bfloat16),
]
GRID = [
    *FEW,
    *(Case(h, (r, e), k, dtype=d) for h, (r, e), k, d in product(
        (1, 33), ((16, 16), (100, 20), (512, 64)), (1, 65), (torch.float32, torch.bfloat16))),
    Case(2, (576, 16), 40), Case(2, (16, 576), 40), Case(5, (64, 0), 31),
    Case(8, (48, 16), 130, "rows", dtype=torch.float16, splits=4),
    Case(8, (48, 16), 130, "one", splits=3), Case(4, (32, 8), 64, "none", splits=4), Case(4, (32, 8), 65, splits=4),
    *(Case(4, (32, 8), 20, *options, dtype=torch.float16) for options in product(
        ("int", "rows"), (1, 33), ("no", "counts", "mask"), (1, 5))),
    *(Case(12, widths, 33, "rows", 18, "counts", 3, groups) for widths, groups in product(
        ((64, 64), (24, 40), (128, 16)), (1, 4, 12))),
    *(Case(4, (32, 8), 50, "rows", 20, "mask", 2, dtype=dtype, loud=60.0) for dtype in TOLERANCE),
]  # fmt: skip


@interpreter
@pytest.mark.parametrize("case", FEW, ids=str)
def test_the_kernel_equals_the_naive_form(case: Case) -> None:
    check(case, CPU, SMALL)


@interpreter
@pytest.mark.slow
@pytest.mark.parametrize("case", GRID, ids=str)
def test_the_kernel_equals_the_naive_form_at_odd_shapes(case: Case) -> None:
    check(case, CPU, None)


@gpu
@pytest.mark.parametrize("case", GRID, ids=str)
def test_on_a_gpu_the_kernel_equals_the_naive_form(case: Case) -> None:
    check(case, torch.device("cuda"), None)


@gpu
def test_all_block_sizes_give_the_same() -> None:
    case = Case(33, (512, 64), 300, "rows", 70, "mask", 2, dtype=torch.bfloat16)
    q, segments, more = drawn(case, torch.device("cuda"))
    want = naive.latent_decode(q.cpu(), [on_cpu(segment) for segment in segments], 0.05, **more)
    for blocks in (Blocks(16, 16, 4, 2), Blocks(16, 64, 4, 3), Blocks(32, 32, 8, 2), Blocks(64, 16, 8, 2)):
        assert error(latent_decode(q, segments, 0.05, blocks=blocks, **more).cpu(), want) < 6e-2, blocks


@interpreter
def test_a_row_without_any_slot_gets_zeros_and_splits_beyond_a_count_have_no_weight() -> None:
    q, key = torch.randn(2, 2, 16), torch.full((2, 1, 64, 16), torch.nan)
    key[1, 0, :4] = torch.randn(4, 16)
    segment = CacheSegment(key, end=torch.tensor([0, 4], dtype=torch.int32))
    y = latent_decode(q, [segment], value_dim=16, blocks=SMALL, splits=4)
    assert not y[0].any()
    assert error(y[1:], naive.latent_decode(q[1:], [CacheSegment(key[1:, :, :4])], value_dim=16)) < 1e-5


def test_splits_follow_from_shapes_and_fill_the_device() -> None:
    assert split.num_splits(64, 512, 132) == 2  # 128 of 132 multiprocessors
    assert split.num_splits(1, 512, 132) > 100
    assert split.num_splits(1, 3, 132) == 3  # no split is less than a block
    assert split.num_splits(1320, 512, 132) == 1
    assert all(1 <= split.num_splits(programs, 40, 132) <= 40 for programs in range(300))


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_chosen_blocks_fit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every width that the kernel promises, in the shared memory of A100, L40 and H200."""
    for memory, content, rest, lines in product(
        (166912, 101376, 232448), range(16, 577, 40), (0, 16, 64), (1, 16, 999)
    ):
        device = split.Device(CPU)
        device.shared_memory = memory
        monkeypatch.setattr(latent, "device_of", lambda _, device=device: device)
        for shared in (True, False):
            widths = latent.Widths(content, rest, content, shared).padded
            blocks = latent.choose_blocks(lines, widths, shared, dtype, CPU)
            if content * dtype.itemsize <= 1024 or shared and dtype.itemsize == 2:
                used = latent.shared_memory(blocks, widths, shared, dtype.itemsize)
                assert used <= memory and blocks.lines * widths[2] <= 4096 * blocks.warps, (blocks, widths, memory)


@pytest.mark.parametrize(
    "change",
    [
        {"key": torch.zeros(3, 1, 4, 24)},
        {"key": torch.zeros(2, 1, 4, 25)},
        {"key": torch.zeros(2, 1, 4, 24).half()},
        {"end": torch.tensor([1, 2, 3])},
        {"end": torch.tensor([1.0, 2.0])},
        {"mask": torch.zeros(2, 4)},
        {"value": torch.zeros(2, 1, 5, 16)},
        {"key": torch.zeros(2, 1, 24, 4).mT},
        {"value": Coded((None, 16), 2, 4, 8, torch.zeros(0))},
    ],
)
def test_what_does_not_fit_is_an_error(change: dict[str, Tensor]) -> None:
    segment = CacheSegment(**{"key": torch.zeros(2, 1, 4, 24)} | change)
    with pytest.raises(ValueError, match=r"do not fit|^end: |^a mask"):
        latent_decode(torch.zeros(2, 3, 24), [segment], value_dim=None if segment.value is not None else 16)


def check_codes(bits: int, case: Case, device: torch.device) -> None:
    """Codes, the text and a prefix in one step, against the plain path in float32."""
    rng, rows, used = torch.Generator().manual_seed(0), 2 * case.beam, case.slots
    value_dim = case.widths[1] if case.groups is None else None

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng).to(device, case.dtype)

    def coded(width: int) -> Coded:
        outer = () if case.groups is None else (case.groups,)
        codes = Coded((*outer, None, width), rows, 96, bits, draw(0))
        codes.write(0, draw(rows, *outer, used, width))
        codes.rows[..., used:, :, :] = 255  # NaN
        return codes

    def buffers(rows: int, slots: int) -> list[Tensor | None]:
        made = [draw(rows, case.groups or 1, slots, width) for width in case.widths]
        return [made[0], None if case.groups is None else made[1]]

    key, value = coded(case.widths[0]), None if case.groups is None else coded(case.widths[1])
    q, text, prefix = draw(rows, case.heads, 1, case.widths[0]), buffers(rows, 9), buffers(2, case.prefix)
    mask = torch.rand(2, case.prefix, generator=rng).to(device) < 0.7
    more: dict[str, Any] = {"value_dim": value_dim, "used": 7, "older": (key, value, used), "beam": case.beam}
    outs = []
    for backend, dtype in ((Backend.TRITON, case.dtype), (Backend.PLAIN, torch.float32)):
        given: list[Any] = [None if t is None else t.to(dtype) for t in (q, *text, *prefix)]
        asked, keys, values, before, values_before = given
        with prefer(backend):
            scale = case.widths[0] ** -0.5
            outs.append(attend_cached(asked, keys, values, scale, before, values_before, mask, **more))
    assert error(outs[0].cpu(), outs[1].double().cpu()) < TOLERANCE[case.dtype]


CODES = [
    Case(3, (40, 24), 47, prefix=5, beam=2),
    Case(1, (100, 70), 33),
    Case(2, (70, 36), 35, groups=2),
    Case(2, (20, 100), 1, prefix=3, groups=1),
]
bits = pytest.mark.parametrize("bits", [8, 4])


@interpreter
@bits
@pytest.mark.parametrize("case", CODES, ids=str)
def test_codes_are_read_as_by_the_plain_path(bits: int, case: Case) -> None:
    check_codes(bits, case, CPU)


@gpu
@bits
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("case", [*CODES, Case(16, (288, 256), 95), Case(8, (128, 128), 95, groups=8)], ids=str)
def test_on_a_gpu_codes_are_read_as_by_the_plain_path(bits: int, case: Case, dtype: torch.dtype) -> None:
    check_codes(bits, case._replace(dtype=dtype), torch.device("cuda"))


def merged(device: torch.device, dtype: torch.dtype, ragged: bool) -> None:
    rng, stride = torch.Generator().manual_seed(0), 3

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng).to(device, dtype)

    slots, gates = draw(4, 5, 30), draw(9, 6)
    at = torch.tensor([0, 4, 8, 12]) if ragged else torch.tensor(7)
    first = torch.tensor([0, 3, 1, 2]) if ragged else torch.tensor([2])
    for form in (lambda t: t.to(device), lambda t: t if ragged else int(t)):
        latents, rotary, hidden = draw(4, 20), draw(4, 10), draw(4, 6)
        inputs = [t.cpu() for t in (slots, latents, rotary, hidden, gates)]
        want = naive.merge_slot(inputs[0], inputs[1], inputs[2], inputs[3], inputs[4], at, stride, first)
        counts = merge_slot(slots, latents, rotary, hidden, gates, form(at.to(device)), stride, form(first.to(device)))
        assert error(slots.cpu(), want) < TOLERANCE[dtype]
        assert counts.tolist() == (at // stride + 1).expand(4).tolist()


@interpreter
@pytest.mark.parametrize("ragged", [False, True], ids=["uniform", "ragged"])
def test_merging_a_slot_equals_the_naive_form(ragged: bool) -> None:
    merged(CPU, torch.float32, ragged)


@gpu
@pytest.mark.parametrize("ragged", [False, True], ids=["uniform", "ragged"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_on_a_gpu_merging_a_slot_equals_the_naive_form(dtype: torch.dtype, ragged: bool) -> None:
    merged(torch.device("cuda"), dtype, ragged)


def test_the_interpreter_runs_in_the_tests_without_a_gpu() -> None:
    assert torch.cuda.is_available() or os.environ["TRITON_INTERPRET"] == "1" and kernels.usable(CPU)

"""Factor decode against its naive form, and the steps of tensor product attention that it computes.

Without a CUDA device the kernel runs in Triton's interpreter; the same grid runs on CUDA, marked `gpu`.
"""

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from attnlab.attention import TPA
from attnlab.attention.ops.backends import Backend, prefer
from attnlab.attention.ops.kernels import FACTOR_RANKS, usable
from tests.attention import kernel_formulas as naive
from tests.attention.mechanisms import Mechanism, error, extend_by

pytest.importorskip("triton")
from attnlab.attention.ops.kernels import factor
from attnlab.attention.ops.kernels.factor import Blocks, FactorPart, factor_decode

SMALL = Blocks(16, 16, 4, 1)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 0.01, torch.bfloat16: 0.06}
needs_interpreter = pytest.mark.skipif(not usable(torch.device("cpu")), reason="kernels run on the CUDA device here")


class Case(NamedTuple):
    """One shape: rows, prefixes (0: none), heads, ranks of queries (0: no factors), R, D, d_c, positions, count, ..."""

    name: str
    batch: int = 1
    prefixes: int = 0
    heads: int = 3
    query_ranks: int = 2
    ranks: int = 2
    width: int = 16
    third_dim: int | None = None
    room: int = 20  # positions of the text's buffers
    used: int | tuple[int, ...] | None = 17  # one more than a block
    prefix: int = 9  # positions of the prefix's buffers
    prefix_used: int | tuple[int, ...] | None = None
    fixed: bool = False
    dtype: torch.dtype = torch.float32
    blocks: Blocks | None = SMALL
    splits: int | None = 2
    gap: float = 0.0  # between the logits of the first position and of all others

    def inputs(self, device: str) -> tuple[Tensor, list[FactorPart], float, dict[str, Any]]:
        generator = torch.Generator().manual_seed(len(self.name))

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device, self.dtype)

        def part(rows: int, room: int, used: int | tuple[int, ...] | None) -> FactorPart:
            head = (1, self.ranks, self.heads, 1) if self.fixed else (rows, self.ranks, self.heads, room)
            stored = self.width if self.third_dim is None else self.width // self.third_dim + self.third_dim
            result = FactorPart(*(draw(*shape) for shape in (head, (rows, self.ranks, room, stored)) * 2))
            for n in range(rows):  # what does not exist is never used
                first = room if used is None else used[n % len(used)] if isinstance(used, tuple) else used
                result.key_token[n, :, first:] = result.value_token[n, :, first:] = math.nan
            return FactorPart(*result[:4], torch.tensor(used, device=device) if isinstance(used, tuple) else used)

        parts = [part(self.batch, self.room, self.used)]
        if self.prefixes:
            parts.insert(0, part(self.prefixes, self.prefix, self.prefix_used))
        lines, scale = self.query_ranks or self.heads, self.width**-0.5 / (max(self.query_ranks, 1) * self.ranks)
        query = draw(self.batch, lines, self.width)
        head = draw(self.batch, self.query_ranks, self.heads) if self.query_ranks else None
        if self.gap:  # one rank: the logit of position 0 is that far from the others, of every head
            assert self.query_ranks == self.ranks == 1 and head is not None
            head.fill_(1), query.zero_(), parts[0].key_head.fill_(1)
            query[..., 0], parts[0].key_token[:, :, 0, 0] = 16.0, self.gap / (16 * scale)
            parts[0].key_token[:, :, 1:, 0] = 0
        return query, parts, scale, {"query_head": head, "third_dim": self.third_dim}

    def check(self, device: str) -> None:
        query, parts, scale, rest = self.inputs(device)
        got = factor_decode(query, parts, scale, **rest, blocks=self.blocks, splits=self.splits)
        assert got.dtype == self.dtype and got.isfinite().all()
        cpu = [on_cpu(part) for part in parts]
        rest["query_head"] = None if rest["query_head"] is None else rest["query_head"].cpu()
        want = naive.factor_decode(query.cpu(), cpu, scale, **rest)
        assert error(got.cpu(), want) < TOLERANCE[self.dtype]


def on_cpu(part: FactorPart) -> FactorPart:
    return FactorPart(*(t.cpu() if isinstance(t, Tensor) else t for t in part))  # type: ignore[arg-type]


QUICK = [
    Case("one block and a position, factors of queries", heads=17, blocks=Blocks(32, 16, 4, 1)),
    Case("beams share ragged prefixes, one is empty", 4, 2, prefix_used=(9, 0), used=1, splits=1),
    Case("bfloat16, third order", dtype=torch.bfloat16, width=12, third_dim=2, used=5, splits=1),
    Case("learned head factors, a row without positions", 2, query_ranks=0, fixed=True, room=18, used=(9, 0)),
    Case("logits 200 apart", query_ranks=1, ranks=1, gap=200.0),
    Case("logits -200 apart", query_ranks=1, ranks=1, gap=-200.0),
]
GRID = [
    *[
        Case(f"{h} heads, D {d}, R {r}, R_Q {q}, {dtype}", 1, 0, h, q, r, d, dtype=dtype, blocks=None, splits=None)
        for dtype in TOLERANCE
        for h, d, r, q in (
            (1, 16, 1, 1), (34, 64, 2, 6), (47, 24, 3, 6), (47, 128, 1, 16), (7, 256, 2, 0), (5, 40, 8, 2),
            (3, 10, 5, 3),
        )
    ],
    *[
        Case(f"{size} positions in {splits} splits", room=max(size, 1), used=size, splits=splits)
        for size in (0, 1, 15, 16, 33)
        for splits in (1, 3)
    ],
    *[
        Case(f"{beam} beams, {heads} heads, {kind}", 2 * beam, 2, heads, query_ranks, splits=splits, **more)
        for kind, query_ranks, more in (
            ("ragged", 2, {"prefix_used": (3, 9), "used": (7,)}),
            ("no prefix at all", 2, {"prefix_used": 0}), ("empty buffers", 2, {"prefix": 0}),
            ("third order", 2, {"third_dim": 4}), ("third order of one", 2, {"third_dim": 1}),
            ("learned", 3, {"fixed": True}),
        )
        for beam, heads, splits in ((1, 5, None), (3, 11, 2))
    ],
    Case("ragged texts", 3, used=(0, 20, 4)),
    Case("counts of the lot on the device", 3, used=(18,)),
    *[
        Case(f"logits {gap} apart, {dtype}", query_ranks=1, ranks=1, gap=gap, dtype=dtype, splits=4)
        for gap in (200.0, -200.0, 2000.0)
        for dtype in TOLERANCE
    ],
    *[Case(f"{blocks}", 1, 0, 30, blocks=blocks, room=70, used=69)
      for blocks in (SMALL, Blocks(32, 128, 8, 3), Blocks(64, 64, 4, 2), Blocks(64, 16, 8, 1))],
]  # fmt: skip


@needs_interpreter
@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_equals_the_equations(case: Case) -> None:
    case.check("cpu")


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("case", GRID, ids=lambda case: case.name)
def test_grid_equals_the_equations(case: Case) -> None:
    case.check("cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", QUICK + GRID, ids=lambda case: case.name)
def test_grid_on_cuda(case: Case) -> None:
    case.check("cuda")


@pytest.mark.parametrize("name", ["tpa_shared_b", "tpa_noncontextual_b"])
def test_what_the_kernel_does_not_read_is_computed_as_before(name: str) -> None:
    attention = Mechanism(name).build()
    assert isinstance(attention, TPA)
    x, cache = torch.randn(1, 3, 32, dtype=torch.float64), attention.new_cache(1, 3)
    with prefer(Backend.TRITON):
        assert attention.step_backend(1, x) is Backend.PLAIN
        assert error(extend_by(attention, x, cache, [1, 1, 1]), attention(x)) < 1e-12


@needs_interpreter
def test_one_place_says_what_computes_a_step() -> None:
    tpa, many, like = TPA(32, 4, 8, q_rank=4), TPA(32, 16, 16, rank=FACTOR_RANKS + 1), torch.empty(1)
    assert tpa.step_backend(1, like) is Backend.PLAIN  # on the CPU, unless it is asked for
    with prefer(Backend.TRITON):
        assert tpa.step_backend(1, like) is Backend.TRITON
        assert tpa.step_backend(2, like) is many.step_backend(1, like) is Backend.PLAIN
        with pytest.raises(
            ValueError, match="backend TRITON cannot compute operation step: the dtype is torch.float64"
        ):
            tpa.step_backend(1, like.double())


def test_chosen_blocks_fit() -> None:
    for dtype in TOLERANCE:
        for heads, ranks, width in ((1, 1, 16), (34, 2, 64), (47, 8, 256), (32, 1, 128), (300, 2, 64)):
            with torch.device("meta"):
                head = torch.empty(1, ranks, heads, 64, dtype=dtype)
                token = torch.empty(1, ranks, 64, width, dtype=dtype)
            part = FactorPart(head, token, head, token)
            assert factor.shared_memory(factor.choose_blocks(heads, part, width), part, width) <= 100 * 1024


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"used": torch.tensor([1.0])}, "used: torch.float32"),
        ({"key_head": torch.zeros(1, 2, 4, 20)}, r"factors \(1, 2, 4, 20\) .*: expected \(1, 2, 3, 20\)"),
        ({"value_token": torch.zeros(1, 2, 40, 16)[:, :, ::2]}, "of torch.float32 on cpu, contiguous"),
        ({"key_token": torch.zeros(1, 9, 20, 16)}, "1 rows of 9 ranks: expected a divisor of 1, and 1 to 8"),
    ],
)
def test_what_does_not_fit_is_one_line(change: dict[str, Any], message: str) -> None:
    query, parts, scale, rest = Case("one").inputs("cpu")
    with pytest.raises(ValueError, match=message):
        factor_decode(
            query, [FactorPart(**dict(zip(FactorPart._fields, parts[0], strict=True)) | change)], scale, **rest
        )

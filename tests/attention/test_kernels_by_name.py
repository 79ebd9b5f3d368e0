"""Every backend of merged attention, asked for by its name, at odd shapes, forward and backward, against the formula.

The bodies are the same on a CPU, with the backends that it has, and on a GPU.
"""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from attnlab.attention.ops import backends
from attnlab.attention.ops.backends import Backend, noting, prefer, used
from attnlab.attention.ops.library import library
from attnlab.attention.ops.partial_softmax import Past, merged_attention
from tests.attention.test_merged import dense

# See `off`. Probabilities, outputs and their gradients are rounded to the dtype; float32 products may be of TF32 on a
# GPU, which has 10 bits.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 3e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
HALF = (torch.float16, torch.bfloat16)
GPU = (Backend.CUDNN_CUDA, Backend.FLASH_CUDA, Backend.FUSED_CUDA, Backend.PLAIN)
CPU = (Backend.FUSED_CPU, Backend.PLAIN)


class Case(NamedTuple):
    """A text of `total` positions, `past` of a prefix that two rows share, and which of them exist."""

    name: str
    total: int = 12
    stride: int = 1
    heads: int = 2
    width: int = 64
    value: int = 64
    past: int = 0
    masked: bool = False
    gap: float = 0.0  # between the logits of the first key and of all others

    def inputs(self) -> tuple[list[Tensor], Tensor | None]:
        """Queries, [value | key] of the text and, where there is one, of the prefix, in float64; which exist."""
        rng = torch.Generator().manual_seed(len(self.name))

        def draw(rows: int, count: int, width: int) -> Tensor:
            return torch.randn(rows, count, self.heads, width, generator=rng, dtype=torch.float64)

        q, packed = draw(4, self.total, self.width), draw(4, self.total, self.value + self.width)
        if self.gap:  # of the keys that have a one in their first column, where queries have nothing else
            q[..., 0], packed[..., self.value] = self.gap, 0
            q[..., 1:] = 0
            packed[:, 0, :, self.value] = 1
        if not self.past:
            return [q, packed], None
        exists = torch.arange(self.past) < torch.tensor([[self.past], [0]]) if self.masked else None
        return [q, packed, draw(2, self.past, self.value + self.width)], exists

    @property
    def scale(self) -> float:
        return 1.0 if self.gap else self.width**-0.5


CASES = [
    Case("one token", 1),
    Case("one slot", 2, stride=2),
    Case("a token and a prefix of one", 1, past=1),
    Case("a prefix of one that a row does not have", 5, past=1, masked=True),
    Case("one over a block of keys", 129, past=129),
    Case("one over a block of slots", 258, stride=2, past=33, masked=True),
    Case("no prefix, stride 3", 51, stride=3),
    Case("one head", 70, heads=1, past=17),
    Case("over two tiles of slots", 1539, stride=3, heads=1, width=24, value=16),
    Case("narrow heads", 40, width=16, value=16, past=9),
    Case("values narrower than keys", 65, stride=4 + 1, width=96, value=64, past=20, masked=True),
    Case("wide heads", 66, width=128, value=128, past=5),
    Case("wider heads", 66, stride=2, width=192, value=128, past=5),
    Case("widest heads of flash", 34, width=256, value=256, past=5),
    Case("latents as heads", 34, stride=2, width=576, value=512, past=5, masked=True),
    Case("logits 200 apart", 33, gap=200.0),
    Case("logits -200 apart", 33, stride=3, gap=-200.0),
    Case("off the boundaries of 16 bytes", 21, width=20, value=12, past=6),
]


def off(got: Tensor, want: Tensor) -> float:
    """The norm of the difference by the norm; of what nearly vanishes, by a tenth of a unit for each number."""
    return float((got.cpu().double() - want).norm() / want.norm().clamp(min=0.1 * want.numel() ** 0.5))


def check(case: Case, backend: Backend, dtype: torch.dtype, device: str, tolerance: float | None = None) -> None:
    """The backend is what computes it, without NaN, and within the tolerance, by default that of its dtype."""
    drawn, exists = case.inputs()
    rounded = [t.to(dtype) for t in drawn]
    exact = [t.double().requires_grad_() for t in rounded]
    leaves = [t.to(device).requires_grad_() for t in rounded]
    mask = None if exists is None else exists.to(device)
    want, _, _ = dense(exact[0], exact[1], case.scale, case.stride, [Past(t, exists) for t in exact[2:]], case.value)
    with prefer(backend), noting() as pairs:
        past = [Past(t, mask) for t in leaves[2:]]
        out = merged_attention(leaves[0], leaves[1], case.value, case.scale, stride=case.stride, past=past)
    assert used(pairs)["merged"] == [backend.name] and out.dtype == dtype
    g = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    result = [out, *torch.autograd.grad(out, leaves, g.to(device))]
    wanted = [want, *torch.autograd.grad(want, exact, g.double())]
    for got, exactly in zip(result, wanted, strict=True):
        assert got.isfinite().all()
        assert off(got.detach(), exactly.detach()) < (tolerance or TOLERANCE[dtype])


def takes(case: Case, backend: Backend, dtype: torch.dtype) -> bool:
    """Whether a kernel takes a case on any GPU."""
    step = 16 // dtype.itemsize
    if backend is Backend.PLAIN:
        return True
    widest = {Backend.CUDNN_CUDA: 128, Backend.FLASH_CUDA: 256}.get(backend, 1024)
    typed = backend is Backend.FUSED_CUDA or dtype in HALF
    return typed and not case.width % step and not case.value % step and case.width <= widest


@pytest.mark.parametrize("backend", CPU, ids=lambda b: b.name)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_on_a_cpu_in_float64(case: Case, backend: Backend) -> None:
    check(case, backend, torch.float64, "cpu")


@pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_in_cpp(case: Case) -> None:
    check(case, Backend.NATIVE, torch.float32, "cpu", 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_on_a_cpu_in_other_dtypes(case: Case, dtype: torch.dtype) -> None:
    check(case, Backend.FUSED_CPU, dtype, "cpu")
    check(case, Backend.PLAIN, dtype, "cpu")


@pytest.mark.parametrize("backend", [b for b in GPU if b.name.endswith("_CUDA")], ids=lambda b: b.name)
def test_kernels_of_a_gpu_are_refused_on_a_cpu(backend: Backend) -> None:
    with pytest.raises(ValueError, match=f"{backend.name} cannot .* the tensors are on cpu, expected cuda"):
        check(CASES[0], backend, torch.float32, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", GPU, ids=lambda b: b.name)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_by_name_on_a_gpu(case: Case, backend: Backend, dtype: torch.dtype) -> None:
    if not takes(case, backend, dtype):
        pytest.skip("no kernel")
    check(case, backend, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_chosen_on_a_gpu(case: Case, dtype: torch.dtype) -> None:
    """Whatever that is, it is able to."""
    q = torch.zeros(4, 1, case.heads, case.width, device="cuda", dtype=dtype)
    check(case, backends.choose("merged", q, value_dim=case.value, noted=False), dtype, "cuda")

"""Which backend computes what, and the flash and cuDNN kernels of CUDA by their contracts, without a GPU.

The contracts are those of torch's operators: argument order and shapes against torch's shape functions, on
tensors without data, numbers against operators that are written out here and refuse what the real ones refuse.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend

from attnlab.attention.ops import backends, partial_softmax
from attnlab.attention.ops.backends import Backend, choose, dense_attention, forget, noting, prefer, used
from attnlab.attention.ops.partial_softmax import Past, expanded_attention, merged_attention, rebuilt_attention
from attnlab.attention.ops.pattern import MergedPattern
from attnlab.attention.ops.sdpa import Kernel
from tests.attention.mechanisms import error
from tests.attention.test_merged import VALUE, WIDTH, dense, draw

HALF_PRECISION = [Backend.FLASH_CUDA, Backend.CUDNN_CUDA]
Saved = list[Any]


def forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, ...]:
    """Logits, output and log-sum-exp."""
    logits = q @ k.mT * scale + (0 if bias is None else bias)
    if causal:
        assert q.shape[2] == k.shape[2]  # else the kernels align the triangle at its last corner
        logits = logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    return logits, logits.softmax(-1) @ v, logits.logsumexp(-1)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, causal: bool,
    scale: float,
) -> list[Tensor]:  # fmt: skip
    """From the output and log-sum-exp that are passed, no others."""
    assert lse.is_contiguous() and out.shape == grad.shape
    p = (forward(q, k, v, bias, causal, scale)[0] - lse[..., : q.shape[2]].unsqueeze(-1)).exp()
    ds = p * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * scale
    return [ds @ k, ds.mT @ q, p.mT @ grad]


def flash(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, *, scale: float) -> Saved:
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] and not dropout and q.stride(-1) == k.stride(-1) == 1
    _, out, lse = forward(q, k, v, None, causal, scale)
    return [out, lse, None, None, q.shape[2], k.shape[2], torch.zeros(2), torch.zeros(()), None]


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, scale: float
) -> Saved:
    assert rest[:5] == (None, None, q.shape[2], k.shape[2], 0.0) and [t.shape for t in rest[6:]] == [(2,), ()]
    return backward(grad, q, k, v, None, out, lse, rest[5], scale)


def cudnn(q: Tensor, k: Tensor, v: Tensor, bias: None, *rest: Any, scale: float) -> Saved:
    assert bias is None and rest[:2] == (True, 0.0) and k.shape[2] > 1
    _, out, lse = forward(q, k, v, None, rest[2], scale)
    return [out, lse.unsqueeze(-1), None, None, q.shape[2], k.shape[2], torch.zeros(()), torch.zeros(()), None]


def cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, scale: float
) -> Saved:
    assert rest[2:8] == (None, None, None, q.shape[2], k.shape[2], 0.0)
    return backward(grad, q, k, v, None, out, lse.squeeze(-1), rest[8], scale)


def efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *rest: Any, scale: float) -> Saved:
    assert k.shape[2] == 1 if bias is None else not rest[2]  # parts with a mask, and single keys, which cuDNN refuses
    return [*forward(q, k, v, bias, False, scale)[1:], torch.zeros(()), torch.zeros(())]


def efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, *_: Any, scale: float
) -> Saved:
    assert lse.shape[-1] % 32 == 0 and (bias is None or bias.shape == (*q.shape[:3], k.shape[2]))
    return [*backward(grad, q, k, v, bias, out, lse, False, scale), None]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[Backend], None]:
    """CUDA's operators on the CPU in float64, and a way to have a backend chosen there."""
    for name, fake in (
        ("flash_attention", flash),
        ("flash_attention_backward", flash_backward),
        ("cudnn_attention", cudnn),
        ("cudnn_attention_backward", cudnn_backward),
        ("efficient_attention", efficient),
        ("efficient_attention_backward", efficient_backward),
    ):
        monkeypatch.setattr(torch.ops.aten, f"_scaled_dot_product_{name}", fake)
    return lambda backend: monkeypatch.setattr(partial_softmax, "choose", lambda *_, **__: backend)


@pytest.mark.parametrize("kind", ["alone", "past", "all"])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("backend", HALF_PRECISION, ids=lambda b: b.name)
def test_parts_by_half_precision_kernels_equal_one_dense_softmax(
    backend: Backend, stride: int, kind: str, kernels: Callable[[Backend], None]
) -> None:
    kernels(backend)
    q, packed, past = draw(stride, 3, kind)
    out, (want, _, _) = (
        merged_attention(q, packed, VALUE, 0.7, stride=stride, past=past),
        dense(q, packed, 0.7, stride, past),
    )
    assert error(out, want) < 1e-12
    g, inputs = torch.randn_like(want), [q, packed, *[p.packed for p in past]]
    for got, exact in zip(torch.autograd.grad(out, inputs, g), torch.autograd.grad(want, inputs, g), strict=True):
        assert error(got, exact) < 1e-11


@pytest.mark.parametrize("backend", HALF_PRECISION, ids=lambda b: b.name)
def test_expanded_and_rebuilt_forms(backend: Backend, kernels: Callable[[Backend], None]) -> None:
    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64).requires_grad_()

    inputs = leaf(2, 6, 3, WIDTH), leaf(2, 6, 5), leaf(2, 6, 2), leaf(3, VALUE + WIDTH - 2, 5)

    def share(q: Tensor, latent: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        return q, latent.tanh(), *rest  # one that is made, the others unchanged

    def built(heads: slice, q: Tensor, latent: Tensor, rotary: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        return q[:, :, heads], partial_softmax.expand(latent, rotary, up[heads])

    result = []
    for taken in (Backend.PLAIN, backend):
        kernels(taken)
        for out in (
            expanded_attention(*inputs, VALUE, 0.7, stride=2),
            rebuilt_attention(share, built, inputs, 3, VALUE, 0.7),
        ):
            result.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for want, got in zip(result[:2], result[2:], strict=True):
        assert all(error(*pair) < 1e-11 for pair in zip(got, want, strict=True))


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("backend", [*HALF_PRECISION, Backend.FUSED_CUDA], ids=lambda b: b.name)
def test_calls_and_shapes_are_those_that_torch_declares_for_cuda(backend: Backend, stride: int) -> None:
    q, packed, stored = (
        torch.empty(n, t, 2, w, device="meta", dtype=torch.bfloat16)
        for n, t, w in ((4, 64, 96), (4, 64, 160), (2, 32, 160))
    )
    past = [Past(stored), Past(stored, torch.ones(2, 32, device="meta", dtype=torch.bool))]
    run = MergedPattern(Kernel(64, 0.1, 0.1, backend), stride)
    out, saved = run.forward(q, packed, past)
    dq = torch.empty_like(q)
    dpacked, more = run.backward(torch.empty_like(out), q, packed, past, out, saved, dq)
    assert out.shape == (4, 64, 2, 64) and saved.lse.shape == (4, 64, 2) and dq.shape == q.shape
    assert dpacked.shape == packed.shape and [d.shape for d in more] == [stored.shape] * 2


@pytest.mark.parametrize(
    ("narrow", "equal", "value_dim", "want"),
    [
        ("CUDNN_ATTENTION", "CUDNN_ATTENTION", 64, Backend.CUDNN_CUDA),
        ("EFFICIENT_ATTENTION", "FLASH_ATTENTION", 64, Backend.FLASH_CUDA),
        ("EFFICIENT_ATTENTION", "EFFICIENT_ATTENTION", 64, Backend.FUSED_CUDA),
        ("MATH", "FLASH_ATTENTION", 60, Backend.PLAIN),  # keys would begin off a boundary of 16 bytes
        ("MATH", "MATH", 64, Backend.PLAIN),  # torch's attention has no kernel either
    ],
)
def test_on_cuda_merged_attention_takes_the_kernel_that_torch_takes_for_a_dense_one(
    narrow: str, equal: str, value_dim: int, want: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stock(device: torch.device, dtype: torch.dtype, width: int, value: int, dropout: float) -> int:
        assert (device.type, width) == ("cuda", 96)
        if dtype == torch.float32:
            return int(SDPBackend.EFFICIENT_ATTENTION.value)
        assert dtype == torch.bfloat16
        return int(SDPBackend.__members__[equal if value == width else narrow].value)

    monkeypatch.setattr(backends, "stock", stock)
    with FakeTensorMode():
        q = torch.empty(1, 8, 2, 96, device="cuda", dtype=torch.bfloat16)
        assert choose("merged", q, value_dim=value_dim) is want
        assert choose("merged", q.float(), value_dim=value_dim) is Backend.FUSED_CUDA
        assert choose("merged", q.double(), value_dim=value_dim) is Backend.PLAIN
        with prefer(Backend.FLASH_CUDA), pytest.raises(ValueError, match="the dtype is torch.float32, expected"):
            choose("merged", q.float())
        assert choose("window", q, window=1024, block=1024) is Backend.FLEX
        assert choose("window", q, window=1024, block=1024, dropout=0.1) is Backend.SDPA
        assert choose("window", q, window=128, block=128) is Backend.SDPA


def test_torch_is_asked_in_compiled_code_too() -> None:
    def ask(x: Tensor) -> Tensor:
        return x + backends.stock(x.device, x.dtype, 16, 16, 0.0)

    want = SDPBackend.FLASH_ATTENTION.value
    assert torch.compile(ask, fullgraph=True, backend="eager")(torch.zeros(())) == ask(torch.zeros(())) == want


def test_what_was_taken_is_noted() -> None:
    forget()
    q, packed, _ = draw(1, 3, "alone")
    x = torch.randn(1, 2, 4, 8)
    with noting() as pairs:
        merged_attention(q, packed, VALUE, 0.7)
        dense_attention(x, x, x, causal=True)
        with prefer(Backend.PLAIN):
            merged_attention(q, packed, VALUE, 0.7)
    assert used(pairs) == {"dense": ["SDPA flash"], "merged": ["FUSED_CPU", "PLAIN"]}
    assert used()["merged"] == ["FUSED_CPU", "PLAIN"]  # of the process
    with noting() as pairs:
        torch.compile(lambda t: merged_attention(t, packed.detach(), VALUE, 0.7), backend="eager")(q.detach())
    assert used(pairs) == {"merged": ["FUSED_CPU"]}
    forget()
    assert used() == {}

"""Steps of mechanisms through the Triton kernels: what decoding promises, with the kernels computing it."""

import pytest
import torch

from attnlab.attention import Attention
from attnlab.attention.ops import kernels
from attnlab.attention.ops.backends import Backend, choose, noting, prefer, used
from tests.attention.mechanisms import EVERY, Mechanism, error

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not kernels.usable(torch.device("cpu")), reason="no interpreter")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
SERVED = ("mha", "mqa", "gqa", "gta", "mfa", "mla", "gla", "mlra", "mtla", "mla_window", "mtla_window",
          "sliding_window", "tpa", "tpa_kvonly", "tpa_noncontextual_a")  # fmt: skip
STEPS = [m for m in EVERY if m.name in SERVED]
on_devices = pytest.mark.parametrize("device", DEVICES)


def decode(attention: Attention, device: str, lengths: torch.Tensor | None, size: int, steps: int) -> float:
    """Beams of two after shared prefixes, reordered, one sentence dropped -> the error against `forward`."""
    rng = torch.Generator().manual_seed(1)
    x, prefix = (torch.randn(n, t, 32, generator=rng).to(device) for n, t in ((4, steps), (2, size)))
    rows = torch.tensor([1, 1, 2, 3], device=device)
    cache = attention.new_cache(4, steps + 2, size, prefix_batch=2)
    if size:
        attention.read_prefix(prefix, lengths, cache)
    history, worst = x[:, :0], 0.0
    prefixes, sizes = prefix.repeat_interleave(2, 0), None if lengths is None else lengths.repeat_interleave(2)
    for t in range(steps):
        if t == min(2, steps - 1):
            cache.reorder(rows)
            history = history[rows]
        if t == steps - 1:
            cache.select(torch.tensor([1], device=device))
            history, x, prefixes, sizes = history[2:], x[2:], prefixes[2:], None if sizes is None else sizes[2:]
        history = torch.cat((history, x[:, t : t + 1]), 1)
        want = attention(history, prefixes if size else None, prefix_lengths=sizes)[:, -1:]
        with prefer(Backend.TRITON), noting() as pairs:
            worst = max(worst, error(attention.extend(x[:, t : t + 1], cache), want))
        assert used(pairs)["step"] == ["TRITON"]
    return worst


@on_devices
@pytest.mark.parametrize("mechanism", [Mechanism("mtla", 2), Mechanism("tpa")], ids=str)
def test_steps_after_a_short_prefix(mechanism: Mechanism, device: str) -> None:
    attention = mechanism.build(dtype=torch.float32).to(device)
    assert decode(attention, device, torch.tensor([2, 1], device=device), 2, 2) < 1e-4


@on_devices
@pytest.mark.slow
@pytest.mark.parametrize("mechanism", STEPS, ids=str)
def test_steps_by_kernels_equal_forward(mechanism: Mechanism, device: str) -> None:
    attention = mechanism.build(dtype=torch.float32).to(device)
    for lengths in (None, torch.tensor([5, 2], device=device)):
        assert decode(attention, device, lengths, 5, 4) < 1e-4
    assert decode(attention, device, None, 0, 3) < 1e-4


@on_devices
@pytest.mark.parametrize(
    "mechanism", [pytest.param(m, marks=() if m == Mechanism("mtla", 2) else pytest.mark.slow) for m in STEPS], ids=str
)
def test_steps_read_codes_of_older_slots(mechanism: Mechanism, device: str) -> None:
    attention, rng = mechanism.build(dtype=torch.float32).to(device), torch.Generator().manual_seed(1)
    attention.cache_bits, length = 4, 45 * (mechanism.stride or 1)
    x, prefix = (torch.randn(2, size, 32, generator=rng).to(device) for size in (length + 2, 2))
    outs = []
    for backend in (Backend.TRITON, Backend.PLAIN):
        cache = attention.new_cache(2, 2 * length, 2)
        attention.read_prefix(prefix, torch.tensor([2, 1], device=device), cache)
        attention.extend(x[:, :length], cache)
        with prefer(backend):
            outs.append(torch.cat([attention.extend(x[:, t : t + 1], cache) for t in range(length, length + 2)], 1))
    assert error(outs[0], outs[1]) < 1e-4


def test_a_kernel_is_taken_where_it_is_asked_for_and_no_gradient_is_needed() -> None:
    q = torch.zeros(2, 3, 16)
    assert choose("step", q) is Backend.SDPA and choose("step", q, masked=True) is Backend.PLAIN
    with prefer(Backend.PLAIN):
        assert choose("step", q) is choose("merged", q) is Backend.PLAIN
        assert choose("dense", q) is Backend.SDPA  # which has no other
    with prefer(Backend.TRITON):
        assert choose("merged", q) is not Backend.TRITON
        with pytest.raises(ValueError, match="TRITON cannot compute operation step: the dtype is torch.float64"):
            choose("step", q.double())
        with pytest.raises(ValueError, match="neither dropout nor a gradient"):
            choose("step", q.clone().requires_grad_())
        with pytest.raises(ValueError, match="neither dropout nor a gradient"):
            choose("step", q, dropout=0.1)
        if kernels.usable(q.device):
            assert choose("step", q, masked=True) is Backend.TRITON
            with pytest.raises(RuntimeError, match="torch.compile does not see into it"):
                torch.compile(lambda q: q + (choose("step", q) is Backend.TRITON), fullgraph=True, backend="eager")(q)
    assert choose("step", q) is Backend.SDPA  # the preference ends with its context
    with prefer(Backend.SDPA), pytest.raises(ValueError, match="no prefix, no mask"):
        choose("step", q, masked=True)
    with prefer(Backend.FUSED_CUDA), pytest.raises(ValueError, match="the tensors are on cpu, expected cuda"):
        choose("merged", q)


def test_without_an_interpreter_or_a_gpu_the_error_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with prefer(Backend.TRITON), pytest.raises(ValueError, match="expected a CUDA device .* or TRITON_INTERPRET=1"):
        choose("step", torch.zeros(1, 1, 16))

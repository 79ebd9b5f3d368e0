"""Shares of a device's peaks, and which ratios are refused because a kernel was timed and not checked."""

import pytest
import torch
from torch.nn import functional as F

from attnlab.bench import utilisation
from attnlab.bench.compare import timed, unchecked
from attnlab.bench.utilisation import NOT_KNOWN, attention_operations, operations_of, peak_of


def test_shares_of_the_peaks_of_a_device_that_is_known() -> None:
    result = utilisation.utilisation("NVIDIA H200", "bfloat16", 2.0, int(989e12), int(4.8e12))
    assert result["share_of_peak_flops"] == result["share_of_peak_bandwidth"] == 0.5
    assert result["flops"] == 494.5e12 and result["bytes_per_second"] == 2.4e12
    assert utilisation.utilisation("NVIDIA H200", "bfloat16", 2.0, None, None) == {}
    unknown = utilisation.utilisation("Some Card", "bfloat16", 2.0, 10, 10)
    assert unknown["share_of_peak_flops"] == unknown["share_of_peak_bandwidth"] == NOT_KNOWN
    assert peak_of("NVIDIA A100-SXM4-40GB") != peak_of("NVIDIA A100-SXM4-80GB") and peak_of("NVIDIA A100") is None
    assert utilisation.utilisation("NVIDIA H200", "float64", 2.0, 10, None)["share_of_peak_flops"] == NOT_KNOWN


@pytest.mark.parametrize(("precision", "peak"), [("highest", 67e12), ("high", 494.5e12)])
def test_float32_has_the_peak_of_what_computes_it(precision: str, peak: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    assert utilisation.utilisation("NVIDIA H200", "float32", 1.0, int(peak), None)["share_of_peak_flops"] == 1


def test_a_kernel_that_was_timed_and_not_checked_gives_no_ratio() -> None:
    check = {"output": 0.0, "kernels": {"merged": ["FUSED_CUDA"], "step": ["TRITON"]}}
    assert unchecked(check, {"kernels": {"merged": ["FUSED_CUDA"], "dense": ["SDPA flash"]}}) == []
    result = {"kernels": {"merged": ["FLASH_CUDA", "FUSED_CUDA"], "window": ["FLEX", "SDPA"]}}
    assert unchecked(check, result) == ["FLASH_CUDA (merged)", "FLEX (window)"]
    assert unchecked({}, result) == []  # of a published algorithm, which is the reference


class Products:
    """Causal attention of 4096 positions with keys of 128, forward and backward, and products of 8192 x 8192."""

    def __init__(self, device: str, size: int = 8192) -> None:
        self.a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
        self.q = torch.randn(2, 16, size // 2, 128, device=device, dtype=torch.bfloat16, requires_grad=True)

    def prepare(self) -> None:
        self.q.grad = None

    def run(self) -> None:
        for _ in range(3):
            self.a @ self.a
        F.scaled_dot_product_attention(self.q, self.q, self.q, is_causal=True).sum().backward()

    def operations(self) -> int:
        size, rows = len(self.a), self.q.shape[2]
        return 3 * 2 * size**3 + 2 * 32 * rows * (rows + 1) // 2 * (2 * 128 + 5 * 128)


def test_operations_are_those_of_the_pairs_that_are_seen() -> None:
    work = Products("cpu", 64)
    assert operations_of(work, {"dense": ["SDPA flash"]}) == work.operations()  # type: ignore[arg-type]
    assert operations_of(work, {"window": ["FLEX"]}) is None  # type: ignore[arg-type]
    shapes = torch.Size((1, 1, 4, 6)), torch.Size((1, 1, 7, 6)), torch.Size((1, 1, 7, 2))
    assert attention_operations(*shapes, causal=False, backward=False) == 2 * 4 * 7 * (6 + 2)


@pytest.mark.gpu
def test_on_a_gpu_a_large_product_comes_near_the_peak_and_never_above_it() -> None:
    device = torch.device("cuda")
    work = Products("cuda")
    assert operations_of(work, {"dense": ["SDPA flash"]}) == work.operations()  # type: ignore[arg-type]
    seconds = min(timed(work, device)["seconds"] for _ in range(5))  # type: ignore[arg-type]
    name = torch.cuda.get_device_name()
    result = utilisation.utilisation(name, "bfloat16", seconds, work.operations(), None)
    share = result["share_of_peak_flops"]
    assert share == NOT_KNOWN if peak_of(name) is None else 0.2 < float(share) < 1.0

"""Peak rates of GPUs, and the shares of them that a run reaches.

Peaks are those of the makers' data sheets, without sparsity: dense products of half precision and of float32 inputs in
operations per second, and bytes per second of the device's memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from attnlab.bench.settings import rounded
from attnlab.bench.workloads import Workload

NOT_KNOWN = "not known"


class Peak(NamedTuple):
    """Operations per second by input type, and bytes per second, of a device."""

    half: float  # float16 and bfloat16
    tf32: float  # float32 inputs rounded to TF32
    single: float
    bandwidth: float


PEAKS = {  # by a part of the name that torch gives the device; the first that fits
    "H200": Peak(989e12, 494.5e12, 67e12, 4.8e12),
    "H100 PCIe": Peak(756e12, 378e12, 51e12, 2.0e12),
    "H100 80GB HBM3": Peak(989e12, 494.5e12, 67e12, 3.35e12),
    "A100-SXM4-80GB": Peak(312e12, 156e12, 19.5e12, 2.039e12),
    "A100-SXM4-40GB": Peak(312e12, 156e12, 19.5e12, 1.555e12),
    "A100 80GB PCIe": Peak(312e12, 156e12, 19.5e12, 1.935e12),
    "L40S": Peak(362e12, 183e12, 91.6e12, 0.864e12),
    "NVIDIA L4": Peak(121e12, 60e12, 30.3e12, 0.3e12),
}


def peak_of(name: str) -> Peak | None:
    """The peaks of a device by its name in torch; None: unknown."""
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def utilisation(
    name: str, dtype: str, seconds: float, operations: int | None, read: int | None
) -> dict[str, float | str]:
    """Numbers of a result: operations and bytes per second, and their shares of the device's peaks.

    Args:
        name: of the device, in torch.
        dtype: of the products, as torch names it.
        operations: multiplications and additions of one run; None: they were not counted.
        read: bytes that a run must read; None: unknown.
    """
    peak, rates = peak_of(name), dict[str, float | str]()

    def share(rate: float, most: float | None) -> float | str:
        return NOT_KNOWN if most is None else rounded(rate / most)

    if operations is not None:
        single = "single" if torch.get_float32_matmul_precision() == "highest" else "tf32"
        kind = {"float32": single, "float64": ""}.get(dtype, "half")
        rate = operations / seconds
        rates |= {"flops": rounded(rate), "share_of_peak_flops": share(rate, getattr(peak, kind, None))}
    if read is not None:
        rate = read / seconds
        rates["bytes_per_second"] = rounded(rate)
        rates["share_of_peak_bandwidth"] = share(rate, getattr(peak, "bandwidth", None))
    return rates


def operations_of(work: Workload, kernels: dict[str, list[str]]) -> int | None:
    """Multiplications and additions of one more run: matrix products, convolutions and attention as it is seen.

    Causal attention counts the pairs on and below the diagonal. None: torch does not see the operations of a kernel.
    """
    if any(name.startswith(("TRITON", "FLEX")) for names in kernels.values() for name in names):
        return None
    work.prepare()
    with FlopCounterMode(display=False, custom_mapping=_formulas()) as counter:
        work.run()
    return int(counter.get_total_flops())


def attention_operations(query: Any, key: Any, value: Any, causal: bool, backward: bool) -> int:
    """Of one kernel with these shapes (B, H, T, .): two products forward; five backward, with the logits again."""
    (batch, heads, rows, width), columns, value_width = query, key[2], value[3]
    pairs = rows * (rows + 1) // 2 if causal and rows == columns else rows * columns
    return 2 * batch * heads * pairs * ((3 * width + 2 * value_width) if backward else width + value_width)


@cache
def _formulas() -> dict[Any, Any]:
    """Operation counts of torch's fused kernels, whose arguments begin with the queries, or with the gradient."""
    aten, formulas = torch.ops.aten, {}

    def formula(name: str, backward: bool) -> Any:
        order = [a.name for a in getattr(aten, name).default._schema.arguments]
        place = order.index("is_causal")

        def count(*args: Any, out_val: Any = None, out_shape: Any = None, **kwargs: Any) -> int:
            causal = kwargs.get("is_causal", args[place] if len(args) > place else False)
            query, key, value = args[1:4] if backward else args[:3]
            return attention_operations(query, key, value, bool(causal), backward)

        return count

    for kernel in ("flash_attention", "cudnn_attention", "efficient_attention", "flash_attention_for_cpu"):
        for backward in (False, True):
            name = f"_scaled_dot_product_{kernel}" + "_backward" * backward
            formulas[getattr(aten, name)] = formula(name, backward)
    return formulas


@cache
def _other(device: torch.device) -> torch.Tensor:
    size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
    return torch.empty(size, dtype=torch.uint8, device=device)


def flush(device: torch.device) -> None:
    """Write over a CUDA device's L2 cache, so that a run finds nothing of the one before."""
    _other(device).zero_()


@contextmanager
def events(device: torch.device) -> Iterator[list[float]]:
    """Seconds of what is launched within, by CUDA events of the current stream: the list has them afterwards."""
    seconds: list[float] = []
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record(torch.cuda.current_stream(device))
    yield seconds
    ended.record(torch.cuda.current_stream(device))
    ended.synchronize()
    seconds.append(begun.elapsed_time(ended) / 1000)

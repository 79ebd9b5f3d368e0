"""Peak memory of a run of a workload, measured in a new process."""

import gc
import json
import os
import pkgutil
import resource
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from omegaconf import OmegaConf

from attnlab.bench.settings import Shape, rounded
from attnlab.bench.variants import Variant
from attnlab.bench.workloads import Workload, workload_type
from attnlab.config.build import written

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# Otherwise freed blocks may stay resident, and repeated runs take between 71 and 126 MiB.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**16), "MALLOC_TRIM_THRESHOLD_": str(2**16)}
PROTOCOL = {
    "cpu": "a fresh process each: highest resident set while a run is prepared and done (VmHWM; ru_maxrss where that "
    "cannot be reset) less the resident set before; weights, inputs and a run of a small shape come before; glibc "
    "gives blocks from 64 KiB on back when they are freed (MALLOC_MMAP_THRESHOLD_)",
    "cuda": "a fresh process each: the allocator's peak while a run is prepared and done less what it held before",
}


def peak_mib(variant: Variant, shape: Shape, dtype: str, device: torch.device) -> float | str:
    """Peak MiB of a run of a workload above the memory in use before, or the reason why it was not measured.

    It is the allocator's memory on CUDA, and the resident set on a CPU. `dtype` is the name of a torch dtype.
    """
    order = {
        "variant": {**vars(variant), "cfg": written(variant.cfg)},
        "kind": f"{type(variant).__module__}:{type(variant).__qualname__}",
        "shape": asdict(shape),
        "dtype": dtype,
        "device": str(device),
        "threads": torch.get_num_threads(),
    }
    paths = os.pathsep.join([os.getcwd(), *(path for path in sys.path if path)])
    done = subprocess.run(
        [sys.executable, "-m", "attnlab.bench.memory"],
        input=json.dumps(order),
        capture_output=True,
        text=True,
        env=os.environ | ALLOCATOR | {"PYTHONPATH": paths},
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return f"not run: the measuring process ended with {done.returncode}: {lines[-1] if lines else 'no message'}"
    return rounded(float(done.stdout.splitlines()[-1]))


def free_bytes(device: torch.device) -> int:
    """Free memory of a GPU, or of the machine."""
    return int(torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available)


def shortage(work: Workload, shape: Shape, device: torch.device) -> str | None:
    """Reason why a training step cannot run: its T x T tensors do not fit into memory. None: it can."""
    needed = work.quadratic_bytes()
    if needed is None or needed <= 0.9 * (free := free_bytes(device)):
        return None
    size, room = (f"{count / 2**30:.1f} GiB" for count in (needed, free))
    return f"its {shape.text} x {shape.prefix + shape.text} tensors take {size}, and {room} are free"


def measure(order: dict[str, Any]) -> float:
    """Peak MiB that a run adds. The main function of the process that :func:`peak_mib` starts with `order`."""
    torch.set_num_threads(order["threads"])
    device, dtype = torch.device(order["device"]), getattr(torch, order["dtype"])
    kind = pkgutil.resolve_name(order["kind"])
    variant = kind(**{**order["variant"], "cfg": OmegaConf.create(order["variant"]["cfg"])})
    shape = Shape(**order["shape"])
    make = workload_type(shape.what)
    small = replace(shape, batch=1, beam=min(shape.beam, 2), prefix=min(shape.prefix, 16), text=min(shape.text, 16))
    _run(make(variant, small, dtype, device))  # libraries, kernels, thread pools
    work = make(variant, shape, dtype, device)
    if getattr(variant, "compiled", False):
        _run(work)  # excludes the memory of the compiler
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else _reset_peak()
    _run(work)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _peak()
    return max(peak - before, 0) / 2**20


def _run(work: Workload) -> None:
    work.prepare()
    work.run()


def _reset_peak() -> int:
    """Current resident bytes. Resets the recorded peak if the system supports it."""
    try:
        CLEAR.write_text("5")
    except OSError:  # not Linux, or forbidden: only growth beyond the previous peak is measured
        return _peak()
    return psutil.Process().memory_info().rss


def _peak() -> int:
    """Peak resident bytes."""
    if STATUS.is_file():
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    print(measure(json.load(sys.stdin)))

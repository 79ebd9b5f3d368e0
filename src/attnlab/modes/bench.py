"""mode=bench: time and memory with random weights, against references, in one run."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from attnlab.bench import Settings
from attnlab.bench.compare import compare
from attnlab.bench.memory import PROTOCOL
from attnlab.bench.show import show
from attnlab.bench.workloads import workload_type
from attnlab.config.build import instantiate
from attnlab.errors import ConfigError
from attnlab.run.device import busy_cores, device_of
from attnlab.run.progress import progress
from attnlab.run.record import NOT_RUN
from attnlab.tasks.base import Task, task_of

UTILISATION = (
    "flops: multiplications and additions a second of matrix products and of the pairs that attention sees, counted in "
    "one more run; bytes_per_second: weights and cache read once a step; shares of the peaks that the maker states, "
    "without sparsity"
)


def run(cfg: DictConfig, record: dict[str, Any], directory: Path) -> None:
    """Fill `bench` (protocol, checks, a row per shape) and, from its rows, the record's sections."""
    task = task_of(cfg, Task)
    settings = chosen_workloads(cfg, task.workloads, instantiate(cfg.bench))
    device = device_of(cfg)
    measured = protocol(settings, device)
    with progress("checking", None) as shown:
        checks, rows = compare(
            cfg,
            settings,
            device,
            begin=lambda total: shown(0, total=total),
            advance=lambda what, runs: shown(runs, what=what),
        )
    record["bench"] = {"protocol": measured, "checks": {name: c for name, c in checks.items() if c}, "rows": rows}
    record["corpus"] = "none: random inputs"
    task.describe(record)
    fill(record, settings)
    show(record, directory)


def chosen_workloads(cfg: DictConfig, workloads: Sequence[str], settings: Settings) -> Settings:
    """The settings with `what` filled in.

    Raises:
        ConfigError: `bench.what` names a workload that the task does not have, or a prefix is missing.
    """
    if settings.what is None:
        settings = replace(settings, what=list(workloads[:3]))
    if missing := [what for what in settings.kinds if what not in workloads]:
        raise ConfigError(
            f"bench.what={missing[0]} cannot measure the model of task={cfg.choices.task}: "
            f"give bench.what=[{','.join(workloads)}]"
        )
    needs = {workload_type(what).reads_prefix for what in settings.kinds}
    encoder = OmegaConf.select(cfg, "task.model.encoder") is not None
    if settings.prefix < 1 and ("always" in needs or encoder and "with an encoder" in needs):
        raise ConfigError(f"bench.prefix={settings.prefix}: a whole model reads a prefix of at least 1 position")
    return settings


def protocol(settings: Settings, device: torch.device) -> dict[str, Any]:
    """How the numbers are measured; the record's environment names the machine."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "dtype": settings.dtype,
        "threads": torch.get_num_threads(),
        "busy_cores_before": busy_cores(),
        "rounds": settings.rounds,
        "warmup": settings.warmup,
        "time": "wall seconds of one run; median, least and most over the rounds, in which the variants take turns; "
        "the device is waited for; cpu_seconds: all threads of the process together"
        if device.type == "cpu"
        else "seconds between two CUDA events around one run, the device's L2 cache written over before; median, least "
        "and most over the rounds, in which the variants take turns; a graph is replayed where `launched` says so",
        "computed_by": "`kernels` of a result: what computed each operation of attention, in the check and in the "
        "runs; no ratio where a fused kernel was timed and not checked on this device",
        **({"utilisation": UTILISATION} if device.type == "cuda" else {}),
        "ratio": "the reference's number by that of the first variant, pair by pair of the same round",
        "memory": PROTOCOL[device.type] if settings.memory else NOT_RUN,
        **{what: workload_type(what).about for what in settings.kinds},
        "check": "against a reference with the same weights in float64, relative norms of differences; "
        "steps: cached steps of reordered hypotheses against the parallel form",
    }


def fill(record: dict[str, Any], settings: Settings) -> None:
    """Fill the record's `inference`, `training` and `kv_cache`, from the last row of `bench` that belongs to each."""
    for row in record["bench"]["rows"]:
        section, first = workload_type(row["what"]).section, next(iter(row["variants"].values()))
        if section is None or NOT_RUN in first:
            continue
        summary = {"seconds": first["seconds"]["median"], "tokens_per_second": first["tokens_per_second"]}
        summary["protocol"] = f"bench, {row['what']}"
        if section == "training":
            record["training"] |= {"steps": 1, **summary}
            continue
        peak = first["peak_memory_mib"]
        record["inference"] |= {
            **summary,
            "peak_memory_mib": peak if isinstance(peak, float) else NOT_RUN,
            "batch": row["batch"],
            "beam": row.get("beam", 1),
            "dtype": settings.dtype,
        }
        record["kv_cache"] |= {f"bytes_{key}": value for key, value in first["cache_bytes"].items()}

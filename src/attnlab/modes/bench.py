"""mode=bench: time and memory with random weights, against references, in one run."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from rich.table import Table

from attnlab.bench import Settings
from attnlab.bench.compare import compare
from attnlab.bench.memory import PROTOCOL
from attnlab.bench.workloads import workload_type
from attnlab.config.build import instantiate
from attnlab.errors import ConfigError
from attnlab.run.console import Screen
from attnlab.run.device import busy_cores, device_of
from attnlab.run.record import NOT_RUN
from attnlab.tasks.base import Task, task_of


def run(cfg: DictConfig, record: dict[str, Any], directory: Path) -> None:
    """Fill `bench` (protocol, checks, a row per shape) and, from its rows, the record's sections."""
    task = task_of(cfg, Task)
    settings = chosen_workloads(cfg, task.workloads, instantiate(cfg.bench))
    device = device_of(cfg)
    measured = protocol(settings, device)
    checks, rows = compare(cfg, settings, device)
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
        raise ConfigError(f"bench.prefix={settings.prefix}: its decoder reads a prefix of at least 1 position")
    return settings


def protocol(settings: Settings, device: torch.device) -> dict[str, Any]:
    """The protocol of the measurement; the environment of the record names the machine."""
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


def show(record: dict[str, Any], directory: Path) -> None:
    """Print the protocol, a line for each variant of each row, and the checks of a record and its run directory."""
    console = Screen(width=None if sys.stdout.isatty() else 150, highlight=False)
    bench = record["bench"]
    chosen = next(iter(bench["rows"][0]["variants"]))
    table = Table(title=f"{chosen} · {_words(bench['protocol'])}")
    for heading in ("shape", "variant"):
        table.add_column(heading, overflow="fold")
    for heading in ("time (least - most)", "tokens/s", "peak MiB", "cache MiB", f"{chosen} faster by", "smaller by"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in bench["rows"]:
        shape = " ".join(f"{key} {value}" for key, value in row.items() if key not in ("what", "variants", "ratios"))
        label = f"{row['what']}  {shape}"
        pairs = {pair["against"]: pair for pair in row["ratios"]}
        for name, result in row["variants"].items():
            table.add_row(label, name, *_cells(result, pairs.get(name)))
            label = ""
        table.add_section()
    console.print(table)
    for row in bench["rows"]:
        for pair in row["ratios"]:
            if NOT_RUN in pair:
                console.print(f"{row['what']}: no ratio of {pair['of']} against {pair['against']}: {pair[NOT_RUN]}")
    for name, result in bench["checks"].items():
        if NOT_RUN in result:
            console.print(f"no check of {name}: {result[NOT_RUN]}")
        elif result:
            errors = _words({key: value for key, value in result.items() if key not in ("kernels", "reference")})
            console.print(f"check of {name} against its {result.get('reference', 'reference')}: {errors}")
    console.print(f"record: {directory / 'record.json'}", soft_wrap=True)


def _cells(result: dict[str, Any], pair: dict[str, Any] | None) -> list[str]:
    if NOT_RUN in result:
        return [NOT_RUN, "", "", "", "", ""]
    time, peak, cache = result["seconds"], result["peak_memory_mib"], result.get("cache_bytes")
    read = f"\n{result['times_read']:.2f}x the read of its bytes" if "times_read" in result else ""
    cells = [
        f"{1e3 * time['median']:.4g} ms ({1e3 * time['min']:.3g} - {1e3 * time['max']:.3g}){read}",
        f"{result['tokens_per_second']:.4g}",
        f"{peak:.4g}" if isinstance(peak, float) else NOT_RUN,
        f"{cache['measured'] / 2**20:.3g}" if cache else "",
    ]
    if pair is None or NOT_RUN in pair:
        return [*cells, "", "" if pair is None else NOT_RUN]
    faster = pair["seconds"]
    smaller = [f"{pair[key]:.2f}x {word}" for key, word in (("cache", "cache"), ("peak_memory", "peak")) if key in pair]
    times = f"{faster['median']:.2f}x ({faster['min']:.2f} - {faster['max']:.2f})"
    if "cpu_seconds" in pair:
        times += f"\ncpu {pair['cpu_seconds']['median']:.2f}x"
    return [*cells, times, "\n".join(smaller)]


def _words(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items() if not isinstance(value, str) or len(value) < 40)

"""One row of the table: several variants of one shape, measured in turns, and what may be said of their ratios."""

import gc
from collections.abc import Callable
from typing import Any

import torch

from attnlab.bench.exactness import failures
from attnlab.bench.memory import peak_mib, shortage
from attnlab.bench.settings import Settings, Shape, rounded, summary
from attnlab.bench.variants import Variant
from attnlab.bench.workloads import Workload, timed, workload

NOT_RUN = "not run"


def measure(
    variants: list[Variant],
    shape: Shape,
    settings: Settings,
    device: torch.device,
    checks: dict[str, dict[str, Any]],
    advance: Callable[[int], None],
) -> dict[str, Any]:
    """Time and memory of each variant, and ratios of the first one against the others.

    Rounds are interleaved, every second one backwards, so that a change of the machine's speed meets all alike; a
    ratio is the median over rounds of that round's pair.  `advance` is called with the number of runs done.
    """
    works, found = _build(variants, shape, settings, device)
    advance((settings.warmup + settings.rounds + settings.memory) * len(found))
    gc.collect()  # slow; `timed` keeps it out of the measurements
    times: dict[str, list[dict[str, float]]] = {name: [] for name in works}
    for number in range(settings.warmup + settings.rounds):
        for name in list(works)[:: -1 if number % 2 else 1]:
            try:
                once = timed(works[name], device)
            except torch.OutOfMemoryError as error:  # CUDA's; on a CPU the estimate above must do
                found[name] = {NOT_RUN: str(error).splitlines()[0]}
                del works[name], times[name]
                continue
            if number >= settings.warmup:
                times[name].append(once)
            advance(1)
    found |= {name: _result(times[name], works[name], shape) for name in works}
    works.clear()  # before other processes want the memory
    if device.type == "cuda":
        torch.cuda.empty_cache()
    for variant in variants:
        if settings.memory and variant.name in times:
            found[variant.name]["peak_memory_mib"] = peak_mib(variant, shape, settings.dtype, device)
            advance(1)
    names = [variant.name for variant in variants]
    return shape.describe() | {
        "variants": {name: found[name] for name in names},
        "ratios": [_ratio(names[0], other, found, times, checks, shape) for other in names[1:]],
    }


def _build(
    variants: list[Variant], shape: Shape, settings: Settings, device: torch.device
) -> tuple[dict[str, Workload], dict[str, dict[str, Any]]]:
    """What can be measured, and why the rest cannot."""
    works: dict[str, Workload] = {}
    found: dict[str, dict[str, Any]] = {}
    for variant in variants:
        try:
            work = workload(variant, shape, getattr(torch, settings.dtype), device)
            reason = shortage(work, shape, device)
        except LookupError as error:
            reason = str(error)
        if reason:
            found[variant.name] = {NOT_RUN: reason}
        else:
            works[variant.name] = work
    return works, found


def _result(times: list[dict[str, float]], work: Workload, shape: Shape) -> dict[str, Any]:
    found: dict[str, Any] = {name: summary([once[name] for once in times]) for name in times[0]}
    if shape.what != "decoding":
        del found["prepare_seconds"]  # of interest only where it reads the prefix
    found["tokens_per_second"] = rounded(shape.tokens / found["seconds"]["median"])
    found["peak_memory_mib"] = NOT_RUN
    if (cache := work.cache_bytes()) is not None:
        found["cache_bytes"] = cache
    return found


def _ratio(
    ours: str,
    other: str,
    found: dict[str, dict[str, Any]],
    times: dict[str, list[dict[str, float]]],
    checks: dict[str, dict[str, Any]],
    shape: Shape,
) -> dict[str, Any]:
    """How many times the other one's time, memory and cache are ours; or why nothing can be said."""
    pair: dict[str, Any] = {"of": ours, "against": other}
    for name in (ours, other):
        wrong = checks[name].get(NOT_RUN) or ", ".join(failures(checks[name], shape.what))
        reason = found[name].get(NOT_RUN) or (wrong and f"{name} was not found equal to the published form: {wrong}")
        if reason:
            return pair | {NOT_RUN: reason}
    for key in ("seconds", "cpu_seconds"):
        if key in times[ours][0]:
            turns = zip(times[other], times[ours], strict=True)
            pair[key] = summary([theirs[key] / mine[key] for theirs, mine in turns])
    mine, theirs = found[ours], found[other]
    if isinstance(mine["peak_memory_mib"], float) and isinstance(theirs["peak_memory_mib"], float):
        pair["peak_memory"] = rounded(theirs["peak_memory_mib"] / max(mine["peak_memory_mib"], 1e-3))
    if "cache_bytes" in mine:
        pair["cache"] = rounded(theirs["cache_bytes"]["measured"] / mine["cache_bytes"]["measured"])
    return pair

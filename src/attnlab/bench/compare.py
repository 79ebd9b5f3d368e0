"""The measuring loop: several variants of one shape, measured in turns, and the ratios that may be reported."""

import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig

from attnlab.bench.memory import peak_mib, shortage
from attnlab.bench.settings import Settings, Shape, rounded, summary
from attnlab.bench.workloads import Variant, Workload, workload_type
from attnlab.runs.record import NOT_RUN


def compare(
    cfg: DictConfig,
    settings: Settings,
    device: torch.device,
    begin: Callable[[int], None],
    advance: Callable[[str, int], None],
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Measure every workload of the settings.

    Args:
        cfg: the run's configuration.
        settings: its `bench` node.
        device: where the variants run.
        begin: called once with the number of runs.
        advance: called with a row's name and how many runs are done.

    Returns:
        The checks by variant, and a row for each workload and shape.
    """
    dtype = getattr(torch, settings.dtype)
    kinds = [workload_type(what) for what in settings.kinds]
    lineups = {what: kind.lineup(cfg, settings) for what, kind in zip(settings.kinds, kinds, strict=True)}
    checks: dict[str, dict[str, Any]] = {}
    for kind, variants in zip(kinds, lineups.values(), strict=True):
        for variant in variants:
            if variant.name not in checks:
                try:
                    checks[variant.name] = kind.check(variant, settings, dtype, device)
                except LookupError as error:
                    checks[variant.name] = {NOT_RUN: str(error)}
    shapes = [shape for kind in kinds for shape in kind.shapes(cfg, settings)]
    begin((settings.warmup + settings.rounds + settings.memory) * sum(len(lineups[shape.what]) for shape in shapes))
    rows = []
    for shape in shapes:
        done = partial(advance, f"{shape.what} {shape.text}")
        rows.append(measure(lineups[shape.what], shape, settings, device, checks, done))
    return checks, rows


def measure(
    variants: Sequence[Variant],
    shape: Shape,
    settings: Settings,
    device: torch.device,
    checks: dict[str, dict[str, Any]],
    advance: Callable[[int], None],
) -> dict[str, Any]:
    """A row: time and memory of each variant, and ratios of the first one against the others.

    Rounds are interleaved, every second one backwards, so that a change of the machine's speed affects all variants
    alike. A ratio is the median over rounds of that round's pair.

    Args:
        variants: what is compared, the run's own first.
        shape: the row.
        settings: how often to measure.
        device: where.
        checks: by variant, as `Workload.check` gives them.
        advance: called with the number of runs done.
    """
    works, found = _build(variants, shape, settings, device)
    advance((settings.warmup + settings.rounds + settings.memory) * len(found))
    gc.collect()  # slow; `timed` keeps it out of the measurements
    times: dict[str, list[dict[str, float]]] = {name: [] for name in works}
    for number in range(settings.warmup + settings.rounds):
        for name in list(works)[:: -1 if number % 2 else 1]:
            try:
                once = timed(works[name], device)
            except torch.OutOfMemoryError as error:  # CUDA's; on a CPU `shortage` must do
                found[name] = {NOT_RUN: str(error).splitlines()[0]}
                del works[name], times[name]
                continue
            if number >= settings.warmup:
                times[name].append(once)
            advance(1)
    found |= {name: _result(times[name], works[name], shape) for name in works}
    works.clear()  # before other processes need the memory
    if device.type == "cuda":
        torch.cuda.empty_cache()
    for variant in variants:
        if settings.memory and variant.name in times:
            found[variant.name]["peak_memory_mib"] = peak_mib(variant, shape, settings.dtype, device)
            advance(1)
    kind = workload_type(shape.what)
    names = [variant.name for variant in variants]
    return {
        "what": shape.what,
        "batch": shape.batch,
        **kind.describe(shape),
        **kind.facts(variants, shape, checks),
        "variants": {name: found[name] for name in names},
        "ratios": [_ratio(names[0], other, found, times, checks, shape) for other in names[1:]],
    }


def timed(work: Workload, device: torch.device) -> dict[str, float]:
    """Seconds of one run and of its preparation; on a CPU also CPU seconds of all threads together.

    Args:
        work: what runs, once.
        device: where it runs; it is waited for.
    """
    gc.disable()
    try:
        _wait(device)
        began = time.perf_counter()
        work.prepare()
        _wait(device)
        ready, used = time.perf_counter(), time.process_time()
        work.run()
        _wait(device)
        found = {"prepare_seconds": ready - began, "seconds": time.perf_counter() - ready}
        if (own := work.device_seconds()) is not None:
            found["seconds"] = own
        if device.type == "cpu":
            found["cpu_seconds"] = time.process_time() - used
        return found
    finally:
        gc.enable()


def failures(result: dict[str, Any], what: str) -> list[str]:
    """The errors that a time of this workload rests on and that are too large or not numbers.

    A result without them belongs to a variant that has nothing to be compared with.

    Args:
        result: what was measured of one variant.
        what: the workload.
    """
    names = [name for name in workload_type(what).checked if name in result]
    return [f"{name} off by {result[name]:g}" for name in names if not result[name] <= result["tolerance"]]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _build(
    variants: Sequence[Variant], shape: Shape, settings: Settings, device: torch.device
) -> tuple[dict[str, Workload], dict[str, dict[str, Any]]]:
    """What can be measured, and why the rest cannot."""
    works: dict[str, Workload] = {}
    found: dict[str, dict[str, Any]] = {}
    for variant in variants:
        try:
            work = workload_type(shape.what)(variant, shape, getattr(torch, settings.dtype), device)
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
    found |= work.rates(found["seconds"]["median"])
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
    """How many times the other one's time, memory and cache are ours, or why this cannot be reported."""
    pair: dict[str, Any] = {"of": ours, "against": other}
    for name in (ours, other):
        wrong = checks[name].get(NOT_RUN) or ", ".join(failures(checks[name], shape.what))
        reason = found[name].get(NOT_RUN) or (wrong and f"{name} was not found equal to its reference: {wrong}")
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

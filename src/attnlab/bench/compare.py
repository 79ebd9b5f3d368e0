"""The measuring loop: several variants of one shape, measured in turns, and the ratios that may be reported."""

import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig

from attnlab.attention.ops.backends import noting, used
from attnlab.bench import utilisation
from attnlab.bench.memory import peak_mib, shortage
from attnlab.bench.settings import Settings, Shape, rounded, summary
from attnlab.bench.workloads import Variant, Workload, workload_type
from attnlab.run.record import NOT_RUN


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
        advance: called with what is done now, and how many runs were done since the last call.

    Returns:
        The checks by variant, and a row for each workload and shape.
    """
    dtype = getattr(torch, settings.dtype)
    kinds = [workload_type(what) for what in settings.kinds]
    lineups = {what: kind.lineup(cfg, settings) for what, kind in zip(settings.kinds, kinds, strict=True)}
    checks: dict[str, dict[str, Any]] = {}
    for kind, variants in zip(kinds, lineups.values(), strict=True):
        for variant in variants:
            if NOT_RUN in checks.get(variant.name, {NOT_RUN: ""}):
                advance(f"checking {variant.name}", 0)
                with noting() as pairs:
                    try:
                        _refuse_compiled(variant, kind)
                        checks[variant.name] = kind.check(variant, settings, dtype, device)
                    except LookupError as error:
                        checks[variant.name] = {NOT_RUN: str(error)}
                if pairs and checks[variant.name]:
                    checks[variant.name]["kernels"] = used(pairs)
    shapes = [shape for kind in kinds for shape in kind.shapes(cfg, settings)]
    begin((settings.warmup + settings.rounds + settings.memory) * sum(len(lineups[shape.what]) for shape in shapes))
    rows = []
    for shape in shapes:
        done = partial(advance, f"measuring {shape.what} {shape.text}")
        done(0)
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
    kernels: dict[str, set[tuple[str, str]]] = {variant.name: set() for variant in variants}
    works, found = _build(variants, shape, settings, device, kernels)
    advance((settings.warmup + settings.rounds + settings.memory) * len(found))
    gc.collect()  # slow; `timed` keeps it out of the measurements
    times: dict[str, list[dict[str, float]]] = {name: [] for name in works}
    for number in range(settings.warmup + settings.rounds):
        for name in list(works)[:: -1 if number % 2 else 1]:
            try:
                with noting() as pairs:
                    once = timed(works[name], device)
                kernels[name] |= pairs
            except torch.OutOfMemoryError as error:  # CUDA's; on a CPU `shortage` must do
                found[name] = {NOT_RUN: str(error).splitlines()[0]}
                del works[name], times[name]
                continue
            if number >= settings.warmup:
                times[name].append(once)
            advance(1)
    for name, work in works.items():
        found[name] = _result(times[name], work, shape)
        if by := used(kernels[name]):
            found[name]["kernels"] = by
        if device.type == "cuda":
            found[name] |= _used_of(device, work, settings.dtype, found[name])
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

    On CUDA the run's seconds are those between two events of the device, after its cache was written over.

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
        ready, cpu = time.perf_counter(), time.process_time()
        if device.type == "cuda":
            utilisation.flush(device)
            with utilisation.events(device) as seconds:
                work.run()
            return {"prepare_seconds": ready - began, "seconds": seconds[0]}
        work.run()
        _wait(device)
        found = {"prepare_seconds": ready - began, "seconds": time.perf_counter() - ready}
        if device.type == "cpu":
            found["cpu_seconds"] = time.process_time() - cpu
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
    variants: Sequence[Variant],
    shape: Shape,
    settings: Settings,
    device: torch.device,
    kernels: dict[str, set[tuple[str, str]]],
) -> tuple[dict[str, Workload], dict[str, dict[str, Any]]]:
    """What can be measured, and why the rest cannot."""
    works: dict[str, Workload] = {}
    found: dict[str, dict[str, Any]] = {}
    for variant in variants:
        try:
            kind = workload_type(shape.what)
            _refuse_compiled(variant, kind)
            with noting() as kernels[variant.name]:  # of what is captured now and replayed later
                work = kind(variant, shape, getattr(torch, settings.dtype), device)
            reason = shortage(work, shape, device)
        except (LookupError, torch.OutOfMemoryError) as error:
            reason = str(error).splitlines()[0]
        if reason:
            found[variant.name] = {NOT_RUN: reason}
        else:
            works[variant.name] = work
    return works, found


def _refuse_compiled(variant: Variant, kind: type[Workload]) -> None:
    """LookupError: a variant with compiled steps in a workload that takes none; compiling them for a check is slow."""
    if getattr(variant, "compiled", False) and not kind.steps:
        raise LookupError("this workload takes no decoding steps that are compiled: bench.what=decoding does")


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


def _used_of(device: torch.device, work: Workload, dtype: str, found: dict[str, Any]) -> dict[str, Any]:
    """How the host launches a run, and how much of a CUDA device it uses."""
    operations = None if work.captured else utilisation.operations_of(work, found.get("kernels", {}))
    name, seconds = torch.cuda.get_device_name(device), found["seconds"]["median"]
    launched = "replayed CUDA graph" if work.captured else "no CUDA graph"
    return {"launched": launched, **utilisation.utilisation(name, dtype, seconds, operations, work.bytes_read())}


def unchecked(check: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """The fused kernels that computed a run and not its check: what they compute was not found exact on this device.

    SDPA, which is torch's own, and plain products are no such kernels. Neither is anything where the check or the run
    notes nothing, as published algorithms do.

    Args:
        check: of the variant, with `kernels`.
        found: the variant's result, with `kernels`.
    """
    if "kernels" not in check or "kernels" not in found:
        return []
    pairs = [(operation, name) for operation, names in found["kernels"].items() for name in names]
    stock = ("SDPA", "PLAIN")
    return [f"{name} ({operation})" for operation, name in pairs if not name.startswith(stock)
            and name not in check["kernels"].get(operation, [])]  # fmt: skip


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
        if not reason and (others := unchecked(checks[name], found[name])):
            reason = f"{name} was computed by {', '.join(others)}, which its check has not gone through"
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

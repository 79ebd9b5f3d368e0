"""The measuring loop. The variants of a shape take turns, and only checked variants get ratios."""

import gc
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from omegaconf import DictConfig

from attnlab.attention.ops.backends import noting, used
from attnlab.bench.memory import peak_mib, shortage
from attnlab.bench.settings import Settings, Shape, rounded, summary
from attnlab.bench.variants import Variant
from attnlab.bench.workloads import AttentionWorkload, Workload, workload_type
from attnlab.run.console import progress
from attnlab.run.record import NOT_RUN


def compare(
    cfg: DictConfig, settings: Settings, device: torch.device
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Check and measure all variants: the checks by name of the variant, and a row for each workload and shape."""
    dtype = getattr(torch, settings.dtype)
    kinds = [workload_type(what) for what in settings.kinds]
    lineups = {what: kind.lineup(cfg, settings) for what, kind in zip(settings.kinds, kinds, strict=True)}
    checks: dict[str, dict[str, Any]] = {}
    rows = []
    with progress("checking", None) as advance:
        for kind, variants in zip(kinds, lineups.values(), strict=True):
            for variant in variants:
                missing = NOT_RUN in checks.get(variant.name, {NOT_RUN: ""})
                if missing or not issubclass(kind, AttentionWorkload):  # a mechanism is checked once for all workloads
                    advance(0, what=f"checking {variant.name}")
                    check = _checked(variant, kind, settings, dtype, device)
                    if missing or failures(check, kind.what):
                        checks[variant.name] = check
        shapes = [shape for kind in kinds for shape in kind.shapes(cfg, settings)]
        runs = settings.warmup + settings.rounds + settings.memory
        advance(0, total=runs * sum(len(lineups[shape.what]) for shape in shapes))
        for shape in shapes:
            advance(0, what=f"measuring {shape.what} {shape.text}")
            rows.append(measure(lineups[shape.what], shape, settings, device, checks, advance))
    return checks, rows


def _checked(
    variant: Variant, kind: type[Workload], settings: Settings, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Errors of a variant, and the kernels that computed it."""
    with noting() as pairs:
        try:
            _refuse_compiled(variant, kind)
            errors = kind.check(variant, settings, dtype, device)
        except LookupError as error:
            errors = {NOT_RUN: str(error)}
    return errors | {"kernels": used(pairs)} if pairs and errors else errors


def measure(
    variants: Sequence[Variant],
    shape: Shape,
    settings: Settings,
    device: torch.device,
    checks: dict[str, dict[str, Any]],
    advance: Callable[[int], None],
) -> dict[str, Any]:
    """Measure a row: time and memory of each variant, and ratios of the first one to the others.

    Rounds are interleaved, every second one in reverse order, so that a change in the machine's speed affects all
    variants alike. A ratio is the median of the ratios of all rounds.
    """
    kernels: dict[str, set[tuple[str, str]]] = {variant.name: set() for variant in variants}
    works, results = _build(variants, shape, settings, device, kernels)
    advance((settings.warmup + settings.rounds + settings.memory) * len(results))
    gc.collect()  # slow; `timed` keeps it out of the measurements
    times: dict[str, list[dict[str, float]]] = {name: [] for name in works}
    for number in range(settings.warmup + settings.rounds):
        for name in list(works)[:: -1 if number % 2 else 1]:
            try:
                with noting() as pairs:
                    once = timed(works[name], device)
                kernels[name] |= pairs
            except torch.OutOfMemoryError as error:  # on CUDA; on a CPU `shortage` predicts it
                results[name] = {NOT_RUN: str(error).splitlines()[0]}
                del works[name], times[name]
                continue
            if number >= settings.warmup:
                times[name].append(once)
            advance(1)
    for name, work in works.items():
        results[name] = _result(times[name], work, shape)
        if by := used(kernels[name]):
            results[name]["kernels"] = by
        if device.type == "cuda":
            results[name]["launched"] = "replayed CUDA graph" if work.captured else "no CUDA graph"
    works.clear()  # frees memory for other processes
    if device.type == "cuda":
        torch.cuda.empty_cache()
    for variant in variants:
        if settings.memory and variant.name in times:
            results[variant.name]["peak_memory_mib"] = peak_mib(variant, shape, settings.dtype, device)
            advance(1)
    kind = workload_type(shape.what)
    names = [variant.name for variant in variants]
    return {
        "what": shape.what,
        "batch": shape.batch,
        **{key: getattr(shape, name) for key, name in kind.keys.items()},
        **kind.facts(variants, shape, checks),
        "variants": {name: results[name] for name in names},
        "ratios": [_ratio(names[0], other, results, times, checks, shape) for other in names[1:]],
    }


def timed(work: Workload, device: torch.device) -> dict[str, float]:
    """Seconds of one run and of its preparation; on a CPU also CPU seconds of all threads.

    On CUDA the run is timed by two events of the device, after its L2 cache was overwritten.
    """
    gc.disable()
    try:
        _wait(device)
        began = time.perf_counter()
        work.prepare()
        _wait(device)
        ready, cpu = time.perf_counter(), time.process_time()
        if device.type == "cuda":
            _other(device).zero_()  # evicts the L2 cache
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record(torch.cuda.current_stream(device))
            work.run()
            ended.record(torch.cuda.current_stream(device))
            ended.synchronize()
            return {"prepare_seconds": ready - began, "seconds": begun.elapsed_time(ended) / 1000}
        work.run()
        _wait(device)
        times = {"prepare_seconds": ready - began, "seconds": time.perf_counter() - ready}
        if device.type == "cpu":
            times["cpu_seconds"] = time.process_time() - cpu
        return times
    finally:
        gc.enable()


def failures(result: dict[str, Any], what: str) -> list[str]:
    """Errors of `Workload.check` that invalidate a time of this workload: above the tolerance, or NaN."""
    names = [name for name in workload_type(what).checked if name in result]
    return [f"{name} off by {result[name]:g}" for name in names if not result[name] <= result["tolerance"]]


@cache
def _other(device: torch.device) -> torch.Tensor:
    """A tensor of twice the size of a CUDA device's L2 cache."""
    size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
    return torch.empty(size, dtype=torch.uint8, device=device)


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
    """Workloads that can be measured, and the results of the others."""
    works: dict[str, Workload] = {}
    refused: dict[str, dict[str, Any]] = {}
    for variant in variants:
        try:
            kind = workload_type(shape.what)
            _refuse_compiled(variant, kind)
            with noting() as kernels[variant.name]:  # includes kernels that are captured now and replayed later
                work = kind(variant, shape, getattr(torch, settings.dtype), device)
            reason = shortage(work, shape, device)
        except (LookupError, torch.OutOfMemoryError) as error:
            reason = str(error).splitlines()[0]
        if reason:
            refused[variant.name] = {NOT_RUN: reason}
        else:
            works[variant.name] = work
    return works, refused


def _refuse_compiled(variant: Variant, kind: type[Workload]) -> None:
    """LookupError: a variant with compiled steps in a workload without decoding steps."""
    if getattr(variant, "compiled", False) and not kind.steps:
        raise LookupError("this workload takes no decoding steps that are compiled: bench.what=decoding does")


def _result(times: list[dict[str, float]], work: Workload, shape: Shape) -> dict[str, Any]:
    result: dict[str, Any] = {name: summary([once[name] for once in times]) for name in times[0]}
    if shape.what != "decoding":
        del result["prepare_seconds"]  # only decoding reads the prefix in it
    result["tokens_per_second"] = rounded(shape.tokens / result["seconds"]["median"])
    result["peak_memory_mib"] = NOT_RUN
    result |= work.rates(result["seconds"]["median"])
    if (cache := work.cache_bytes()) is not None:
        result["cache_bytes"] = cache
    return result


def unchecked(check: dict[str, Any], result: dict[str, Any]) -> list[str]:
    """Fused kernels that computed a run but not its check, and were therefore not compared on this device.

    torch's SDPA and plain products need no check. Published algorithms do not record kernels.
    """
    if "kernels" not in check or "kernels" not in result:
        return []
    pairs = [(operation, name) for operation, names in result["kernels"].items() for name in names]
    stock = ("SDPA", "PLAIN")
    return [f"{name} ({operation})" for operation, name in pairs if not name.startswith(stock)
            and name not in check["kernels"].get(operation, [])]  # fmt: skip


def _ratio(
    chosen: str,
    other: str,
    results: dict[str, dict[str, Any]],
    times: dict[str, list[dict[str, float]]],
    checks: dict[str, dict[str, Any]],
    shape: Shape,
) -> dict[str, Any]:
    """Time, memory and cache of the other variant divided by those of the first one, or the reason for no ratio."""
    pair: dict[str, Any] = {"of": chosen, "against": other}
    for name in (chosen, other):
        wrong = checks[name].get(NOT_RUN) or ", ".join(failures(checks[name], shape.what))
        reason = results[name].get(NOT_RUN) or (wrong and f"{name} was not found equal to its reference: {wrong}")
        if not reason and (kernels := unchecked(checks[name], results[name])):
            reason = f"{name} was computed by {', '.join(kernels)}, which its check has not gone through"
        if reason:
            return pair | {NOT_RUN: reason}
    for key in ("seconds", "cpu_seconds"):
        if key in times[chosen][0]:
            turns = zip(times[other], times[chosen], strict=True)
            pair[key] = summary([slow[key] / fast[key] for slow, fast in turns])
    result, reference = results[chosen], results[other]
    if isinstance(result["peak_memory_mib"], float) and isinstance(reference["peak_memory_mib"], float):
        pair["peak_memory"] = rounded(reference["peak_memory_mib"] / max(result["peak_memory_mib"], 1e-3))
    if "cache_bytes" in result:
        pair["cache"] = rounded(reference["cache_bytes"]["measured"] / result["cache_bytes"]["measured"])
    return pair

"""mode=bench: time and memory with random weights, against references, in one run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from attnlab.bench import Settings
from attnlab.bench.compare import NOT_RUN, measure
from attnlab.bench.exactness import check
from attnlab.bench.memory import PROTOCOL
from attnlab.bench.settings import Shape, shapes
from attnlab.bench.show import progress, show
from attnlab.bench.variants import Variant, copied, lineup, publish_by
from attnlab.config.build import instantiate
from attnlab.errors import ConfigError
from attnlab.runs.device import busy_cores, device_of
from attnlab.tasks.base import task_of


def run(cfg: DictConfig, record: dict[str, Any], directory: Path) -> None:
    """Fills `bench` (protocol, checks, a row per shape), and from its rows what the record's sections ask."""
    settings: Settings = instantiate(cfg.bench)
    task = task_of(cfg)
    if task.workloads == ("forward",):
        task.bench(record, directory, settings)
        return
    settings = with_kinds(cfg, task.workloads, settings)
    device, dtype = device_of(cfg), getattr(torch, settings.dtype)
    publish = publish_by(settings.published)
    variants = lineup(cfg, settings)
    chosen = variants[0]
    rows: list[dict[str, Any]] = []
    checks: dict[str, dict[str, Any]] = {}
    record["bench"] = {"protocol": protocol(settings, device), "checks": checks, "rows": rows}

    every = [chosen, copied(chosen), *variants[1:]] if "beam" in settings.kinds else variants
    for variant in every:
        try:
            checks[variant.name] = check(variant, publish, dtype, device)
        except LookupError as error:
            checks[variant.name] = {NOT_RUN: str(error)}

    def present(shape: Shape) -> list[Variant]:
        return [variant for variant in every if shape.what == "beam" or not variant.copied]

    runs = settings.warmup + settings.rounds + settings.memory
    with progress() as bar:
        line = bar.add_task("", total=runs * sum(len(present(shape)) for shape in shapes(settings)))
        for shape in shapes(settings):
            bar.update(line, description=f"{shape.what} {shape.text}")
            rows.append(measure(present(shape), shape, settings, device, checks, lambda done: bar.advance(line, done)))
    record["corpus"] = "none: random inputs"
    task.describe(record)
    fill(record, settings)
    show(record, directory)


def with_kinds(cfg: DictConfig, workloads: tuple[str, ...], settings: Settings) -> Settings:
    """`settings` with bench.what filled in.  ConfigError: bench.what names a workload that the task does not have."""
    if settings.what is None:
        settings = replace(settings, what=list(workloads[:3]))
    if missing := set(settings.kinds) - set(workloads):
        raise ConfigError(
            f"bench.what={missing.pop()} cannot measure the model of task={cfg.choices.task}: "
            f"give bench.what=[{','.join(workloads)}]"
        )
    reading = {"beam", "model"} if OmegaConf.select(cfg, "task.model.encoder") else {"beam"}
    if settings.prefix < 1 and reading & set(settings.kinds):
        raise ConfigError(f"bench.prefix={settings.prefix}: a whole model reads a prefix of at least 1 position")
    return settings


def protocol(settings: Settings, device: torch.device) -> dict[str, Any]:
    """How the numbers came about.  The record's environment says on what."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "dtype": settings.dtype,
        "threads": torch.get_num_threads(),
        "busy_cores_before": busy_cores(),
        "rounds": settings.rounds,
        "warmup": settings.warmup,
        "time": "wall seconds of one run; median, least and most over the rounds, in which the variants take turns; "
        "the device is waited for; cpu_seconds: all threads of the process together",
        "ratio": "the reference's number by the mechanism's, pair by pair of the same round",
        "memory": PROTOCOL[device.type] if settings.memory else NOT_RUN,
        "training": "one attention layer: forward and backward, gradients of inputs and weights; no dropout; "
        "keys of `prefix` positions before the text",
        "model": "the task's model: inputs to loss and back; no dropout, no optimizer; an encoder gives "
        "`prefix` positions",
        "decoding": "one attention layer, one token a call, after the prefix, `context` positions "
        "of text (the cache filled at random) and a first token (prepare_seconds)",
        "beam": "the task's decoder: the prefix is read, then every hypothesis goes on for `steps` tokens and </s>",
        "check": "against the published algorithm in float64 with the same weights, relative norms of differences; "
        "steps: cached steps of reordered hypotheses against the parallel form",
    }


def fill(record: dict[str, Any], settings: Settings) -> None:
    """The record's sections, from the last row that has to do with each."""
    for row in record["bench"]["rows"]:
        found = row["variants"][record["attention"]]
        if NOT_RUN in found:
            continue
        summary = {"seconds": found["seconds"]["median"], "tokens_per_second": found["tokens_per_second"]}
        if row["what"] in ("training", "model"):
            record["training"] |= {"steps": 1, **summary, "protocol": f"bench, {row['what']}"}
            continue
        peak = found["peak_memory_mib"]
        record["inference"] |= {
            **summary,
            "peak_memory_mib": peak if isinstance(peak, float) else NOT_RUN,
            "batch": row["batch"],
            "beam": row.get("beam", 1),
            "dtype": settings.dtype,
            "protocol": f"bench, {row['what']}",
        }
        record["kv_cache"] |= {f"bytes_{key}": value for key, value in found["cache_bytes"].items()}

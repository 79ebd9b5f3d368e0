"""Shared code for tasks whose models write text token by token."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from attnlab.attention import Attention
from attnlab.models.build import CacheShape, cache_shape, count_parameters, without_memory
from attnlab.run import record as records
from attnlab.tasks.base import Trains

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback

    from attnlab.callbacks.contribution import Sections
    from attnlab.callbacks.memory import MemoryMeter


class CachedDecoder(Protocol):
    """The part of a model that decodes through caches."""

    @property
    def attentions(self) -> list[Attention]: ...

    def multiply_adds(self, context: int, prefix: int = 0) -> int: ...


class TextTask(Trains):
    """A task whose model writes text token by token through the caches of its attention."""

    @property
    def workloads(self) -> tuple[str, ...]:
        return ("training", "decoding", "model", "kernels")

    @abstractmethod
    def decoder(self, model: Any) -> CachedDecoder:
        """The part of `model` that decodes through caches."""

    def cached(self, model: Any) -> list[Attention]:
        return self.decoder(model).attentions

    def cache_bytes(self, decoder: Any, shape: CacheShape) -> int:
        """Of the caches of one decoding batch, over all layers."""
        size = shape.batch * shape.beam, shape.text, shape.prefix, shape.batch
        return sum(a.cache_bytes(*size, dtype=shape.dtype) for a in decoder.attentions)

    def describe(self, record: dict[str, Any]) -> None:
        """Fill `parameters`, `kv_cache` and `multiply_adds_per_token` from the configuration alone.

        Cache bytes and multiply-adds are those of one decoding batch with the shape of the `bench` node: batch x beam
        hypotheses of `text` tokens after a prefix of `prefix` positions (the encoder's output).
        """
        with without_memory():
            model = self.build()
        decoder = self.decoder(model)
        shape = cache_shape(self.cfg.bench)
        context = shape.prefix + shape.text
        record["parameters"] = count_parameters(model)
        record["kv_cache"] |= self.cache_sizes(decoder, shape) | {"shape": shape.describe()}
        record["multiply_adds_per_token"] = {
            "attention": sum(a.multiply_adds(context, shape.prefix) for a in decoder.attentions),
            "decoder": decoder.multiply_adds(context, shape.prefix),
            "context": context,
        }

    def cache_sizes(self, decoder: Any, shape: CacheShape) -> dict[str, float]:
        """The predicted cache of a decoding batch, for the record."""
        return {
            "elements_per_token_per_layer": per_layer(decoder.attentions),
            "bytes_per_token": sum(a.cache_elements_per_token for a in decoder.attentions) * shape.dtype.itemsize,
            "bytes_predicted": self.cache_bytes(decoder, shape),
        }

    def sizes(self, record: dict[str, Any], model: Any) -> None:
        super().sizes(record, model)
        record["kv_cache"]["elements_per_token_per_layer"] = per_layer(self.decoder(model).attentions)

    def score(self, record: dict[str, Any], directory: Path, data: Any, module: Any) -> None:
        """By `trainer.test`, spread over all processes."""
        from attnlab.callbacks.summary import show

        sections = self.scored(directory, data, module)
        if sections:
            for section, values in sections.items():
                record[section] |= values
            self.after_scoring(record, directory, data, module)
            self.compare(record)
            show(record, directory)

    def scored(self, directory: Path, data: Any, module: Any) -> Sections:
        """What the callbacks of :meth:`scoring` contribute, on rank zero; {} on other processes."""
        from attnlab.callbacks.contribution import contributions
        from attnlab.training.trainer import test

        callbacks = self.scoring(directory, data, module)
        complete = test(self.cfg, data, module, callbacks)
        return contributions(callbacks) if complete and records.first_process() else {}

    @abstractmethod
    def scoring(self, directory: Path, data: Any, module: Any) -> list[Callback]:
        """The callbacks of `trainer.test`, which score, measure, and contribute sections of the record."""

    def after_scoring(self, record: dict[str, Any], directory: Path, data: Any, module: Any) -> None:
        """What rank zero does between scoring and the summary."""


def per_layer(attentions: list[Attention]) -> float:
    """Cached numbers per token and layer, the mean over layers; an int where all layers have the same."""
    counts = [a.cache_elements_per_token for a in attentions]
    return counts[0] if len(set(counts)) == 1 else sum(counts) / len(counts)


def measured_by(meter: MemoryMeter, batch: int, dtype: torch.dtype, busy: float, protocol: str) -> dict[str, Any]:
    """Memory and circumstances of steps through caches, for the record's `inference`; `busy`: cores busy before."""
    return {
        "peak_memory_mib": round(meter.peak, 1),
        "mean_memory_mib": round(meter.mean, 1),
        "batch": batch,
        "beam": 1,
        "dtype": str(dtype).removeprefix("torch."),
        "busy_cores_before": busy,
        "protocol": f"{protocol}; {meter.protocol}",
    }

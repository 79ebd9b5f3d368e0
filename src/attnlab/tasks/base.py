"""What a kind of task answers to the modes: named by `task.flow`, called by train, test, describe and bench.

What only training and scoring need is imported there: Lightning takes seconds, and describing needs none of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from omegaconf import DictConfig
from torch import nn

from attnlab.attention import Attention
from attnlab.bench import Settings
from attnlab.config.build import instantiate
from attnlab.models.build import CacheShape, cache_shape, count_parameters, without_memory

if TYPE_CHECKING:
    from attnlab.data.base import TaskData
    from attnlab.training.module import Trainable


class Decoder(Protocol):
    """The part of a model that decodes through caches."""

    @property
    def attentions(self) -> list[Attention]: ...

    def multiply_adds(self, context: int) -> int: ...


class Flow(ABC):
    """One kind of task, from its config to its numbers."""

    monitor: ClassVar[str] = "val_accuracy"  # what the best checkpoints are chosen by
    better: ClassVar[Literal["min", "max"]] = "max"

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg

    @abstractmethod
    def build(self) -> nn.Module:
        """The model at the configured sizes, as far as they are known without data."""

    @abstractmethod
    def decoder(self, model: nn.Module) -> Decoder: ...

    def describe(self, record: dict[str, Any]) -> None:
        """Fills `parameters`, `kv_cache` and `multiply_adds_per_token` from the config alone.

        Cache bytes and multiply-adds are those of one decoding batch of `bench` shape: batch x beam hypotheses of
        `text` tokens after a prefix of `prefix` positions (the encoder's output).
        """
        with without_memory():
            model = self.build()
        decoder = self.decoder(model)
        shape = cache_shape(self.cfg.bench)
        prefix, text, itemsize = shape.prefix, shape.text, shape.dtype.itemsize
        per_token = decoder.attentions[0].cache_elements_per_token
        elements = self.cache_elements(decoder, shape)
        record["parameters"] = count_parameters(model)
        record["kv_cache"] |= {
            "elements_per_token_per_layer": per_token,
            "bytes_per_token": sum(a.cache_elements_per_token for a in decoder.attentions) * itemsize,
            "bytes_predicted": elements * itemsize,
            "shape": shape.describe(),
        }
        record["multiply_adds_per_token"] = {
            "attention": sum(a.multiply_adds(prefix + text) for a in decoder.attentions),
            "decoder": decoder.multiply_adds(prefix + text),
            "context": prefix + text,
        }

    def cache_elements(self, decoder: Any, shape: CacheShape) -> int:
        """Cached numbers of one decoding batch."""
        rows = shape.batch * shape.beam
        return sum(a.cache_elements(rows, shape.text, shape.prefix, shape.batch) for a in decoder.attentions)

    def check(self, directory: Path) -> None:  # noqa: B027
        """Refuse, before data is read, what would be refused after it or after training."""

    @abstractmethod
    def prepare(self, record: dict[str, Any], stage: str | None) -> tuple[TaskData, Trainable]:
        """Data (of all splits, or those of `stage`) and module; the record learns of corpus and parameters."""

    def before_fit(self, record: dict[str, Any], directory: Path, data: TaskData, module: Trainable) -> None:  # noqa: B027
        """What comes between building a model and training it."""

    def bench(self, record: dict[str, Any], directory: Path, settings: Settings) -> bool:
        """A kind of task whose model has no Attention measures by itself. False: mode=bench does."""
        return False

    @abstractmethod
    def score(self, record: dict[str, Any], directory: Path, data: TaskData, module: Trainable) -> None:
        """Score the test set, write predictions.tsv, fill `quality`, `inference`, `kv_cache`, show a summary."""


def flow_of(cfg: DictConfig) -> Flow:
    found: Flow = instantiate(cfg.task.flow, path="task.flow", cfg=cfg)
    return found

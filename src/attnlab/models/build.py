"""From a composed config to the things it names."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.overrides import TorchFunctionMode

from attnlab.attention import Attention
from attnlab.config.build import instantiate
from attnlab.run.identity import architecture


class _SkipInit(TorchFunctionMode):
    """Leaves out torch.nn.init: on the meta device it computes nothing, but imports the compiler, for seconds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs.get("tensor", args[0] if args else None)
        return func(*args, **kwargs)


@contextmanager
def without_memory() -> Iterator[None]:
    """Modules built inside have shapes but no storage."""
    with torch.device("meta"), _SkipInit():
        yield


def build_model(cfg: DictConfig, **sizes: Any) -> Any:
    """The model that `task.model` names, with the mechanism of `attention` in its layers.

    Args:
        sizes: arguments that depend on the data, such as the size of the vocabulary.
    """
    return instantiate(cfg.task.model, path="task.model", attention=partial(build_attention, cfg), **sizes)


def build_attention(cfg: DictConfig, layer: int) -> Attention:
    """The mechanism of layer number `layer`; in a hybrid stack the pattern repeats over the layers."""
    pattern = cfg.attention.get("pattern")
    path = "attention" if pattern is None else f"attention.mechanisms.{pattern[layer % len(pattern)]}"
    attention: Attention = instantiate(OmegaConf.select(cfg, path), path=path)
    return attention


@dataclass(frozen=True)
class CacheShape:
    """One decoding batch of the `bench` node's shape.

    Args:
        beam: hypotheses of each sentence; the cache has batch * beam rows.
    """

    batch: int
    beam: int
    prefix: int
    text: int
    dtype: torch.dtype

    def describe(self) -> dict[str, int | str]:
        return asdict(self) | {"dtype": str(self.dtype).removeprefix("torch.")}


def cache_shape(bench: DictConfig) -> CacheShape:
    """The shape of the decoding batch that `bench` describes; of several text lengths the first."""
    text = bench.text if isinstance(bench.text, int) else bench.text[0]
    return CacheShape(bench.batch, bench.beam, bench.prefix, text, getattr(torch, bench.dtype))


def count_parameters(model: nn.Module, attentions: Iterable[nn.Module] | None = None) -> dict[str, int]:
    """Total, those inside attention, and those that are trained; shared ones once.

    Args:
        attentions: what counts as attention; None: every Attention.
    """
    if attentions is None:
        attentions = [module for module in model.modules() if isinstance(module, Attention)]
    inside = {id(p): p for module in attentions for p in module.parameters()}
    return {
        "total": sum(p.numel() for p in model.parameters()),
        "attention": sum(p.numel() for p in inside.values()),
        "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }


def identity(cfg: DictConfig, **vocabularies: str | None) -> dict[str, Any]:
    """What a checkpoint must share with the model it is loaded into, the most telling first.

    Dropout rates are not part of it: weights trained with one rate may be trained further with another.

    Args:
        vocabularies: the fingerprint of each vocabulary, by its name with underscores.
    """
    needed = architecture(cfg)
    return {
        "mechanism": needed["mechanism"],
        **{name.replace("_", " "): fingerprint for name, fingerprint in vocabularies.items()},
        "model": needed["model"],
    }

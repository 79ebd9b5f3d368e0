"""Construction of models and mechanisms from a composed configuration, and their counts."""

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
from attnlab.attention.base import NO_CODES
from attnlab.attention.ops.quantised import BLOCK
from attnlab.attention.sliding_window import Windowed
from attnlab.config.build import instantiate
from attnlab.errors import ConfigError
from attnlab.run.identity import architecture


class _SkipInit(TorchFunctionMode):
    """Skip torch.nn.init, which on the meta device has no effect but imports the compiler, which takes seconds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs.get("tensor", args[0] if args else None)
        return func(*args, **kwargs)


@contextmanager
def without_memory() -> Iterator[None]:
    """Within the context, build modules on the meta device, without storage."""
    with torch.device("meta"), _SkipInit():
        yield


def build_model(cfg: DictConfig, **sizes: Any) -> Any:
    """Build the model of `task.model` with the mechanism of `attention` in its layers.

    `sizes` are arguments that depend on the data, such as the size of the vocabulary.
    """
    return instantiate(cfg.task.model, path="task.model", attention=partial(build_attention, cfg), **sizes)


def build_attention(cfg: DictConfig, layer: int) -> Attention:
    """Build the mechanism of layer index `layer`. In a hybrid stack the pattern repeats over the layers.

    With `convert=` it is the original's, whose cache has no codes.
    """
    pattern = cfg.attention.get("pattern")
    path = "attention" if pattern is None else f"attention.mechanisms.{pattern[layer % len(pattern)]}"
    attention: Attention = instantiate(OmegaConf.select(cfg, path), path=path)
    if OmegaConf.select(cfg, "choices.convert") in (None, "none"):
        set_cache_bits(cfg, [attention])
    return attention


def set_cache_bits(cfg: DictConfig, attentions: Iterable[Attention]) -> None:
    """Apply `cache.bits` to mechanisms. ConfigError: one has a state that cannot be stored as codes.

    Windows of at most `BLOCK` positions have no older slots and stay as they are.
    """
    if (bits := OmegaConf.select(cfg, "cache.bits")) is None:
        return
    for attention in attentions:
        if not attention.has_codes:
            raise ConfigError(
                f"cache.bits={bits}: {type(attention).__name__} {NO_CODES}; expected null, or a mechanism that caches "
                "positions, such as attention=mha, gqa, mla, mtla, sliding_window or tpa"
            )
        if not (isinstance(attention, Windowed) and attention.window <= BLOCK):
            attention.cache_bits = bits


@dataclass(frozen=True)
class CacheShape:
    """Shape of a decoding batch. The cache has batch * beam rows."""

    batch: int
    beam: int
    prefix: int
    text: int
    dtype: torch.dtype

    def describe(self) -> dict[str, int | str]:
        return asdict(self) | {"dtype": str(self.dtype).removeprefix("torch.")}


def cache_shape(bench: DictConfig) -> CacheShape:
    """Shape of the decoding batch in the `bench` node, with the first of several text lengths."""
    text = bench.text if isinstance(bench.text, int) else bench.text[0]
    batch = bench.batch if isinstance(bench.batch, int) else max(bench.batch)
    return CacheShape(batch, bench.beam, bench.prefix, text, getattr(torch, bench.dtype))


def width_key(cfg: DictConfig) -> str:
    """The key of the feed-forward width of the layers that have the mechanism."""
    return f"task.model{'.decoder' * ('decoder' in cfg.task.model)}.ffn_dim"


def count_parameters(model: nn.Module, attentions: Iterable[nn.Module] | None = None) -> dict[str, int]:
    """Number of parameters in total, in attention, and trainable. Shared parameters count once.

    `attentions`: modules that count as attention; None: every `Attention`.
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
    """Properties that a checkpoint must share with the model it is loaded into, the most informative first.

    Dropout rates are excluded, because they may change between training runs.

    Args:
        vocabularies: fingerprint of each vocabulary, by its name with underscores.
    """
    needed = architecture(cfg)
    return {
        "mechanism": needed["mechanism"],
        **{name.replace("_", " "): fingerprint for name, fingerprint in vocabularies.items()},
        "model": needed["model"],
    }

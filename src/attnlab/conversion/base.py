"""The interface of a conversion: a trained attention layer and its statistics in, another mechanism out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from attnlab.attention import MHA, Attention, SlidingWindow
from attnlab.config.build import instantiate
from attnlab.conversion.budget import LayerPlan, Survey
from attnlab.conversion.healing import Healing
from attnlab.conversion.statistics import Statistics
from attnlab.conversion.texts import Calibration
from attnlab.errors import ConfigError

SINKS = 4  # first positions that a layer with a window sees too: trained models attend to them wherever they are
Inputs = Callable[[], Iterable[Tensor]]  # a new pass over the batches (B, T, d) of a layer's inputs


@dataclass(frozen=True)
class Layer:
    """A converted layer.

    Args:
        node: the mechanism's `_target_` and arguments, plain values.
        about: its section in the record.
    """

    node: dict[str, Any]
    attention: Attention
    about: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Conversion(ABC):
    """Base class of conversions, with a file in this folder and one in conf/convert for each target."""

    calibration: Calibration = field(default_factory=Calibration)
    healing: Healing = field(default_factory=Healing)

    @property
    def name(self) -> str:
        """The option of the group `convert`."""
        return type(self).__name__.removeprefix("To").lower()

    @property
    def refit(self) -> bool:
        """Whether each converted layer's output projection is fitted to the original's output."""
        return False

    def refuse(self, attention: Attention) -> None:
        """ConfigError: the target cannot represent this attention."""
        if not isinstance(attention, MHA):
            raise ConfigError(f"convert={self.name}: {type(attention).__name__} is no grouped-query attention")

    def planned_for(self, attention: Attention) -> dict[str, Any]:
        """:meth:`planned` after :meth:`refuse`. ConfigError: as these."""
        self.refuse(attention)
        assert isinstance(attention, MHA)
        return self.planned(attention)

    def planned_layers(self, attentions: Sequence[Attention]) -> list[dict[str, Any]]:
        """:meth:`planned_for` of all layers. ConfigError: also if they do not go together."""
        return [self.planned_for(attention) for attention in attentions]

    @abstractmethod
    def planned(self, attention: MHA) -> dict[str, Any]:
        """The node of the converted mechanism from the settings and the original's sizes, with the final cache size.

        ConfigError: the cache would not shrink, or the settings do not fit the layer.
        """

    def estimated(self, attention: Attention) -> str | None:
        """Why the conversion may have other parameters than those of :meth:`planned`; None: it has the same."""
        return None

    def looks_ahead(self, attention: MHA) -> bool:
        """Whether all layers of the original are surveyed before the first one, `attention`, is converted."""
        return False

    def survey(self, attention: MHA, statistics: Statistics) -> Survey:
        """The survey of an original layer for :meth:`plans`, with inputs from original layers."""
        raise NotImplementedError

    def plans(self, attentions: Sequence[MHA], surveys: Sequence[Survey]) -> Sequence[LayerPlan]:
        """The cache of each layer. ConfigError: the layers do not fit together."""
        raise NotImplementedError

    @property
    def measured(self) -> bool:
        """Whether the first pass measures what choices of a layer change, in place of a survey of all layers."""
        return False

    def windows(self, attention: MHA, positions: int) -> list[int]:
        """Windows of newest positions that are tried in place of all `positions`, if sizes are measured."""
        return []

    def choices(self, attention: MHA, statistics: Statistics) -> list[tuple[LayerPlan, dict[str, Any], float]]:
        """The caches of a layer to choose from by size, with the mechanism's node and the predicted error of each."""
        return []

    @abstractmethod
    def convert(self, attention: MHA, statistics: Statistics, inputs: Inputs, plan: LayerPlan | None = None) -> Layer:
        """Convert a layer. ConfigError: the settings do not fit the layer.

        Args:
            inputs: the batches of the statistics.
            plan: the layer's cache; None: as set, or the best for this layer alone.
        """

    def finished(self, layer: Layer) -> Layer:
        """The layer after the fit of its output projection."""
        return layer


def target_of(cfg: DictConfig) -> Conversion | None:
    """The conversion of a run, or None."""
    if cfg.choices.get("convert") in (None, "none"):
        return None
    target: Conversion = instantiate(cfg.convert, path="convert")
    return target


def attention_of(node: Mapping[str, Any], like: Attention | None = None) -> Attention:
    """The mechanism of a node with random weights, with the dtype, device and mode of `like`."""
    attention: Attention = instantiate(OmegaConf.create(dict(node)), path="attention")
    if like is not None:
        attention.to(next(like.parameters())).train(like.training)
    return attention


def within(attention: MHA, window: int | None) -> MHA:
    """The same attention to the `SINKS` first and the `window` newest positions; None: itself."""
    if window is None:
        return attention
    node = mha_node(attention) | {"_target_": "attnlab.attention.SlidingWindow", "window": window, "sinks": SINKS}
    narrow = attention_of(node, attention)
    narrow.load_state_dict(attention.state_dict())
    assert isinstance(narrow, MHA)
    return narrow


def mha_node(attention: MHA) -> dict[str, Any]:
    """The node of an MHA or a SlidingWindow with the same sizes and options."""
    biased = [name for name in ("query", "key", "value", "out") if getattr(attention, name).bias is not None]
    node: dict[str, Any] = {
        "_target_": f"attnlab.attention.{type(attention).__name__}",
        "d_model": attention.d_model,
        "num_heads": attention.num_heads,
        "num_kv_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "bias": biased or False,
        "qk_norm": not isinstance(attention.query_norm, nn.Identity),
        "dropout": attention.dropout,
        "rope_theta": attention.rope_theta,
        "rope_scaling": None,
        "rope_dim": attention.turned if attention.turned != attention.head_dim else None,
        "norm_eps": getattr(attention.query_norm, "eps", 1e-6),
    }
    if attention.rope_scaling is not None:
        node["rope_scaling"] = {"_target_": "attnlab.attention.Llama3Scaling"} | asdict(attention.rope_scaling)
    if isinstance(attention, SlidingWindow):
        node |= {"window": attention.window, "sinks": attention.sinks}
    return node

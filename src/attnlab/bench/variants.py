"""Mechanisms to measure side by side: the configured one, references, and their published algorithms."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from attnlab.attention import Attention, Cache
from attnlab.attention.ops.native import round_weights
from attnlab.bench import baselines
from attnlab.bench.settings import Settings
from attnlab.config.build import CONF, instantiate, written
from attnlab.config.compose import mechanisms_of
from attnlab.conversion.base import attention_of, target_of
from attnlab.errors import ConfigError, nearest
from attnlab.models import PrefixDecoder
from attnlab.models.build import build_attention, set_cache_bits, without_memory
from attnlab.run.device import missing_compiler
from attnlab.training.compiled import Compiled

M = TypeVar("M", bound=nn.Module)
KINDS = ("published", "compiled", "int8")  # what a reference may be called before the name of a mechanism


@dataclass(frozen=True)
class Variant:
    """One of the compared variants, which a new process can build again."""

    name: str
    cfg: DictConfig


@dataclass(frozen=True)
class AttentionVariant(Variant):
    """A mechanism, or its published algorithm with the same weights. All are initialised with the same seed.

    Args:
        published: whether to run the published algorithm with the weights of the mechanism.
        copied: whether beam search stores the prefix once per hypothesis.
        converted: whether the mechanisms are those that `convert=` plans.
        compiled: whether steps are compiled.
        int8: whether the weights of the model are rounded to 8 bits.
    """

    int8: bool = False
    published: bool = False
    copied: bool = False
    converted: bool = False
    compiled: bool = False

    def attention(self, dtype: torch.dtype, device: torch.device) -> Attention:
        """The measured attention of a layer. LookupError: layers differ, or there is no published algorithm."""
        if len(self.layers()) > 1:
            raise LookupError(
                f"{self.name} has layers of several mechanisms: measure the model with bench.what=model or beam"
            )
        if self.weights != "float32":
            raise LookupError("rounded weights are those of a language model: measure bench.what=generation or prefill")
        attention = self.mechanism(dtype, device)
        return baselines.of(attention) if self.published else attention

    @property
    def weights(self) -> str:
        """The type of the weights that its model computes with, as in `hardware.weights`."""
        return "int8" if self.int8 else str(self.cfg.hardware.weights)

    def mechanism(self, dtype: torch.dtype, device: torch.device) -> Attention:
        """The mechanism itself, even if its published algorithm is measured."""
        torch.manual_seed(self.cfg.seed)
        return self._layer(0).to(device, dtype).eval()

    def _layer(self, number: int) -> Attention:
        target = target_of(self.cfg) if self.converted else None
        if target is None:
            return build_attention(self.cfg, number)
        with without_memory():
            original = build_attention(self.cfg, number)
        converted = attention_of(target.planned_for(original))
        set_cache_bits(self.cfg, [converted])
        return converted

    def compiler(self, device: torch.device) -> Compiled | None:
        """Compiler of its steps; None: steps are not compiled. LookupError: the device does not support it."""
        if not self.compiled:
            return None
        if device.type != "cpu":
            raise LookupError("steps are compiled on a CPU; elsewhere they are captured in a CUDA graph")
        if missing := missing_compiler(self.cfg):
            raise LookupError(missing)
        return Compiled(True)

    def layers(self) -> list["AttentionVariant"]:
        """One variant for each mechanism of its layers; a hybrid stack has several."""
        if "pattern" not in self.cfg.attention:
            return [self]
        plain = written(self.cfg)
        nodes = plain["attention"]["mechanisms"].values()
        return [replace(self, cfg=OmegaConf.create(plain | {"attention": node})) for node in nodes]

    def decoder(self, dtype: torch.dtype, device: torch.device) -> PrefixDecoder:
        """The task's decoder."""
        torch.manual_seed(self.cfg.seed)
        task = self.cfg.task
        decoder: PrefixDecoder = instantiate(task.model.decoder)(
            vocab_size=task.data.vocab_size,
            d_model=task.model.d_model,
            attention=partial(build_attention, self.cfg),
        )
        return self._finished(decoder, dtype, device)

    def model(self, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """The task's model, without a CTC head."""
        torch.manual_seed(self.cfg.seed)
        task = self.cfg.task
        model: nn.Module = instantiate(
            task.model, path="task.model", attention=self._layer, vocab_size=task.data.vocab_size
        )
        return self._finished(model, dtype, device)

    def _finished(self, module: M, dtype: torch.dtype, device: torch.device) -> M:
        module.to(device, dtype).eval()
        if self.weights != "float32":
            round_weights(module, getattr(torch, self.weights))
        if self.published:
            chosen = tuple(type(layer.mechanism(dtype, device)) for layer in self.layers())
            for block in list(module.modules()):
                if isinstance(attention := getattr(block, "attention", None), chosen):
                    block.attention = baselines.of(attention)
        return module


class LayerSteps:
    """An attention layer as a model for `Steps`, with inputs in place of tokens."""

    def __init__(self, attention: Attention) -> None:
        self.attention = attention

    def step(self, x: Tensor, caches: list[Cache]) -> Tensor:
        """Inputs (B, n, d) -> outputs (B, n, d), with the only cache."""
        return self.attention.extend(x, caches[0])


def lineup(cfg: DictConfig, settings: Settings) -> list[AttentionVariant]:
    """The configured mechanism, then the references in the order of the settings, without duplicates.

    Caches of references have no codes. With `cache.bits` the mechanism without codes is the first reference.
    With `convert=`: the converted mechanisms and the original.

    ConfigError: a reference is not a mechanism, or has no such key.
    """
    from attnlab.bench import peers  # which imports this module

    if converts(cfg):
        return [AttentionVariant(cfg.choices.convert, cfg, converted=True), AttentionVariant("original", cfg)]
    chosen = AttentionVariant(cfg.choices.attention, cfg)
    variants = {chosen.name: chosen}
    if cfg.cache.bits is not None:
        cfg = OmegaConf.create(written(cfg) | {"cache": {"bits": None}})
        chosen = replace(chosen, name=f"{chosen.name}_{settings.dtype}", cfg=cfg)
        variants[chosen.name] = chosen
    for name in settings.references:
        if name in peers.PEERS:
            variants[name] = peers.PeerVariant(name, cfg)
            continue
        kind = next((kind for kind in KINDS if name.partition("_")[0] == kind), "")
        base, _, value = (name.removeprefix(kind).removeprefix("_") or chosen.name).partition(".")
        if base == chosen.name and not value:
            if values := settings.overrides_of(base):
                raise ConfigError(
                    f"bench.overrides: {base}.{values[0]}: {base} is the mechanism of the run itself; "
                    f"give attention.{values[0]}"
                )
            variant = chosen
        else:
            overrides = settings.overrides_of(base) + [value] * bool(value)
            variant = AttentionVariant(f"{base}.{value}" if value else base, with_attention(cfg, base, overrides))
        if kind:
            chosen_kind: dict[str, Any] = {"name": f"{kind}_{variant.name}", kind: True}
            variant = replace(variant, **chosen_kind)
        variants.setdefault(variant.name, variant)
    return list(variants.values())


def converts(cfg: DictConfig) -> bool:
    """Whether `convert=` names a conversion."""
    return cfg.choices.get("convert") not in (None, "none")


def with_attention(cfg: DictConfig, name: str, overrides: list[str]) -> DictConfig:
    """The configuration with another mechanism, the same sizes and stride, and overrides.

    The rank is the same if it has the same meaning, as in MLA and MTLA; else it is the other mechanism's default.
    """
    with _hydra():
        names = GlobalHydra.instance().config_loader().get_group_options("attention")
        if name not in names:
            raise ConfigError(f"bench.references: {name} is no mechanism{nearest(name, names)}")
        node = written(compose(f"attention/{name}"))
        if parts := mechanisms_of(node["attention"].get("pattern"), names):
            node["attention"]["mechanisms"] = {
                part: written(compose(f"attention/{part}"))["attention"] for part in parts
            }
        chosen = cfg.choices.attention
        if chosen in names and not _same_rank(written(compose(f"attention/{chosen}"))["attention"], node["attention"]):
            node["rank"] = None
    values = written(OmegaConf.from_dotlist(overrides))
    for key in values:
        if key not in node["attention"]:
            raise ConfigError(f"bench.overrides: {name} has no {key}{nearest(key, node['attention'])}")
    node["attention"] |= values
    full = OmegaConf.create(copy.deepcopy(written(cfg)) | node)
    OmegaConf.resolve(full)
    return full


def _same_rank(chosen: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether `rank` has the same meaning: the same argument and, if that is called `rank`, the same default."""

    def uses(node: dict[str, Any]) -> set[tuple[str, str]]:
        arguments = [(key, value) for key, value in node.items() if isinstance(value, str) and "${rank}" in value]
        return {(key, value if key == "rank" else "") for key, value in arguments}

    return all(uses(part) == uses(chosen) for part in (other, *other.get("mechanisms", {}).values()) if uses(part))


@contextmanager
def _hydra() -> Iterator[None]:
    """Initialise Hydra, unless a job is running, whose search path is then used."""
    if GlobalHydra.instance().is_initialized():
        yield
        return
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield

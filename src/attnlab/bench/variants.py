"""The mechanisms that are measured side by side: the chosen one, others, and the published algorithms of these."""

import copy
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf
from torch import nn

from attnlab.attention import MHA, Attention
from attnlab.bench.settings import Settings
from attnlab.config import stack
from attnlab.config.build import CONF, instantiate, written
from attnlab.config.nearest import nearest
from attnlab.conversion import Conversion
from attnlab.errors import ConfigError
from attnlab.models import PrefixDecoder
from attnlab.models.build import build_attention, without_memory

Publish = Callable[[Attention], Attention]
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class AttentionVariant:
    """A mechanism, or a published algorithm with the same weights: all are initialised from one seed.

    Args:
        name: what the record calls it.
        cfg: the configuration of a run with this mechanism.
        published: the function that makes the published algorithm; None: our own forward and steps run.
        copied: beam search with the prefix stored once per hypothesis.
        converted: the mechanisms that `convert=` makes of the model's own, as far as the settings alone tell.
        compiled: its decoding steps are compiled.
    """

    name: str
    cfg: DictConfig
    published: str | None = None
    copied: bool = False
    converted: bool = False
    compiled: bool = False

    def attention(self, dtype: torch.dtype, device: torch.device) -> Attention:
        """The mechanism of a layer, as it is measured.

        LookupError: the layers have several, or no published algorithm of this mechanism is kept.
        """
        if len(self.layers()) > 1:
            raise LookupError(
                f"{self.name} has layers of several mechanisms: measure the whole with bench.what=model or beam"
            )
        attention = self.mechanism(dtype, device)
        return publish_by(self.published)(attention) if self.published else attention

    def mechanism(self, dtype: torch.dtype, device: torch.device) -> Attention:
        """Ours, whichever algorithm runs."""
        torch.manual_seed(self.cfg.seed)
        return self._layer(0).to(device, dtype).eval()

    def _layer(self, number: int) -> Attention:
        if not self.converted:
            return build_attention(self.cfg, number)
        target: Conversion = instantiate(self.cfg.convert, path="convert")
        with without_memory():
            original = build_attention(self.cfg, number)
        target.refuse(original)
        assert isinstance(original, MHA)
        found: Attention = instantiate(OmegaConf.create(target.planned(original)), path="attention")
        return found

    def layers(self) -> list["AttentionVariant"]:
        """One variant for each mechanism that its layers have: this one, unless the stack is hybrid."""
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
        """The task's whole model, without a CTC head."""
        torch.manual_seed(self.cfg.seed)
        task = self.cfg.task
        model: nn.Module = instantiate(
            task.model, path="task.model", attention=self._layer, vocab_size=task.data.vocab_size
        )
        return self._finished(model, dtype, device)

    def _finished(self, module: M, dtype: torch.dtype, device: torch.device) -> M:
        module.to(device, dtype).eval()
        if self.published:
            chosen = tuple(type(layer.mechanism(dtype, device)) for layer in self.layers())
            for block in list(module.modules()):
                if isinstance(attention := getattr(block, "attention", None), chosen):
                    block.attention = publish_by(self.published)(attention)
        return module


def lineup(cfg: DictConfig, settings: Settings) -> list[AttentionVariant]:
    """The chosen mechanism, then the references in the order of the settings, each once.

    Of a model that `convert=` converts: the converted mechanisms, and the original's; references are not read.

    Args:
        cfg: the fixed configuration.
        settings: the checked node `bench`.

    ConfigError: a reference that is no mechanism.
    """
    if converts(cfg):
        return [AttentionVariant(cfg.choices.convert, cfg, converted=True), AttentionVariant("original", cfg)]
    chosen = AttentionVariant(cfg.choices.attention, cfg)
    found = {chosen.name: chosen}
    for name in settings.references:
        kind = next((kind for kind in ("published", "compiled") if name.partition("_")[0] == kind), "")
        base = name.removeprefix(kind).removeprefix("_") or chosen.name
        base, _, value = base.partition(".")  # mtla.stride=4 is MTLA with this value, beside others of the mechanism
        if base == chosen.name and not value:
            if own := settings.overrides_of(base):
                said = f"{base} is the mechanism of the run itself; give attention.{own[0]}"
                raise ConfigError(f"bench.overrides: {base}.{own[0]}: {said}")
            variant = chosen
        else:
            overrides = settings.overrides_of(base) + [value] * bool(value)
            variant = AttentionVariant(f"{base}.{value}" if value else base, with_attention(cfg, base, overrides))
        if kind == "published":
            variant = replace(variant, name=f"published_{variant.name}", published=settings.published)
        if kind == "compiled":
            variant = replace(variant, name=f"compiled_{variant.name}", compiled=True)
        found.setdefault(variant.name, variant)
    return list(found.values())


def converts(cfg: DictConfig) -> bool:
    """Whether `convert=` names a conversion.

    Args:
        cfg: the fixed configuration.
    """
    return cfg.choices.get("convert") not in (None, "none")


def copied(variant: AttentionVariant) -> AttentionVariant:
    """The same mechanism, with the prefix stored once per hypothesis.

    Args:
        variant: the mechanism.
    """
    return replace(variant, name=f"{variant.name}_copied", copied=True)


def with_attention(cfg: DictConfig, name: str, overrides: list[str]) -> DictConfig:
    """The configuration with another mechanism, with the same sizes and stride, except for the overrides.

    The rank is the same where both mean the same by it, as MLA and MTLA do; else the other mechanism has its own.

    Args:
        cfg: the fixed configuration.
        name: of the other mechanism, a file of conf/attention.
        overrides: its own values, for instance mha.num_heads=12.
    """
    with _hydra():
        names = GlobalHydra.instance().config_loader().get_group_options("attention")
        if name not in names:
            kinds = ("published", "compiled")
            if name.partition("_")[0] in kinds:
                raise ConfigError(f"bench.references: {name}: published and compiled cannot be combined")
            known = [*names, *kinds, *(f"{kind}_{other}" for kind in kinds for other in names)]
            raise ConfigError(f"bench.references: {name} is no mechanism{nearest(name, known)}")
        node = written(compose(f"attention/{name}"))
        if parts := stack.parts(node["attention"].get("pattern"), names):
            node["attention"]["mechanisms"] = {
                part: written(compose(f"attention/{part}"))["attention"] for part in parts
            }
        chosen = cfg.choices.attention
        if chosen in names and not _same_rank(written(compose(f"attention/{chosen}"))["attention"], node["attention"]):
            node["rank"] = None
    own = written(OmegaConf.from_dotlist(overrides))
    for key in own:
        if key not in node["attention"]:
            raise ConfigError(f"bench.overrides: {name} has no {key}{nearest(key, node['attention'])}")
    node["attention"] |= own
    full = OmegaConf.create(copy.deepcopy(written(cfg)) | node)
    OmegaConf.resolve(full)
    return full


def _same_rank(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether `rank` means the same in both: the same argument and, where that is `rank`, the same default."""

    def uses(node: dict[str, Any]) -> set[tuple[str, str]]:
        found = {(key, value) for key, value in node.items() if isinstance(value, str) and "${rank}" in value}
        return {(key, value if key == "rank" else "") for key, value in found}

    return all(uses(part) == uses(one) for part in (other, *other.get("mechanisms", {}).values()) if uses(part))


@contextmanager
def _hydra() -> Iterator[None]:
    """Hydra, with the running job's search path where there is a job."""
    if GlobalHydra.instance().is_initialized():
        yield
        return
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def publish_by(target: str) -> Publish:
    """The function that `bench.published` names.

    Args:
        target: its dotted name.

    Raises:
        ConfigError: it cannot be imported.
    """
    try:
        found: Publish = pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"bench.published={target}: cannot be imported ({error}); expected package.function"
        ) from error
    return found

"""Interface of a workload of mode=bench, and the class of each value of `bench.what`."""

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from omegaconf import DictConfig
from torch import Tensor

from attnlab.attention import Attention
from attnlab.bench import baselines, exactness
from attnlab.bench.peers import PeerVariant
from attnlab.bench.settings import Settings, Shape
from attnlab.bench.variants import AttentionVariant, converts, lineup


class Workload(ABC):
    """A measured run of a variant: `prepare`, which is timed separately, then `run`.

    The constructor builds everything, and raises LookupError if the variant does not support the workload.

    Attributes:
        about: sentence for the record's protocol.
        keys: fields of the shape that a row contains, by the keys of the row; every row contains `batch`.
        checked: errors of `check` that invalidate a time of this workload if they are too large.
        section: section of the record for the last row, if any.
        reads_prefix: whether a prefix of at least one position is needed.
        steps: whether it takes decoding steps, which can be compiled.
    """

    what: ClassVar[str]
    about: ClassVar[str]
    keys: ClassVar[dict[str, str]] = {}
    checked: ClassVar[tuple[str, ...]]
    section: ClassVar[Literal["training", "inference"] | None] = None
    reads_prefix: ClassVar[Literal["always", "with an encoder", "never"]] = "never"
    captured: bool = False
    steps: ClassVar[bool] = False

    @abstractmethod
    def __init__(self, variant: Any, shape: Shape, dtype: torch.dtype, device: torch.device) -> None: ...

    @classmethod
    @abstractmethod
    def lineup(cls, cfg: DictConfig, settings: Settings) -> list[Any]:
        """The variants, first the configured one."""

    @classmethod
    def shapes(cls, cfg: DictConfig, settings: Settings) -> list[Shape]:
        """Rows of the table; by default one for each `text`."""
        prefix = settings.prefix if "prefix" in cls.keys else 0
        batches = settings.batches * (len(settings.texts) // len(settings.batches))
        return [Shape(cls.what, *size[:1], 1, prefix, *size[1:]) for size in zip(batches, settings.texts, strict=True)]

    @classmethod
    @abstractmethod
    def check(cls, variant: Any, settings: Settings, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """Relative errors against a reference and their `tolerance`; empty without a reference.

        Raises:
            LookupError: the workload requires a reference, and there is none.
        """

    @classmethod
    def facts(cls, variants: Sequence[Any], shape: Shape, checks: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Further values of a row, which are not measured."""
        return {}

    def prepare(self) -> None:  # noqa: B027
        """Prepare a run. This is not part of its time."""

    @abstractmethod
    def run(self) -> None: ...

    def cache_bytes(self) -> dict[str, int] | None:
        """Bytes `measured` after a run and `predicted` from the shape; None without a cache."""
        return None

    def rates(self, seconds: float) -> dict[str, Any]:
        """Further results, computed from the median of the seconds."""
        return {}

    def quadratic_bytes(self) -> int | None:
        """Bytes of the T x T tensors of a run; None: fused kernels avoid them."""
        return None


class AttentionWorkload(Workload):
    """Base of workloads of mechanisms, each of which is checked against its published algorithm.

    Mechanisms without one, and those of a converted model, are checked against their naive form.
    """

    attentions: list[Attention]

    @classmethod
    def lineup(cls, cfg: DictConfig, settings: Settings) -> list[AttentionVariant]:
        return lineup(cfg, settings)

    @classmethod
    def check(
        cls, variant: AttentionVariant, settings: Settings, dtype: torch.dtype, device: torch.device
    ) -> dict[str, Any]:
        if isinstance(variant, PeerVariant):
            return {}  # another model
        kinds = set[str]()

        def reference(attention: Attention) -> Any:
            if not converts(variant.cfg):
                try:
                    published = baselines.of(attention)
                    kinds.add("published algorithm")
                    return published
                except LookupError:
                    if variant.published:
                        raise
            kinds.add("formula")
            return exactness.Formula(attention)

        errors = exactness.check(variant, reference, dtype, device)
        return errors | {"reference": " and ".join(sorted(kinds))}


def random_inputs(attention: Attention, *shape: int) -> Tensor:
    """Inputs of an attention layer, (*shape, d_model), the same for every variant."""
    weight = next(attention.parameters())
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, attention.d_model, generator=generator).to(weight)


WORKLOADS = {  # imported on demand, because some need timm or transformers
    "training": "training:Training",
    "model": "training:ModelTraining",
    "decoding": "decoding:Decoding",
    "generation": "decoding:Generation",
    "prefill": "decoding:Prefill",
    "beam": "decoding:Beam",
    "projections": "compressed:Projections",
    "whole": "compressed:CompressedModel",
    "decomposition": "compressed:Decomposition",
    "forward": "vision:VisionLayer",
    "kernels": "kernels:Kernels",
}


def workload_type(what: str) -> type[Workload]:
    """The class of a workload."""
    workload: type[Workload] = pkgutil.resolve_name(f"{__name__}.{WORKLOADS[what]}")
    return workload

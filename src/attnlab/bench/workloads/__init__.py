"""What mode=bench measures: the interface of a workload, and the class behind each value of `bench.what`."""

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Protocol

import torch
from omegaconf import DictConfig
from torch import Tensor

from attnlab.attention import Attention
from attnlab.bench import baselines, exactness
from attnlab.bench.settings import Settings, Shape
from attnlab.bench.variants import AttentionVariant, converts, lineup


class Variant(Protocol):
    """One of the things measured side by side: a frozen dataclass that a new process can build again."""

    @property
    def name(self) -> str: ...

    @property
    def cfg(self) -> DictConfig: ...


class Workload(ABC):
    """One measured run of one variant: `prepare`, which is timed separately, then `run`.

    Everything is built by the constructor, which raises LookupError where a variant cannot do the work.

    Attributes:
        about: one sentence for the record's protocol.
        keys: the fields of its shapes that a row has, by the row's keys; `batch` is in every row.
        checked: the errors of `check` that invalidate a time of this workload if they are too large.
        section: the section of the record that the last row fills, if any.
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
        """The variants: the one of the run first, then those it is compared with."""

    @classmethod
    def shapes(cls, cfg: DictConfig, settings: Settings) -> list[Shape]:
        """The rows of the table; by default one for each `text`."""
        prefix = settings.prefix if "prefix" in cls.keys else 0
        return [Shape(cls.what, settings.batch, 1, prefix, text) for text in settings.texts]

    @classmethod
    @abstractmethod
    def check(cls, variant: Any, settings: Settings, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """Relative errors against a reference and their `tolerance`; empty where there is nothing to compare with.

        Raises:
            LookupError: a reference is needed and none is known.
        """

    @classmethod
    def facts(cls, variants: Sequence[Any], shape: Shape, checks: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Further keys of a row, which need no measurement."""
        return {}

    def prepare(self) -> None:  # noqa: B027
        """What comes before a run and is not part of its time."""

    @abstractmethod
    def run(self) -> None: ...

    def cache_bytes(self) -> dict[str, int] | None:
        """Bytes `measured` after a run and `predicted` from the shape; None where nothing is cached."""
        return None

    def rates(self, seconds: float) -> dict[str, Any]:
        """Further numbers of a result, from the median of its seconds."""
        return {}

    def quadratic_bytes(self) -> int | None:
        """Bytes of the T x T tensors that a run forms; None where fused kernels form none."""
        return None


class AttentionWorkload(Workload):
    """Mechanisms side by side, each checked against its published algorithm.

    Mechanisms without one, and those of a converted model, are checked against their formula.
    """

    attentions: list[Attention]

    @classmethod
    def lineup(cls, cfg: DictConfig, settings: Settings) -> list[AttentionVariant]:
        return lineup(cfg, settings)

    @classmethod
    def check(
        cls, variant: AttentionVariant, settings: Settings, dtype: torch.dtype, device: torch.device
    ) -> dict[str, Any]:
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
    """Inputs of an attention layer, the same for every variant: (*shape, d_model)."""
    weight = next(attention.parameters())
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, attention.d_model, generator=generator).to(weight)


WORKLOADS = {  # imported when it is measured: some need timm or transformers
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
    """The class of a workload. ValueError: there is no workload of this name."""
    if what not in WORKLOADS:
        raise ValueError(f"no workload {what}")
    workload: type[Workload] = pkgutil.resolve_name(f"{__name__}.{WORKLOADS[what]}")
    return workload

"""What the workloads of attention mechanisms and of models built on them have in common."""

from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from attnlab.attention import Attention
from attnlab.bench import exactness
from attnlab.bench.settings import Settings, Shape
from attnlab.bench.variants import AttentionVariant, converts, lineup, publish_by
from attnlab.bench.workloads.base import Workload


class AttentionWorkload(Workload):
    """Mechanisms side by side, each checked against its published algorithm.

    Where none is kept, and in a converted model, it is checked against its formula; the check says which.

    Attributes:
        attentions: the attention layers that a run goes through.
    """

    attentions: list[Attention]

    @classmethod
    def lineup(cls, cfg: DictConfig, settings: Settings) -> list[AttentionVariant]:
        return lineup(cfg, settings)

    @classmethod
    def check(
        cls, variant: AttentionVariant, settings: Settings, dtype: torch.dtype, device: torch.device
    ) -> dict[str, Any]:
        publish, kinds = publish_by(settings.published), set()

        def reference(attention: Attention) -> Any:
            if not converts(variant.cfg):
                try:
                    found = publish(attention)
                    kinds.add("published algorithm")
                    return found
                except LookupError:
                    if variant.published:
                        raise
            kinds.add("formula")
            return exactness.Formula(attention)

        found = exactness.check(variant, reference, dtype, device)
        return found | {"reference": " and ".join(sorted(kinds))}


class TrainingWorkload(AttentionWorkload):
    """Forward and backward of `text` positions after `prefix` ones."""

    checked = ("output", "gradient")
    section = "training"
    shape: Shape

    @classmethod
    def shapes(cls, cfg: DictConfig, settings: Settings) -> list[Shape]:
        what = cls.__name__.lower()
        return [Shape(what, settings.batch, settings.beam, settings.prefix, text) for text in settings.texts]

    @classmethod
    def describe(cls, shape: Shape) -> dict[str, Any]:
        return {"prefix": shape.prefix, "text": shape.text}

    def quadratic_bytes(self) -> int | None:
        estimate = getattr(self.attentions[0], "quadratic_bytes", None)
        if estimate is None:
            return None
        found: int = estimate(self.shape.batch, self.shape.text, self.shape.prefix, len(self.attentions))
        return found


def random_inputs(attention: Attention, *shape: int) -> Tensor:
    """Inputs of an attention layer, the same for every variant: (*shape, d_model).

    Args:
        attention: the layer, for its width, dtype and device.
        shape: for instance rows and positions.
    """
    weight = next(attention.parameters())
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, attention.d_model, generator=generator).to(weight)

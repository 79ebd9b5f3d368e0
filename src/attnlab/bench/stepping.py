"""Compiled decoding steps, as one of the things that are measured side by side."""

import torch
from omegaconf import DictConfig
from torch import Tensor

from attnlab.attention import Attention, Cache
from attnlab.decoding.steps import WARM_UP
from attnlab.run.device import missing_compiler
from attnlab.training.compilation import Compiled


class Layer:
    """An attention layer as a model of `Steps`: its inputs stand for tokens.

    Args:
        attention: the layer.
    """

    def __init__(self, attention: Attention) -> None:
        self.attention = attention

    def step(self, x: Tensor, caches: list[Cache]) -> Tensor:
        """Inputs (B, n, d) -> outputs (B, n, d), through the one cache."""
        return self.attention.extend(x, caches[0])


def first_tokens(device: torch.device) -> int:
    """Steps before the measured ones: one, on CUDA those after which the next one is replayed (`Steps`).

    Args:
        device: where steps are taken.
    """
    return WARM_UP + 2 if device.type == "cuda" else 1


def compiler(compiled: bool, cfg: DictConfig, device: torch.device) -> Compiled | None:
    """What compiles the steps of a variant.

    Args:
        compiled: whether its steps are compiled; else the result is None.
        cfg: the configuration of a run with it.
        device: where it runs.

    Raises:
        LookupError: steps are not compiled there, or there is no compiler.
    """
    if not compiled:
        return None
    if device.type != "cpu":
        raise LookupError("steps are compiled on a CPU; elsewhere they are captured in a CUDA graph")
    if missing := missing_compiler(cfg):
        raise LookupError(missing)
    return Compiled(True)

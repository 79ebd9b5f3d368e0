"""From a composed config to the things it names."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.overrides import TorchFunctionMode

from src.attention import Attention
from src.config import instantiate
from src.models import SpeechToText


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


def build_model(cfg: DictConfig, vocab_size: int, ctc_vocab_size: int | None) -> SpeechToText:
    def attention() -> Attention:
        return instantiate(cfg.attention, path="attention")

    return instantiate(
        cfg.task.model, path="task.model", attention=attention, vocab_size=vocab_size, ctc_vocab_size=ctc_vocab_size
    )


def count_parameters(model: nn.Module) -> dict[str, int]:
    """Total, those inside attention mechanisms, and those that are trained; shared ones once."""
    inside = {id(p): p for m in model.modules() if isinstance(m, Attention) for p in m.parameters()}
    return {
        "total": sum(p.numel() for p in model.parameters()),
        "attention": sum(p.numel() for p in inside.values()),
        "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }


def identity(cfg: DictConfig, vocabulary: str, ctc_vocabulary: str | None) -> dict[str, Any]:
    """What a checkpoint must share with the model it is loaded into, the most telling first."""
    return {
        "mechanism": OmegaConf.to_container(cfg.attention, resolve=True),
        "vocabulary": vocabulary,
        "CTC vocabulary": ctc_vocabulary,
        "model": OmegaConf.to_container(cfg.task.model, resolve=True),
    }


def device_of(cfg: DictConfig) -> torch.device:
    """Where this process computes outside Lightning's trainer."""
    accelerator = cfg.hardware.accelerator
    if accelerator in ("gpu", "cuda") or (accelerator == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")

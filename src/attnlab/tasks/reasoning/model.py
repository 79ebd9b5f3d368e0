"""Which language model a run asks: a folder, a hub name, a compressed model, or a sample model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt
from torch import nn

from attnlab.compression import folder
from attnlab.config.bounds import bounded
from attnlab.errors import ConfigError, DataError
from attnlab.pretrained import hub, huggingface
from attnlab.pretrained.language import cast
from attnlab.tasks.reasoning.sample import SIZES, sample_model
from attnlab.tasks.reasoning.score import Asked


@bounded
@dataclass(frozen=True)
class AskedModel:
    """A pretrained language model with its tokenizer.

    Args:
        weights: a local folder, a compressed model's folder or its run, or a name of the hub; None: a sample model.
        dtype: of the parameters; None: as they are stored.
        sample: which sample model.
        epochs: of the sample model's training at most; it ends when the questions are known.
        lr: of the sample model's training.
        batch_size: of the sample model's training.
    """

    weights: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    sample: Literal["llama", "roberta"] = "llama"
    epochs: Annotated[int, Ge(1)] = 160
    lr: Annotated[float, Gt(0)] = 1e-3
    batch_size: Annotated[int, Ge(1)] = 32

    @property
    def compressed(self) -> Path | None:
        """The folder of the compressed model that `weights` names; None: it names none."""
        return folder.find(self.weights) if self.weights else None

    def options(self) -> dict[str, Any]:
        """The config as plain values, without weights. DataError, ConfigError: as `huggingface.config_of`."""
        return SIZES[self.sample] if self.weights is None else huggingface.config_of(self.weights)

    def outline(self) -> nn.Module:
        """The dense model, sizes alone on meta."""
        if self.compressed:
            raise ConfigError(f"model={self.weights}: it is compressed already; give the model that it was made from")
        with torch.device("meta"):
            return self.create()

    def create(self) -> nn.Module:
        """The dense architecture with random weights, on the default device."""
        return huggingface.create(self.weights or f"world-{self.sample}", self.options())

    def source(self, seed: int, cache_dir: Path) -> str:
        """What is loaded: `weights`, or the folder of the sample model, which is trained unless it is stored."""
        if self.weights is not None:
            return self.weights
        return str(sample_model(self.sample, seed, cache_dir, self.epochs, self.lr, self.batch_size))

    def load(self, seed: int, cache_dir: Path, device: torch.device) -> Asked:
        """The model, in eval mode on `device`, and its tokenizer."""
        if place := self.compressed:
            model = folder.load(place)
            model = model if self.dtype is None else cast(model, getattr(torch, self.dtype))
            asked = Asked(model.to(device), huggingface.tokenizer(str(place)))
        else:
            source = str(hub.folder(self.source(seed, cache_dir)))  # missing weights are named before a tokenizer
            words = huggingface.tokenizer(source)
            dtype = None if self.dtype is None else getattr(torch, self.dtype)
            asked = Asked(huggingface.load(source, dtype=dtype, device=device), words)
        if len(asked.tokenizer) > asked.model.config.vocab_size:
            raise DataError(
                f"model={self.weights}: its tokenizer has {len(asked.tokenizer)} tokens, the model "
                f"{asked.model.config.vocab_size}: they do not belong together"
            )
        return asked

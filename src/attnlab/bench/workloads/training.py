"""Training steps of an attention layer and of the task's model, without optimizer."""

from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.nn import functional as F

from attnlab.attention import Attention
from attnlab.bench.settings import Shape
from attnlab.bench.variants import AttentionVariant
from attnlab.bench.workloads import AttentionWorkload, random_inputs
from attnlab.models import LanguageModel


class Training(AttentionWorkload):
    """Forward and backward of an attention layer: gradients of inputs and weights."""

    what = "training"
    about = (
        "one attention layer: forward and backward, gradients of inputs and weights; no dropout; "
        "keys of `prefix` positions before the text"
    )
    checked = ("output", "gradient")
    section = "training"
    keys = {"prefix": "prefix", "text": "text"}

    def __init__(self, variant: AttentionVariant, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        attention = variant.attention(dtype, device)
        self.attention, self.attentions, self.shape = attention, [attention], shape
        self.x = random_inputs(attention, shape.batch, shape.text).requires_grad_()
        self.prefix = random_inputs(attention, shape.batch, shape.prefix).requires_grad_() if shape.prefix else None
        self.grad = torch.ones_like(self.x)

    def prepare(self) -> None:
        self.attention.zero_grad()
        self.x.grad = None
        if self.prefix is not None:
            self.prefix.grad = None

    def run(self) -> None:
        self.attention(self.x, self.prefix).backward(self.grad)

    def quadratic_bytes(self) -> int | None:
        estimate = getattr(next(iter(self.attentions), None), "quadratic_bytes", None)
        if estimate is None:
            return None
        count: int = estimate(self.shape.batch, self.shape.text, self.shape.prefix, len(self.attentions))
        return count


class ModelTraining(Training):
    """Loss and backward of the task's model. Its encoder, if any, has an output of `prefix` positions."""

    what = "model"
    about = "the task's model: inputs to loss and back; no dropout, no optimizer; an encoder gives `prefix` positions"
    reads_prefix = "with an encoder"

    def __init__(self, variant: AttentionVariant, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        if variant.weights != "float32":
            raise LookupError("rounded weights are not trained")
        self.model, self.shape = variant.model(dtype, device), shape
        self.attentions = [m for m in self.model.modules() if isinstance(m, Attention)]
        vocab, generator = variant.cfg.task.data.vocab_size, torch.Generator().manual_seed(0)

        def tokens(length: int) -> Tensor:
            return torch.randint(4, vocab, (shape.batch, length), generator=generator).to(device)

        self.inputs: tuple[Tensor, ...] = ()
        if not isinstance(self.model, LanguageModel):
            sources = tokens(shape.prefix)
            if mels := OmegaConf.select(variant.cfg, "task.model.encoder.num_mels"):
                frames = shape.prefix * 2 ** len(variant.cfg.task.model.encoder.conv_kernels)
                layers = OmegaConf.select(variant.cfg, "task.model.encoder.mix_layers")
                size = (shape.batch, frames, *([layers] if layers else []), mels)
                sources = torch.randn(size, generator=generator).to(device, dtype)
            self.inputs = sources, torch.full((shape.batch,), sources.shape[1], device=device)
        self.tokens, self.targets = tokens(shape.text), tokens(shape.text)

    def prepare(self) -> None:
        self.model.zero_grad()

    def rates(self, seconds: float) -> dict[str, Any]:
        return {"parameters": sum(p.numel() for p in self.model.parameters())}

    def run(self) -> None:
        if isinstance(self.model, LanguageModel):
            loss = self.model.loss(self.tokens, self.targets).mean()
        else:
            logits = self.model(*self.inputs, self.tokens)[0]
            loss = F.cross_entropy(logits.flatten(0, 1).float(), self.targets.flatten())
        loss.backward()

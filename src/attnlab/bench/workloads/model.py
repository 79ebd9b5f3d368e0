"""A training step of the task's whole model, without optimizer."""

import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.nn import functional as F

from attnlab.attention import Attention
from attnlab.bench.settings import Shape
from attnlab.bench.variants import AttentionVariant
from attnlab.bench.workloads.attention import TrainingWorkload
from attnlab.models import LanguageModel


class Model(TrainingWorkload):
    """Loss and backward of the task's model. Its encoder, if it has one, gives `prefix` positions.

    Arguments are those of `Workload`.
    """

    about = "the task's model: inputs to loss and back; no dropout, no optimizer; an encoder gives `prefix` positions"
    reads_prefix = "with an encoder"

    def __init__(self, variant: AttentionVariant, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
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

    def run(self) -> None:
        if isinstance(self.model, LanguageModel):
            loss = self.model.loss(self.tokens, self.targets).mean()
        else:
            logits = self.model(*self.inputs, self.tokens)[0]
            loss = F.cross_entropy(logits.flatten(0, 1).float(), self.targets.flatten())
        loss.backward()

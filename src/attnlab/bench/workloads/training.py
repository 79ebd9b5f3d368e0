"""A training step of one attention layer."""

import torch

from attnlab.bench.settings import Shape
from attnlab.bench.variants import AttentionVariant
from attnlab.bench.workloads.attention import TrainingWorkload, random_inputs


class Training(TrainingWorkload):
    """Forward and backward of an attention layer: gradients of inputs and weights.

    Arguments are those of `Workload`.
    """

    about = (
        "one attention layer: forward and backward, gradients of inputs and weights; no dropout; "
        "keys of `prefix` positions before the text"
    )

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

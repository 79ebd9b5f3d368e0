"""T6: a LLaMA-style decoder for language modelling, over any attention mechanism. TPA paper, section 3.4."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlab.attention import Attention, Cache
from attnlab.attention.bounds import Layers, Size
from attnlab.models.language_model import LanguageModel
from attnlab.models.token_loss import target_and_mean_nats, token_nats


def rms_norm(x: Tensor) -> Tensor:
    """x over its root mean square, without weights; the only epsilon is the machine's, as in the released code.

    Args:
        x: (..., d).
    """
    return F.rms_norm(x, x.shape[-1:])


class T6Block(nn.Module):
    """u = x + attention(rms(x));  z = u + W3 (silu(W1 rms(u)) * W2 rms(u)). No biases, no dropout.

    Args:
        attention: the mechanism.
        ffn_dim: width inside the feed-forward layer.
    """

    def __init__(self, attention: Attention, ffn_dim: int) -> None:
        super().__init__()
        self.attention = attention
        self.gate, self.up = (nn.Linear(attention.d_model, ffn_dim, bias=False) for _ in range(2))
        self.down = nn.Linear(ffn_dim, attention.d_model, bias=False)

    def multiply_adds(self, context: int, prefix: int = 0) -> int:
        return self.attention.multiply_adds(context, prefix) + 3 * self.down.weight.numel()

    def forward(self, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """x (B, T, d); `attend` is the attention in its parallel or its cached form."""
        u = x + attend(rms_norm(x))
        h = rms_norm(u)
        return u + self.down(F.silu(self.gate(h)) * self.up(h))


class T6(LanguageModel):
    """Tokens -> logits of the next ones. Embedding and output share their weights.

    Args:
        vocab_size: V.
        d_model: width d.
        attention: called with the number of a layer, returns its mechanism.
        num_layers: blocks.
        ffn_dim: width of the SwiGLU; None: floor(8 d / 3).
        max_length: positions of a window.
        output_init: "zeros" starts with blocks that add nothing, as the released code does: the attention's `out` and
            the last matrix of the SwiGLU are zero. "default" leaves them as they are created.

    ValueError: `output_init` is "zeros" and a mechanism has no `out`.
    """

    def __init__(
        self,
        vocab_size: Size,
        d_model: Size,
        attention: Callable[[int], Attention],
        num_layers: Layers = 12,
        ffn_dim: Size | None = None,
        max_length: Size = 1024,
        output_init: Literal["zeros", "default"] = "zeros",
    ) -> None:
        super().__init__()
        self.max_length = max_length
        self.embedding = nn.Embedding(vocab_size, d_model)
        nn.init.uniform_(self.embedding.weight, -(d_model**-0.5), d_model**-0.5)  # a linear layer's, the released one
        width = 8 * d_model // 3 if ffn_dim is None else ffn_dim
        self.layers = nn.ModuleList(T6Block(attention(i), width) for i in range(num_layers))
        if output_init == "zeros":
            for block in self.blocks:
                nn.init.zeros_(block.down.weight)
                out = getattr(block.attention, "out", None)
                if not isinstance(out, nn.Linear):
                    name = type(block.attention).__name__
                    raise ValueError(f"output_init=zeros: {name} has no output projection `out`; use default")
                for parameter in out.parameters():
                    nn.init.zeros_(parameter)

    @property
    def blocks(self) -> list[T6Block]:
        return [layer for layer in self.layers if isinstance(layer, T6Block)]

    @property
    def attentions(self) -> list[Attention]:
        return [block.attention for block in self.blocks]

    def multiply_adds(self, context: int, prefix: int = 0) -> int:
        """Of one cached decoding step of one row at `context` positions: attention, feed-forward, vocabulary."""
        return sum(block.multiply_adds(context, prefix) for block in self.blocks) + self.embedding.weight.numel()

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) -> (B, T, V). ValueError: T is more than `max_length`."""
        return self._logits(self._hidden(tokens))

    def _hidden(self, tokens: Tensor) -> Tensor:
        if tokens.shape[1] > self.max_length:
            raise ValueError(f"{tokens.shape[1]} positions; the model has {self.max_length}")
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, block.attention)
        return x

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Negative log-probability of each target, (B, T) and (B, T) -> (B, T) float32, in nats."""
        return token_nats(self._hidden(tokens), targets, self._logits, self.loss_chunk)

    def target_and_mean(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return target_and_mean_nats(self._hidden(tokens), targets, self._logits, self.loss_chunk)

    @torch.no_grad()
    def step(self, tokens: Tensor, caches: list[Cache]) -> Tensor:
        """The next tokens (B, n) -> logits (B, n, V), through the caches."""
        x = self.embedding(tokens)
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, lambda h, block=block, cache=cache: block.attention.extend(h, cache))
        return self._logits(x)

    def _logits(self, x: Tensor) -> Tensor:
        return F.linear(rms_norm(x), self.embedding.weight)

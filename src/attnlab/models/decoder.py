"""Transformer blocks with any attention mechanism, and pre-norm decoders: Llama and similar models, GPT-2, T6."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlab.attention import Attention
from attnlab.attention.bounds import Layers, PositiveFloat, Rate, Size, SizeOrZero
from attnlab.attention.ops.native import feed_forward, linear, normed, product
from attnlab.models.language_model import LanguageModel

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
Norm = Literal["rms", "layer", "unit"]


class DecoderBlock(nn.Module):
    """u = x + attention(norm(x));  z = u + MLP(norm(u)).

    The MLP is W3 (act(W1 u) * W2 u) if it is gated, else W3 act(W2 u). Without an MLP z = u + norm(u), as in the models
    of Zoology with an identity "state mixer".

    Args:
        ffn_dim: inner width of the MLP; 0: no MLP.
        dropout: dropout of the outputs of attention and MLP.
    """

    def __init__(
        self,
        attention: Attention,
        ffn_dim: int,
        norm: Norm,
        norm_eps: float,
        activation: Activation,
        gated: bool,
        mlp_bias: bool,
        dropout: float,
    ) -> None:
        super().__init__()
        width = attention.d_model
        self.attention, self.act, self.dropout = attention, ACTIVATIONS[activation], dropout
        self.attention_norm, self.mlp_norm = (_norm(norm, width, norm_eps) for _ in range(2))
        self.has_mlp = ffn_dim > 0
        self.gate = nn.Linear(width, ffn_dim, bias=mlp_bias) if gated and self.has_mlp else None
        if self.has_mlp:
            self.up = nn.Linear(width, ffn_dim, bias=mlp_bias)
            self.down = nn.Linear(ffn_dim, width, bias=mlp_bias)

    def forward(self, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """x (B, T, d); `attend`: attention function of the parallel or the cached form."""
        more = self._dropped(attend(normed(self.attention_norm, x)))
        if self.act is F.silu and not (self.training and self.dropout):
            fused = feed_forward(
                x, more, self.mlp_norm, self.gate, getattr(self, "up", None), getattr(self, "down", None)
            )
            if fused is not None:
                return fused
        u = x + more
        return u + self._dropped(self.mlp(self.mlp_norm(u)))

    def attend(self, h: Tensor) -> Tensor:
        """Output of the attention in its parallel form, (B, T, d) -> (B, T, d)."""
        return self.attention(h)

    def mlp(self, h: Tensor) -> Tensor:
        """(B, T, d) -> (B, T, d)."""
        if not self.has_mlp:
            return h
        inner = self.up(h) if self.gate is None else self.gate(h)
        inner = self.act(inner)
        return self.down(inner if self.gate is None else inner * self.up(h))

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class SharedDropout(nn.Dropout):
    """Dropout with one mask for all positions of a text: variational dropout (Gal and Ghahramani, 2016)."""

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, d) -> (B, T, d): a component is dropped at all positions of a row or at none."""
        return x * F.dropout(torch.ones_like(x[:, :1]), self.p, self.training)


class PostNormBlock(nn.Module):
    """u = LN1(x + drop(attention(x)));  z = LN2(u + drop(W2 drop(relu(W1 u)))).

    Args:
        activation_dropout: dropout after the ReLU; None: `dropout`.
        variational: whether all positions of a text share a dropout mask.
    """

    def __init__(
        self,
        attention: Attention,
        ffn_dim: int,
        dropout: float,
        activation_dropout: float | None = None,
        *,
        variational: bool = False,
    ) -> None:
        super().__init__()
        d_model = attention.d_model
        self.attention = attention
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.up, self.down = nn.Linear(d_model, ffn_dim), nn.Linear(ffn_dim, d_model)
        self.dropout: nn.Module = (SharedDropout if variational else nn.Dropout)(dropout)
        self.activation_dropout = self.dropout if activation_dropout is None else nn.Dropout(activation_dropout)

    def forward(self, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """x (B, T, d); `attend`: attention function of the parallel or the cached form."""
        u = self.norm1(x + self.dropout(attend(x)))
        return self.norm2(u + self.feed(u))

    def feed(self, x: Tensor) -> Tensor:
        """drop(W2 drop(relu(W1 x))), (B, T, d) -> (B, T, d)."""
        return self.dropout(linear(self.down, self.activation_dropout(F.relu(linear(self.up, x)))))


class Decoder(LanguageModel):
    """Pre-norm decoder that covers Llama, Mistral, Qwen2, Qwen3, SmolLM and GPT-2.

    Args:
        attention: called with the index of a layer, returns its mechanism.
        ffn_dim: inner width of the MLP; 0: no MLP.
        norm: RMSNorm, LayerNorm, or RMSNorm without weights and with machine epsilon ("unit").
        activation: activation of the MLP; gelu_tanh is GPT-2's approximation.
        gated: whether the MLP is gated (SwiGLU with silu).
        tied: whether the output matrix is the embedding.
        positions: number of learned position embeddings; 0: the mechanism encodes positions.
        dropout: dropout of the embedding and of the outputs of attention and MLP.
        embedding_dropout: dropout of the embedding; None: `dropout`.
        embedding_std: initial standard deviation of embeddings and learned positions.
    """

    def __init__(
        self,
        vocab_size: Size,
        d_model: Size,
        attention: Callable[[int], Attention],
        num_layers: Layers = 12,
        ffn_dim: SizeOrZero = 2048,
        max_length: Size = 1024,
        norm: Norm = "rms",
        norm_eps: PositiveFloat = 1e-6,
        activation: Activation = "silu",
        gated: bool = True,
        mlp_bias: bool = False,
        tied: bool = True,
        positions: SizeOrZero = 0,
        dropout: Rate = 0.0,
        embedding_dropout: Rate | None = None,
        embedding_std: PositiveFloat = 0.02,
    ) -> None:
        super().__init__()
        self.max_length = max_length
        self.dropout = dropout if embedding_dropout is None else embedding_dropout
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.begin(self.embedding, embedding_std)
        self.positions = nn.Embedding(positions, d_model) if positions else None
        if self.positions is not None:
            nn.init.normal_(self.positions.weight, std=embedding_std)
        self.layers = nn.ModuleList(
            DecoderBlock(attention(i), ffn_dim, norm, norm_eps, activation, gated, mlp_bias, dropout)
            for i in range(num_layers)
        )
        self.norm = _norm(norm, d_model, norm_eps)
        self.output = None if tied else nn.Linear(d_model, vocab_size, bias=False)

    @staticmethod
    def begin(embedding: nn.Embedding, std: float) -> None:
        """Initialise the embedding."""
        nn.init.normal_(embedding.weight, std=std)

    @property
    def vocabulary_matrix(self) -> Tensor:
        """The output matrix, (V, d)."""
        return self.embedding.weight if self.output is None else self.output.weight

    @property
    def vocabulary_multiply_adds(self) -> int:
        return self.embedding.weight.numel()

    def attended(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Output of each layer's attention for separate, normalised inputs, (B, T, d) -> (B, T, d) each."""
        return [block.attend(x) for block, x in zip(self.blocks, inputs, strict=True)]

    def attention_pairs(self, tokens: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Normalised input and output of each layer's attention, (B, T) -> (B, T, d) each."""
        inputs, outputs = [], []
        x = self.embed(tokens, 0)
        for block in self.blocks:
            inputs.append(block.attention_norm(x))
            outputs.append(block.attention(inputs[-1]))
            x = block(x, lambda _, out=outputs[-1]: out)
        return inputs, outputs

    def log_probabilities(self, tokens: Tensor) -> Tensor:
        """Log-probabilities of the next tokens, (B, T) -> (B, T, V) float32."""
        return self(tokens).float().log_softmax(-1)

    def embed(self, tokens: Tensor, start: int | Tensor) -> Tensor:
        """(B, T) -> (B, T, d), from position `start` on: an int, or (1,) of a static cache."""
        x: Tensor = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[start if isinstance(start, Tensor) else slice(start, start + tokens.shape[1])]
        return F.dropout(x, self.dropout, self.training)

    def final(self, x: Tensor) -> Tensor:
        return normed(self.norm, x)

    def logits(self, hidden: Tensor) -> Tensor:
        return product(hidden, self.embedding.weight) if self.output is None else linear(self.output, hidden)


class T6(Decoder):
    """The decoder of the TPA paper, section 3.4, and of its released code: norms without weights, SwiGLU, no biases.

    Args:
        attention: called with the index of a layer, returns its mechanism.
        ffn_dim: width of the SwiGLU; None: floor(8 d / 3).
        output_init: "zeros" initialises the attention's `out` and the last matrix of the SwiGLU to zero, as in the
            released code, so that blocks are initially the identity. "default" keeps their default initialisation.

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
        width = 8 * d_model // 3 if ffn_dim is None else ffn_dim
        super().__init__(vocab_size, d_model, attention, num_layers, width, max_length, norm="unit")
        for block in self.blocks if output_init == "zeros" else ():
            nn.init.zeros_(block.down.weight)
            out = getattr(block.attention, "out", None)
            if not isinstance(out, nn.Linear):
                name = type(block.attention).__name__
                raise ValueError(f"output_init=zeros: {name} has no output projection `out`; use default")
            for parameter in out.parameters():
                nn.init.zeros_(parameter)

    @staticmethod
    def begin(embedding: nn.Embedding, std: float) -> None:
        """Initialise as the weight of a linear layer, as in the released code."""
        bound = embedding.embedding_dim**-0.5
        nn.init.uniform_(embedding.weight, -bound, bound)


def _norm(kind: Norm, width: int, eps: float) -> nn.Module:
    if kind == "unit":
        return nn.RMSNorm(width, elementwise_affine=False)
    return nn.RMSNorm(width, eps=eps) if kind == "rms" else nn.LayerNorm(width, eps=eps)

"""A tiny Llama and its family: separate projections, grouped keys and values, rotary positions."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlab.pretrained import Family, Layer, Projection
from tests.pretrained.tiny import fill

SIZES = {"dim": 24, "heads": 6, "kv_heads": 2, "width": 8, "hidden": 40, "depth": 2, "words": 11}


class LlamaAttention(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, width: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = heads, kv_heads, width
        self.q_proj = nn.Linear(dim, heads * width)  # with biases, as in Qwen2
        self.k_proj = nn.Linear(dim, kv_heads * width)
        self.v_proj = nn.Linear(dim, kv_heads * width)
        self.o_proj = nn.Linear(heads * width, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * 0.1 ** torch.arange(self.width // 2, dtype=x.dtype)
        q, k = (torch.cat([z[..., ::2] * angles.cos() - z[..., 1::2] * angles.sin(),
                           z[..., ::2] * angles.sin() + z[..., 1::2] * angles.cos()], -1) for z in (q, k))  # fmt: skip
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return out


class LlamaMLP(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class LlamaLayer(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, width: int, hidden: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = LlamaAttention(dim, heads, kv_heads, width), LlamaMLP(dim, hidden)
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Llama(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, width: int, hidden: int, depth: int, words: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, dim)
        self.layers = nn.ModuleList(LlamaLayer(dim, heads, kv_heads, width, hidden) for _ in range(depth))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x @ self.embed.weight.T


class LlamaFamily(Family):
    name = "test-llama"
    options = frozenset(SIZES)

    def matches(self, model: nn.Module) -> bool:
        return isinstance(model, Llama)

    def layers(self, model: nn.Module) -> list[Layer]:
        result = []
        for path, module in model.named_modules():
            if not isinstance(module, LlamaLayer):
                continue
            attention = module.self_attn
            dim, width = module.norm1.normalized_shape[0], attention.width
            sizes = {"q": attention.heads, "k": attention.kv_heads, "v": attention.kv_heads}
            place = f"{path}.self_attn"
            projections = {
                name: Projection(f"{place}.{name}_proj", (heads * width, dim), "out", heads, bias=True)
                for name, heads in sizes.items()
            }
            projections["o"] = Projection(f"{place}.o_proj", (dim, attention.heads * width), "in", attention.heads)
            for name in ("gate", "up", "down"):
                linear = getattr(module.mlp, f"{name}_proj")
                shape = (linear.out_features, linear.in_features)
                projections[name] = Projection(f"{path}.mlp.{name}_proj", shape)
            rotary = {"products": f"{place}: rotary positions after the projections"}
            result.append(Layer(path, place, f"{path}.mlp", projections, width**-0.5, refusals=rotary))
        return result

    def create(self, name: str, options: dict[str, Any]) -> nn.Module:
        return Llama(**options)


def llama(**sizes: int) -> nn.Module:
    """A model of SIZES, except for these sizes, with all parameters random."""
    return fill(Llama(**(SIZES | sizes)))


def words(count: int = 2) -> Tensor:
    return torch.randint(SIZES["words"], (count, 7), generator=torch.Generator().manual_seed(1))

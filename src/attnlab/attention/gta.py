"""Grouped tied attention: a head's values are most of its keys too."""

import torch
from torch import Tensor, nn

from .bounds import PositiveFloat, Rate, Rotary, Size
from .mha import MHA
from .ops.decode import attend_parts
from .ops.rope import rotate
from .positional import Angles, Layout, PositionalCache


class GTA(MHA):
    r"""Grouped tied attention (Hardware-Efficient Attention for Fast Decoding, arXiv 2505.21487).

    .. math:: k_{jg} = [\operatorname{rotary}_j(W_r x_j),\ v_{jg,\,1 \dots D - d_r}], \qquad
        o_{ih} = \operatorname{softmax}_j(q_{ih}^\top k_{jg} / \sqrt{D})\, v_{jg}, \quad g = \lfloor h G / H \rfloor

    with v_jg = W_g x_j. All groups share the rotary part of the key, and the first d_r components of a query are
    rotated. The released code has these last, which is a permutation of weights. It gives W_r alone a bias; this class
    has no biases, like the code of MLRA. Cache: G D + d_r elements per token.

    Args:
        num_kv_heads: groups G, which must divide H; None: H.
        head_dim: width D of a head; None: d / H.
        rope_dim: width d_r of the rotary part of the keys, even and at most D; None: half of D.
        rope_theta: base of the rotary frequencies; None: frequencies are a buffer, saved with the weights.

    ValueError: sizes do not fit each other.
    """

    def __init__(
        self,
        d_model: Size,
        num_heads: Size,
        num_kv_heads: Size | None = None,
        head_dim: Size | None = None,
        rope_dim: Rotary | None = None,
        *,
        dropout: Rate = 0.0,
        rope_theta: PositiveFloat | None = 10000.0,
    ) -> None:
        turned = 0 if rope_dim is None else rope_dim
        super().__init__(
            d_model, num_heads, num_kv_heads, head_dim, bias=False, dropout=dropout, rope_theta=rope_theta,
            rope_dim=turned,
        )  # fmt: skip
        self._rotary(self.head_dim // 4 * 2 if rope_dim is None else rope_dim, rope_theta)
        self.rope_dim = self.turned
        del self.key, self.value
        self.down = nn.Linear(d_model, self.num_kv_heads * self.head_dim + self.turned, bias=False)

    def layout(self) -> Layout:
        return {"slots": (None, self.num_kv_heads * self.head_dim + self.turned)}

    def _entries(self, x: Tensor, angles: Angles) -> dict[str, Tensor]:
        """[values of each group | rotary key], (B, T, G D + d_r)."""
        tied, rotary = self.down(x).split([self.num_kv_heads * self.head_dim, self.turned], -1)
        return {"slots": torch.cat((tied, rotate(rotary, *angles)), -1)}

    def _keys_values(self, entries: dict[str, Tensor], angles: Angles) -> tuple[Tensor, Tensor]:
        tied, rotary = entries["slots"].split([self.num_kv_heads * self.head_dim, self.turned], -1)
        value = tied.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        rotary = rotary.unsqueeze(1).expand(-1, self.num_kv_heads, -1, -1)
        return torch.cat((rotary, value[..., : self.head_dim - self.turned]), -1), value

    def _step(self, q: Tensor, cache: PositionalCache, used: int | Tensor) -> Tensor:
        most, before = cache.reads(used)
        rotary, own = (q * self.scale).split([self.turned, self.head_dim - self.turned], -1)
        out = attend_parts(
            torch.cat((own, rotary), -1), cache.text["slots"], cache.prefix["slots"], self.num_kv_heads, self.head_dim,
            cache.prefix_mask, used=most, counts=used if isinstance(used, Tensor) else None, prefix_used=before,
            prefix_counts=cache.prefix_counts, beam=cache.beam, older=cache.older("slots"),
        )  # fmt: skip
        return self._join(out.to(q.dtype))

    def multiply_adds(self, context: int, prefix: int = 0) -> int:
        wide = self.num_heads * self.head_dim
        return self.d_model * (2 * wide + self.elements_per_slot) + 2 * context * wide

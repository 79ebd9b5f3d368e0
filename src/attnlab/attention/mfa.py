"""Multi-matrix factorisation attention: factorised queries of many wide heads, one key and one value head."""

import torch
from torch import Tensor, nn

from .bounds import PositiveFloat, Rate, Size
from .mha import MHA
from .ops.decode import attend_cached
from .positional import Angles, Layout, PositionalCache


class MFA(MHA):
    r"""Multi-matrix factorisation attention (arXiv 2412.19255).

    .. math:: q_{ih} = Q_h \operatorname{RMSNorm}(S_q x_i), \qquad
        o_{ih} = \operatorname{softmax}_j\big(\operatorname{rotary}_i(q_{ih})^\top \operatorname{rotary}_j(S_k x_j) /
        \sqrt{D}\big)\, S_v x_j

    All heads share S_q, S_k and S_v, so heads can be wider than d / H. The norm is that of the released code of Step-3
    and of MLRA, which the paper's equations lack. Cache: 2 D elements per token.

    With `reuse` (MFA-KR) values are those of the keys: S_v = (I + diag(a) N) S_k. The keys are those before rotation,
    and a starts at zero, which are choices of this class. The codes of Step-3 and of MLRA have no reuse. Cache:
    D elements per token, the keys before rotation. A step rotates all keys that it reads.

    Args:
        head_dim: width D of a head, which the paper calls C, even; None: d / H. The paper has wider heads.
        query_dim: width of the factor S_q x that all queries share; None: D, as in the paper.
        reuse: whether values are computed from the keys.
        rope_theta: base of the rotary frequencies; None: frequencies are a buffer, saved with the weights.

    ValueError: `num_heads` does not divide `d_model` and `head_dim` is None, or the width of a head is odd.
    """

    def __init__(
        self,
        d_model: Size,
        num_heads: Size,
        head_dim: Size | None = None,
        query_dim: Size | None = None,
        *,
        reuse: bool = False,
        dropout: Rate = 0.0,
        rope_theta: PositiveFloat | None = 10000.0,
        norm_eps: PositiveFloat = 1e-6,
    ) -> None:
        super().__init__(d_model, num_heads, 1, head_dim, bias=False, dropout=dropout, rope_theta=rope_theta)
        width, self.reuse = self.head_dim, reuse
        self.query_dim = width if query_dim is None else query_dim
        if self.query_dim < 1:
            raise ValueError(f"query_dim={query_dim}: expected at least 1")
        self.query = nn.Sequential(  # type: ignore[assignment]  # two matrices in place of one
            nn.Linear(d_model, self.query_dim, bias=False),
            nn.RMSNorm(self.query_dim, eps=norm_eps),
            nn.Linear(self.query_dim, num_heads * width, bias=False),
        )
        if reuse:
            self.value = nn.Linear(width, width, bias=False)  # N
            self.share = nn.Parameter(torch.zeros(width))  # a

    def layout(self) -> Layout:
        layout = super().layout()
        return {"key": layout["key"]} if self.reuse else layout

    def _entries(self, x: Tensor, angles: Angles) -> dict[str, Tensor]:
        return {"key": self._heads(x, self.key)} if self.reuse else super()._entries(x, angles)

    def _keys_values(self, entries: dict[str, Tensor], angles: Angles) -> tuple[Tensor, Tensor]:
        if not self.reuse:
            return super()._keys_values(entries, angles)
        return self._rotated(entries["key"], angles), self._of_keys(entries["key"])

    def _of_keys(self, key: Tensor) -> Tensor:
        """Values of keys before rotation, (..., D) -> (..., D), or of their weighted sums."""
        return key + self.share * self.value(key)

    def _is_lean(self, x: Tensor, cache: PositionalCache) -> bool:
        return not self.reuse and type(self)._queries is MHA._queries and cache.is_lean(x)

    def _step(self, q: Tensor, cache: PositionalCache, used: int | Tensor) -> Tensor:
        if not self.reuse:
            return super()._step(q, cache, used)
        (most, before), counts = cache.reads(used), used if isinstance(used, Tensor) else None
        key = cache.text["key"].narrow(2, 0, most)
        if cache.sealed:  # codes cannot be rotated
            assert isinstance(used, int)
            most, key = used, cache.past(used)["key"]
        if counts is None:
            angles = cache.angles(0, most)
        else:
            positions = cache.starts().unsqueeze(1) + torch.arange(most, device=key.device)
            angles = cache.cos[positions], cache.sin[positions]
        prefix = cache.prefix["key"].narrow(2, 0, before)
        out = attend_cached(
            q, self._rotated(key, angles).to(key.dtype), key, self.scale,
            self._rotated(prefix, cache.prefix_angles(0, before)).to(key.dtype), prefix, cache.prefix_mask,
            counts=counts, prefix_counts=cache.prefix_counts, beam=cache.beam,
        )  # fmt: skip
        return self._join(self._of_keys(out.to(q.dtype)))

    def multiply_adds(self, context: int, prefix: int = 0) -> int:
        wide = self.num_heads * self.head_dim
        queries = (self.d_model + wide) * self.query_dim
        values = wide if self.reuse else self.d_model  # columns of the value's matrix times its heads
        return queries + self.head_dim * (self.d_model + values) + wide * self.d_model + 2 * context * wide

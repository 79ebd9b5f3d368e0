"""Grouped latent attention: each group of heads has its own latent, and all share one rotary key."""

import torch
from torch import Tensor, nn

from .bounds import PositiveFloat, Rank, Rate, Rotary, Size
from .mla import MLA, LatentCache, Norm, latent_norm
from .ops.decode import attend_parts
from .ops.partial_softmax import Past, merged_attention
from .ops.rope import rotate
from .positional import Angles


class GLA(MLA):
    r"""Grouped latent attention (Hardware-Efficient Attention for Fast Decoding, arXiv 2505.21487).

    .. math:: c_{jg} = \operatorname{RMSNorm}_g(W_g x_j), \qquad o_{ih} = U^v_h \textstyle\sum_j P_{ihj} c_{jg}, \qquad
        P_{ihj} = \operatorname{softmax}_j\big((q^n_{ih} \cdot U^k_h c_{jg} + q^r_{ih} \cdot k^r_j) /
        \sqrt{d_n + d_r}\big)

    with g = floor(h G / H) and latents of width r / G; other symbols are those of `MLA`. One group is `MLA`. Cache:
    r + d_r elements per token. A device that computes one group needs r / G + d_r of them.

    The released code norms all latents with the weights of the first norm, gives projections biases, and projects
    queries from a latent of 8 head widths. The code of MLRA has a norm for each latent, as here, and no biases. Both
    draw weights from a normal distribution of standard deviation 0.02; here they are PyTorch's.

    Args:
        groups: number of groups G, which must divide the heads and the latent's width.
        latent_dim: width r of the latents together; None: 4 `head_dim`.
        query_latent_dim: width of the RMS-normalised latent of queries; None: queries have none.
        scaled: multiply normalised latents by sqrt(d / their width), for keys, values and queries of the variance of
            their inputs (MLRA's code, also for GLA).
        norm: normalisation of latents; "none" for converted attention.
        Others are those of `MLA`.

    ValueError: `groups` does not divide the heads or the latent, or as for `MLA`.
    """

    branches = 1

    def __init__(
        self,
        d_model: Size,
        num_heads: Size,
        head_dim: Size | None = None,
        rope_dim: Rotary | None = None,
        latent_dim: Rank | None = None,
        groups: Size = 2,
        query_latent_dim: Rank | None = None,
        *,
        scaled: bool = False,
        norm: Norm = "rms",
        norm_eps: PositiveFloat = 1e-6,
        dropout: Rate = 0.0,
        rope_theta: PositiveFloat | None = 10000.0,
    ) -> None:
        super().__init__(
            d_model, num_heads, head_dim, rope_dim, latent_dim, norm="none", dropout=dropout, rope_theta=rope_theta
        )
        self.groups, self.query_latent_dim, self.scaled = groups, query_latent_dim, scaled
        parts, wide = groups * self.branches, self.branches * num_heads
        if groups < 1 or num_heads % groups or self.latent_dim % parts:
            name = f"groups={groups}" if self.branches == 1 else f"latents={parts}"
            raise ValueError(
                f"{name}: expected {groups} groups that divide num_heads={num_heads}, and {parts} latents of equal "
                f"width that make latent_dim={self.latent_dim}"
            )
        if query_latent_dim is not None and query_latent_dim < 1:
            raise ValueError(f"query_latent_dim={query_latent_dim}: expected at least 1")
        width = self.latent_dim // parts
        self.norm = nn.ModuleList(latent_norm(norm, width, norm_eps) for _ in range(parts))
        self.up = nn.Linear(width, wide * 2 * self.head_dim, bias=False)
        if query_latent_dim is not None:
            self.query = nn.Sequential(
                nn.Linear(d_model, query_latent_dim, bias=False),
                nn.RMSNorm(query_latent_dim, eps=norm_eps),
                nn.Linear(query_latent_dim, num_heads * (self.head_dim + self.rope_dim), bias=False),
            )

    @property
    def parts(self) -> int:
        """Number of latents of a position."""
        return self.groups * self.branches

    def up_matrices(self) -> tuple[Tensor, Tensor]:
        """U^k and U^v of each head from its latent, (b H, d_n, w) and (b H, d_v, w), for b branches."""
        value, key = self.up.weight.unflatten(0, (-1, 2, self.head_dim)).unbind(1)
        return key, value

    def _queries(self, x: Tensor, angles: Angles) -> Tensor:
        q = super()._queries(x, angles)
        return q * (self.d_model / self.query_latent_dim) ** 0.5 if self.scaled and self.query_latent_dim else q

    def _latents(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        latent, rotary = self.down(x).split([self.latent_dim, self.rope_dim], -1)
        parts = latent.chunk(self.parts, -1)
        latent = torch.cat([norm(part) for norm, part in zip(self.norm.children(), parts, strict=True)], -1)
        scale = (self.d_model * self.parts / self.latent_dim) ** 0.5 if self.scaled else 1.0
        return latent * scale, rotate(rotary, *angles)

    def _expand(self, latent: Tensor, rotary: Tensor) -> Tensor:
        parts = latent.unflatten(-1, (self.parts, -1))
        both = torch.einsum("btlw,low->btlo", parts, self.up.weight.unflatten(0, (self.parts, -1)).to(parts.dtype))
        both = both.flatten(2).unflatten(-1, (-1, 2 * self.head_dim))
        return torch.cat((both, rotary.to(both.dtype).unsqueeze(2).expand(-1, -1, both.shape[2], -1)), -1)

    def _attend(self, q: Tensor, latent: Tensor, rotary: Tensor, past: list[Past], dropout: float = 0.0) -> Tensor:
        packed = self._expand(latent, rotary)
        return self._join(merged_attention(q, packed, self.head_dim, self.scale, past=past, dropout=dropout))

    def _step(
        self,
        q: Tensor,
        cache: LatentCache,
        used: int | Tensor,
        text_mask: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> Tensor:
        assert text_mask is None and counts is None  # of windows and merged slots, which this class has not
        most, before = cache.reads(used)
        read = attend_parts(
            self._absorbed(q, cache), cache.text["slots"], cache.prefix["slots"], self.parts,
            self.latent_dim // self.parts, cache.prefix_mask, used=most,
            counts=used if isinstance(used, Tensor) else None, prefix_used=before, prefix_counts=cache.prefix_counts,
            beam=cache.beam, older=cache.older("slots"),
        )  # fmt: skip
        out = torch.matmul(read[:, :, 0].transpose(0, 1), cache.up_value).transpose(0, 1)  # (B, b H, d_v)
        return self._join(out.unsqueeze(1).to(q.dtype))

    def multiply_adds(self, context: int, prefix: int = 0) -> int:
        matrices = sum(module.weight.numel() for module in self.modules() if isinstance(module, nn.Linear))
        width = 2 * self.latent_dim // self.parts + self.rope_dim
        return matrices + context * self.branches * self.num_heads * width

"""Multi-head low-rank attention: heads read several latents, each with a softmax of its own."""

import torch
from torch import Tensor

from .bounds import PositiveFloat, Rank, Rate, Rotary, Size
from .gla import GLA
from .mla import Norm
from .positional import Angles


class MLRA(GLA):
    r"""Multi-head low-rank attention (Liu et al., arXiv 2603.02188).

    .. math:: o_{ih} = \tfrac{1}{\sqrt{b}} \textstyle\sum_{n=0}^{b-1} U^v_{hn} \sum_j P_{ihnj}\, c_{j,\,n L / b + g},
        \qquad P_{ihnj} = \operatorname{softmax}_j\big((q^n_{ih} \cdot U^k_{hn} c_{j,\,n L / b + g} +
        q^r_{ih} \cdot k^r_j) / \sqrt{d_n + d_r}\big)

    with g = floor(h L / (b H)): a head reads b of the L latents of width r / L, which are normalised as in `GLA`. One
    branch is `GLA` of L groups. With L = 4, MLRA-2 has two branches and MLRA-4 four. Cache: r + d_r elements per token.

    The scales of latents and of the sum are those of the released code, which projects queries from a latent, draws
    weights from a normal distribution of standard deviation 0.02, and starts the output projection at zero. Here
    initial values are PyTorch's.

    Args:
        branches: number of latents b that a head reads, a divisor of `latents`.
        latents: number L of latents; L / b must divide the heads.
        Others are those of `GLA`.

    ValueError: the heads, the latents and the branches do not divide each other, or as for `MLA`.
    """

    def __init__(
        self,
        d_model: Size,
        num_heads: Size,
        head_dim: Size | None = None,
        rope_dim: Rotary | None = None,
        latent_dim: Rank | None = None,
        branches: Size = 4,
        latents: Size = 4,
        query_latent_dim: Rank | None = None,
        *,
        scaled: bool = True,
        norm: Norm = "rms",
        norm_eps: PositiveFloat = 1e-6,
        dropout: Rate = 0.0,
        rope_theta: PositiveFloat | None = 10000.0,
    ) -> None:
        if branches < 1 or latents < 1 or latents % branches:
            raise ValueError(f"branches={branches}: expected a divisor of latents={latents}")
        self.branches = branches  # read while the base class builds
        super().__init__(
            d_model, num_heads, head_dim, rope_dim, latent_dim, latents // branches, query_latent_dim, scaled=scaled,
            norm=norm, norm_eps=norm_eps, dropout=dropout, rope_theta=rope_theta,
        )  # fmt: skip
        self.latents = latents

    def _queries(self, x: Tensor, angles: Angles) -> Tensor:
        return torch.cat([super()._queries(x, angles)] * self.branches, 2)

    def _join(self, out: Tensor) -> Tensor:
        return super()._join(out.unflatten(2, (self.branches, -1)).sum(2) * self.branches**-0.5)

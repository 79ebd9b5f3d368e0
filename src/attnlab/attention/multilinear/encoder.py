"""The encoder form of multi-linear attention."""

from torch import Tensor, nn

from ..base import blank
from .base import Core, core_gain, core_vectors, diagonals, mean_pairs, projection, readout, through


class MultiLinearEncoder(nn.Module):
    """The tied form for an encoder: every position reads all real ones, and each core has its own read-out.

    y_i = sum_c W_c 1/L sum_{j<L} (sum_r g^c_r q_ir k_jr) v_j, with L a row's length. Parameters 2dR + d d_v (1 + h) +
    hR; T R d_v (1 + h) multiply-adds and projections. The published one weights tokens by features and does not mask
    padding; concatenation would need N^2 d weights for a fixed N.

    Args:
        d_model: width d of inputs and outputs.
        rank: R, width of queries and keys.
        value_dim: d_v, width of values; None: R.
        num_cores: h, core vectors, each with a read-out.
        core: free: the core vectors themselves; softmax: each normalised, as in eq. 6 (see `MultiLinear`).
    """

    def __init__(
        self,
        d_model: int,
        rank: int = 64,
        value_dim: int | None = None,
        num_cores: int = 1,
        *,
        core: Core = "free",
    ) -> None:
        super().__init__()
        self.core = core
        self.rank, self.value_dim = rank, rank if value_dim is None else value_dim
        self.qkv, self.cores = projection(d_model, rank, self.value_dim), core_vectors(num_cores, rank, core)
        self.out = readout(num_cores, self.value_dim, d_model, core_gain(core, rank) * self.value_dim**-0.5)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """(B, T, d), (B,) -> (B, T, d). Right padding changes nothing; outputs at padded positions are unspecified."""
        x = blank(x, lengths)
        q, k, v = self.qkv(x).split([self.rank, self.rank, self.value_dim], -1)
        return self.out(
            through(q.unsqueeze(-2) * diagonals(self.cores, self.core), mean_pairs(k, v, lengths)).flatten(2)
        )

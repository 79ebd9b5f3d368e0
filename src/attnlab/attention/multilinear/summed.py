"""Multi-linear attention whose keys and values are summed before they meet."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..bounds import Size
from .base import Core, StateCache, WithPrefixReadout


class SummedMultiLinear(WithPrefixReadout):
    """Keys and values are summed before they meet: y_i = W (g . q_i . S^K_i . S^V_i), with a read-out of width R.

    S_i = lambda S_{i-1} + sqrt(1 - lambda^2) k_i, the same for v: a decay for each of the 2R components is learned,
    from a memory of two positions to one of a hundred.  (Without decay the product of two growing sums is cubic in
    scale.)  The factor keeps the variance of independent inputs. Parameters 4dR + hR + 2R, with C = 1; T R (d + 3)
    multiply-adds.

    Arguments are those of `MultiLinear`, with values as wide as keys.

    ValueError: a size is below 1, or a prefix is passed without `reads_prefix`.
    """

    accumulates = True

    def __init__(
        self,
        d_model: Size,
        rank: Size = 40,
        num_cores: Size = 1,
        *,
        shared_readout: bool = True,
        core: Core = "free",
        reads_prefix: bool = False,
    ) -> None:
        super().__init__(d_model, rank, num_cores, shared_readout, reads_prefix, rank, 1.0, core)
        memory = 2.0 * 50.0 ** torch.linspace(0, 1, rank)  # 1 / (1 - lambda)
        self.decay = nn.Parameter((memory - 1).log().repeat(2))  # lambda = sigmoid(decay)

    @property
    def state_shape(self) -> tuple[int]:
        return (2 * self.rank,)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, prefix: Tensor | None, size: int | Tensor) -> Tensor:
        return self._read(q, self._sums(k, v, None), prefix)

    def _continue(self, q: Tensor, k: Tensor, v: Tensor, cache: StateCache) -> Tensor:
        sums = self._sums(k, v, cache.text)
        cache.text.copy_(sums[:, -1])
        return self._read(q, sums, cache.prefix)

    def _sums(self, k: Tensor, v: Tensor, before: Tensor | None) -> Tensor:
        """[S^K | S^V], (B, T, 2R), float32 or wider, after the state `before`: doubling, log2 T elementwise passes."""
        wide = torch.promote_types(k.dtype, torch.float32)
        decay, steps = self.decay.to(wide).sigmoid(), k.shape[1]
        sums = torch.cat((k, v), -1).to(wide) * (1 - decay.square()).sqrt()
        reach, power = 1, decay
        while reach < steps:  # sums of the newest `reach` positions -> of twice as many
            sums = sums + power * F.pad(sums[:, :-reach], (0, 0, reach, 0))
            reach, power = 2 * reach, power.square()
        if before is None:
            return sums
        count = torch.arange(1, steps + 1, device=k.device)[:, None]
        return sums + decay**count * before[:, None].to(wide)

    def _read(self, q: Tensor, sums: Tensor, prefix: Tensor | None) -> Tensor:
        keys, values = sums.split(self.rank, -1)
        both = (keys * values).to(q.dtype).unsqueeze(2)
        return self.out((q * both).flatten(2)) + self._read_prefix(q, prefix)

"""Multi-linear attention with a sum over all positions as its state."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..bounds import Size
from .base import Core, MultiLinear, StateCache, WithPrefixReadout, mean_pairs, readout, through


class SummedMultiLinear(WithPrefixReadout):
    r"""Keys and values are summed separately, with a read-out of width R.

    .. math::
        y_i = W (g \odot q_i \odot S^K_i \odot S^V_i), \qquad S^K_i = \lambda S^K_{i-1} + \sqrt{1 - \lambda^2}\, k_i

    S^V sums values in the same way. The decay of each of the 2R components is
    learned, initially from a memory of two positions to one of a hundred. Without decay the product of two growing sums
    would be cubic in scale. The factor preserves the variance of independent inputs. Parameters 4dR + hR + 2R, with
    C = 1; T R (d + 3) multiply-adds.

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
        """[S^K | S^V], (B, T, 2R), float32 or wider, after the state `before`, in log2 T elementwise passes."""
        wide = torch.promote_types(k.dtype, torch.float32)
        decay, steps = self.decay.to(wide).sigmoid(), k.shape[1]
        sums = torch.cat((k, v), -1).to(wide) * (1 - decay.square()).sqrt()
        reach, power = 1, decay
        while reach < steps:  # from sums of the newest `reach` positions to sums of twice as many
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


class TiedMultiLinear(MultiLinear):
    r"""Keys are paired with the values of their positions.

    .. math:: y_i = W \tfrac{1}{i+1} \textstyle\sum_{j \le i} \big(\sum_r g_r q_{ir} k_{jr}\big) v_j

    This is the sum over j of the paper's Corollary 1 (X_im in its proof): linear attention without a feature map, (Q
    diag(g) K^T) V under a causal mask. A prefix of S positions comes first, and the divisor is then S+i+1.
    It does not encode positions. Parameters 2dR + hR + d d_v (1 + C); T C R (d_v + chunk) multiply-adds, and
    projections.

    Args:
        value_dim: width d_v of values; None: R.
        Others are those of `MultiLinear`.

    ValueError: a size is below 1, or a prefix is passed without `reads_prefix`.
    """

    accumulates = True
    chunk = 64  # positions whose products are computed pair by pair; earlier ones are a sum

    def __init__(
        self,
        d_model: Size,
        rank: Size = 40,
        value_dim: Size | None = None,
        num_cores: Size = 1,
        *,
        shared_readout: bool = True,
        core: Core = "free",
        reads_prefix: bool = False,
    ) -> None:
        value_dim = rank if value_dim is None else value_dim
        super().__init__(d_model, rank, num_cores, shared_readout, reads_prefix, value_dim, core)
        self.out = readout(self.num_readouts, value_dim, d_model, self.gain * value_dim**-0.5)

    @property
    def state_shape(self) -> tuple[int, int]:
        return self.rank, self.value_dim

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, prefix: Tensor | None, size: int | Tensor) -> Tensor:
        return self._read(q, k, v, None if prefix is None else self._total(prefix, size, len(q)), 0, size)[0]

    def _continue(self, q: Tensor, k: Tensor, v: Tensor, cache: StateCache) -> Tensor:
        stored = cache.text.to(torch.promote_types(k.dtype, torch.float32)) * cache.start
        prefix = self._total(cache.prefix, cache.prefix_size, len(q)) if self.reads_prefix else 0.0
        out, total = self._read(q, k, v, stored + prefix, cache.start, cache.prefix_size)
        cache.text.copy_((total - prefix) / (cache.start + k.shape[1]))
        return out

    def _encode(self, x: Tensor, lengths: Tensor) -> Tensor:
        """The mean over all pairs of a row, without a mask."""
        q, k, v = self.project(x)
        return self.out(through(q, mean_pairs(k, v, lengths)).flatten(2))

    def _total(self, mean: Tensor, size: int | Tensor, rows: int) -> Tensor:
        """The sum of a prefix's pairs from their mean, for each of its rows, (B, R, V)."""
        wide = mean.to(torch.promote_types(mean.dtype, torch.float32))
        total = wide * (size[:, None, None] if isinstance(size, Tensor) else size)
        return total.repeat_interleave(rows // len(mean), 0)

    def _read(
        self, q: Tensor, k: Tensor, v: Tensor, before: Tensor | None, first: int | Tensor, prefix_size: int | Tensor
    ) -> tuple[Tensor, Tensor]:
        """Output after `first` text positions and a prefix, whose pairs sum to `before`, and the new sum."""
        steps, chunk = k.shape[1], min(k.shape[1], self.chunk)
        wide = torch.promote_types(k.dtype, torch.float32)
        if extra := -steps % chunk:
            q = F.pad(q, (0, 0, 0, 0, 0, extra))
            k, v = (F.pad(t, (0, 0, 0, extra)) for t in (k, v))
        q, k, v = (t.unflatten(1, (-1, chunk)) for t in (q, k, v))  # (B, chunks, chunk, ...)
        totals = (k.mT @ v).to(wide).cumsum(1)
        if before is not None:
            totals = totals + before.unsqueeze(1)
        start = torch.zeros_like(totals[:, :1]) if before is None else before.unsqueeze(1)
        earlier = torch.cat((start, totals[:, :-1]), 1)
        queries = q.transpose(2, 3).flatten(2, 3)  # (B, chunks, C chunk, R)
        within = (queries @ k.mT).unflatten(2, (-1, chunk)).tril().flatten(2, 3) @ v
        read = (within + queries @ earlier.to(queries.dtype)).unflatten(2, (-1, chunk)).transpose(2, 3)
        read = read.flatten(3).flatten(1, 2)[:, :steps]  # (B, T, C V)
        count = first + torch.arange(1, steps + 1, device=k.device)
        if isinstance(prefix_size, Tensor):
            count = count + prefix_size.repeat_interleave(len(q) // len(prefix_size))[:, None]
        else:
            count = count + prefix_size
        return self.out(read / count.unsqueeze(-1).to(read.dtype)), totals[:, -1]

    def multiply_adds(self, context: int, prefix: int = 0) -> int:
        """The state has a fixed size: `context` has no effect."""
        pairs = (self.num_readouts + 1) * self.rank * self.value_dim + self.num_readouts * (self.rank + self.value_dim)
        return self.qkv.weight.numel() + pairs + self.out.weight.numel()

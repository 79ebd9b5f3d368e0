"""The algorithm of the Tensorized Transformer's release: multi-linear attention."""

import torch
from torch import Tensor
from torch.nn import functional as F

from attnlab.attention import AbsoluteMultiLinear, RelativeMultiLinear
from attnlab.bench.baselines.base import Published, PublishedCache, equally_long


class PublishedMultiLinear(Published):
    """The whole N x N x N tensor, once per core, then averaged; no cache, so that a step computes its whole text again.

    Split and concatenated as published (section 3.2, eq. 8): the slice A_i.. of a query, row by row, times W_O. The
    causal mask j, m <= i is added. So are the row scale N / (i + 1) of the absolute form, whose row i sums (i + 1)^2
    terms, and the choice of lags of the relative form. The position key is left out: the release computes a second
    tensor of that size per core. A prefix, which the release lacks, is read as in `MultiLinear`.
    """

    def _forward(
        self, x: Tensor, prefix: Tensor | None, lengths: Tensor | None, prefix_lengths: Tensor | None
    ) -> Tensor:
        equally_long(lengths, x)
        a, steps = self.original, x.shape[1]
        q, k, v = a.qkv(x).split(a.rank, -1)
        tensors = [torch.einsum("r,bir,bjr,bmr->bijm", g, q, k, v) for g in a.core_weights()]
        if a.num_readouts == 1:
            tensors = [torch.stack(tensors).mean(0) if len(tensors) > 1 else tensors[0]]
        read = torch.cat([self._slices(tensor, steps) for tensor in tensors], -1)
        out = F.linear(read, self._weight(steps))
        if isinstance(a, AbsoluteMultiLinear):
            out = out * (a.window / torch.arange(1, steps + 1, device=x.device, dtype=x.dtype))[:, None]
        if prefix is None:
            return out
        equally_long(prefix_lengths, prefix)
        _, k, v = a.qkv(prefix).split(a.rank, -1)
        cores = a.core_weights()
        if a.num_readouts == 1:
            cores = cores.mean(0, keepdim=True)
        return out + a.prefix_out(torch.einsum("cr,bir,bsr,bsm->bicm", cores, q, k, v).flatten(2) / prefix.shape[1])

    def _slices(self, tensor: Tensor, steps: int) -> Tensor:
        """(B, T, T, T) -> what the read-out sees of it, (B, T, slots)."""
        place = torch.arange(steps, device=tensor.device)
        seen = place <= place[:, None]
        tensor = tensor * (seen[:, :, None] & seen[:, None])
        if isinstance(self.original, AbsoluteMultiLinear):
            return tensor.flatten(2)
        window = self.original.window
        lag = place[:, None] - torch.arange(window - 1, -1, -1, device=tensor.device)  # (T, n): j of each slot
        picked = tensor[:, place[:, None, None], lag.clamp(min=0)[:, :, None], lag.clamp(min=0)[:, None]]
        return (picked * ((lag >= 0)[:, :, None] & (lag >= 0)[:, None])).flatten(2)

    def _weight(self, steps: int) -> Tensor:
        weight = self.original.out.weight
        if isinstance(self.original, RelativeMultiLinear) or steps == self.original.window:
            return weight
        return weight.unflatten(1, (-1, self.original.window, self.original.window))[..., :steps, :steps].flatten(1)

    def step(self, x: Tensor, new: Tensor, cache: PublishedCache) -> Tensor:
        prefix = cache.tensors.get("prefix")
        if new.shape[1] > 1:
            prefix = cache.grow("prefix", new[:, :-1], 1)
        return self(cache.grow("text", x, 1), prefix)[:, -1:]

    def cache_elements(
        self, batch: int, capacity: int, prefix_capacity: int = 0, prefix_batch: int | None = None
    ) -> int:
        return batch * (capacity + prefix_capacity) * self.d_model

    def quadratic_bytes(self, batch: int, text: int, prefix: int = 0, layers: int = 1) -> int:
        """The tensor of each core, their mean, the masked one, and two gradients."""
        return int((layers * (self.original.num_cores + 2) + 2) * batch * text**3 * self.original.out.weight.itemsize)

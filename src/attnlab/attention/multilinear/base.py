"""Base classes of the causal multi-linear forms, and their cache: a state of fixed size."""

import math
from abc import abstractmethod
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from ..base import Attention, Cache, length_mask, rows_of, rows_per_prefix

Core = Literal["free", "softmax"]


class StateCache(Cache):
    """A state of the same size at any length: `text` (B, ...) of each row, and `prefix` (N, R, V), the mean P.

    The arguments are those of `Attention.cache_type`. The buffers have the dtype and device of `like`; a state that
    accumulates is float32 or wider.
    """

    def __init__(
        self, attention: "MultiLinear", batch: int, capacity: int, prefix_capacity: int, beam: int, like: Tensor
    ) -> None:
        self.beam, self.capacity, self.prefix_capacity = beam, capacity, prefix_capacity
        self.text = like.new_zeros(batch, *attention.state_shape, dtype=attention.state_dtype(like.dtype))
        self.prefix = like.new_zeros(batch // beam, *attention.prefix_shape)
        self.prefix_size: int | Tensor = 0  # positions; (N,) if prefixes differ in length

    def buffers(self) -> list[Tensor]:
        return [self.text, self.prefix]

    @property
    def can_be_static(self) -> bool:
        return True

    def make_static(self) -> None:
        super().make_static()
        if not isinstance(self.prefix_size, Tensor):
            self.prefix_size = torch.full((len(self.prefix),), self.prefix_size, device=self.prefix.device)

    def reorder(self, rows: Tensor) -> None:
        self.text.copy_(self.text[rows])

    def select(self, prefixes: Tensor) -> None:
        self.text, self.prefix = self.text[rows_of(prefixes, self.beam)], self.prefix[prefixes]
        if isinstance(self.prefix_size, Tensor):
            self.prefix_size = self.prefix_size[prefixes]

    def crop(self, length: int) -> None:
        self._check_crop(length)
        if length not in (0, self.length):
            raise ValueError(
                f"cannot crop to {length} positions: the state is a sum over all {self.length}; crop to 0 and feed "
                "the rest again"
            )
        if not length:
            self.text.zero_()
        self.length = length


class MultiLinear(Attention):
    """Base of the causal forms: one projection x -> [q | k | v] without bias, the cores, the prefix.

    Tensorized Transformer, eq. 6 and 8: G_rrr = softmax(g)_r with trainable g, initialised uniformly in (0, 1), and the
    mean of the tensors of h cores. This is `core="softmax"`: positive weights that sum to 1, also in the mean of cores.
    The released layer applies the softmax once, at construction, and trains the result without constraint. This is
    `core="free"`, here with initial values that preserve the variance of q, k and v. Softmax cores make A smaller by
    R^1/2, which larger initial read-outs compensate. Both have hR parameters and the same functions: any core is a core
    on the simplex times a diagonal matrix, which W_q can absorb.

    Args:
        rank: width R of queries and keys.
        num_cores: number h of core vectors g of width R.
        shared_readout: True: cores are averaged and have one read-out; False: one read-out for each core.
        core: free: core vectors are used directly; softmax: each is normalised, as in eq. 6.
        reads_prefix: whether there are weights for a prefix; without them a prefix is refused.
        value_dim: width V of values.
    """

    cache_type: type[StateCache] = StateCache

    def __init__(
        self,
        d_model: int,
        rank: int,
        num_cores: int,
        shared_readout: bool,
        reads_prefix: bool,
        value_dim: int,
        core: Core = "free",
    ) -> None:
        super().__init__()
        for name, size in (("d_model", d_model), ("rank", rank), ("num_cores", num_cores), ("value_dim", value_dim)):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, not {size}")
        self.d_model, self.rank, self.num_cores, self.value_dim = d_model, rank, num_cores, value_dim
        self.num_readouts, self.reads_prefix = 1 if shared_readout else num_cores, reads_prefix
        self.core = core
        self.qkv = nn.Linear(d_model, 2 * rank + value_dim, bias=False)
        nn.init.normal_(self.qkv.weight, std=d_model**-0.5)
        if core not in get_args(Core):
            raise ValueError(f"core={core}: expected {' or '.join(get_args(Core))}")
        most = (3 / rank) ** 0.5 if core == "free" else 1.0  # free: A_ijm has variance 1 if q, k and v have
        self.cores = nn.Parameter(nn.init.uniform_(torch.empty(num_cores, rank), 0.0, most))

    @property
    def gain(self) -> float:
        """Factor of the initial read-outs relative to free cores.

        Initial entries of softmax cores are about 1 / R, those of free cores about R^-1/2.
        """
        return self.rank**0.5 if self.core == "softmax" else 1.0

    def core_weights(self) -> Tensor:
        """Diagonals of the core tensors, (h, R)."""
        return self.cores.softmax(-1) if self.core == "softmax" else self.cores

    @property
    @abstractmethod
    def state_shape(self) -> tuple[int, ...]:
        """Shape of the cached state of a row, which does not depend on the length."""

    def state_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype of the state in a cache of the given dtype."""
        return torch.promote_types(dtype, torch.float32) if self.accumulates else dtype

    @property
    def prefix_shape(self) -> tuple[int, int]:
        return (self.rank, self.value_dim) if self.reads_prefix else (0, 0)

    @abstractmethod
    def _attend(self, q: Tensor, k: Tensor, v: Tensor, prefix: Tensor | None, size: int | Tensor) -> Tensor:
        """All positions of a text in parallel, (B, T, d).

        q (B, T, C, R), times the cores; k (B, T, R); v (B, T, V); `prefix`: mean P of a prefix, (N, R, V); `size`: its
        number of positions, an int or (N,).
        """

    @abstractmethod
    def _continue(self, q: Tensor, k: Tensor, v: Tensor, cache: StateCache) -> Tensor:
        """Output of new positions after those in `cache`, whose text is updated, but not its `length`."""

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries times the cores (B, T, C, R), keys (B, T, R) and values (B, T, V)."""
        q, k, v = self.qkv(x).split([self.rank, self.rank, self.value_dim], -1)
        cores = self.core_weights()
        if self.num_readouts < self.num_cores:
            cores = cores.mean(0, keepdim=True)
        return q.unsqueeze(-2) * cores, k, v

    def _prefix(self, prefix: Tensor, lengths: Tensor | None) -> Tensor:
        if not self.reads_prefix:
            raise ValueError(
                f"{type(self).__name__} was built without a read-out for a prefix: "
                "build it with reads_prefix=True (attention.reads_prefix=true)"
            )
        _, k, v = self.qkv(prefix).split([self.rank, self.rank, self.value_dim], -1)
        return mean_pairs(k, v, lengths)

    def _forward(
        self, x: Tensor, prefix: Tensor | None, lengths: Tensor | None, prefix_lengths: Tensor | None
    ) -> Tensor:
        if prefix is None:
            return self._attend(*self.project(x), None, 0)
        size = prefix.shape[1] if prefix_lengths is None else prefix_lengths
        return self._attend(*self.project(x), self._prefix(prefix, prefix_lengths), size)

    def _store_prefix(self, prefix: Tensor, prefix_lengths: Tensor | None, cache: Cache) -> None:
        assert isinstance(cache, StateCache)
        cache.prefix.copy_(self._prefix(prefix, prefix_lengths))
        cache.prefix_size = prefix.shape[1] if prefix_lengths is None else prefix_lengths

    def _extend(self, x: Tensor, cache: Cache) -> Tensor:
        assert isinstance(cache, StateCache)
        return self._continue(*self.project(x), cache)

    @property
    def cache_elements_per_token(self) -> float:
        return 0.0

    def cache_elements(
        self, batch: int, capacity: int, prefix_capacity: int = 0, prefix_batch: int | None = None
    ) -> int:
        return self._state_elements(batch) + self._prefix_elements(batch, prefix_batch)

    def cache_bytes(
        self,
        batch: int,
        capacity: int,
        prefix_capacity: int = 0,
        prefix_batch: int | None = None,
        *,
        dtype: torch.dtype,
    ) -> int:
        state = self.state_dtype(dtype).itemsize * self._state_elements(batch)
        return state + dtype.itemsize * self._prefix_elements(batch, prefix_batch)

    def _state_elements(self, batch: int) -> int:
        return batch * math.prod(self.state_shape)

    def _prefix_elements(self, batch: int, prefix_batch: int | None) -> int:
        return batch // rows_per_prefix(batch, prefix_batch) * math.prod(self.prefix_shape)


class WithPrefixReadout(MultiLinear):
    """Base of the forms that read a prefix with separate weights W_P, because they do not read text as pairs.

    Args:
        reads_prefix: whether there is a read-out W_P for a prefix, (d, C R), with C = 1 or h read-outs.
        slots: inputs of the text's read-out per core, for instance n^2 for a window of n.
        std: standard deviation of the initial read-out weights of one core.
        Others are those of `MultiLinear`, with values as wide as keys.
    """

    def __init__(
        self,
        d_model: int,
        rank: int,
        num_cores: int,
        shared_readout: bool,
        reads_prefix: bool,
        slots: int,
        std: float,
        core: Core = "free",
    ) -> None:
        super().__init__(d_model, rank, num_cores, shared_readout, reads_prefix, rank, core)
        self.out = readout(self.num_readouts, slots, d_model, self.gain * std)
        of_prefix = self.gain * rank**-0.5
        self.prefix_out = readout(self.num_readouts, rank, d_model, of_prefix) if reads_prefix else None

    def _read_prefix(self, q: Tensor, mean: Tensor | None) -> Tensor | float:
        """W_P (g . q_i) P for every position, (B, T, d)."""
        if self.prefix_out is None or mean is None:
            return 0.0
        return self.prefix_out(through(q, mean.to(q.dtype)).flatten(2))

    def multiply_adds(self, context: int, prefix: int = 0) -> int:
        """The state has a fixed size: `context` has no effect. With `reads_prefix`, includes reading P."""
        matrices = self.qkv.weight.numel() + self.out.weight.numel()
        if self.prefix_out is not None:
            matrices += self.prefix_out.weight.numel() + self.num_readouts * self.rank**2
        return matrices + self._slice_multiply_adds()

    def _slice_multiply_adds(self) -> int:
        """Multiply-adds for the slice A_i.. of one position."""
        return 0


def readout(count: int, slots: int, d_model: int, std: float) -> nn.Linear:
    """Read-out W_O (d, C slots) of `count` cores, scaled so that their sum has the variance that `std` gives one."""
    linear = nn.Linear(count * slots, d_model, bias=False)
    nn.init.normal_(linear.weight, std=std * count**-0.5)
    return linear


def mean_pairs(k: Tensor, v: Tensor, lengths: Tensor | None) -> Tensor:
    """1/S sum_{s<S} k_s v_s^T: k (N, S, R), v (N, S, V) -> (N, R, V), zero if S = 0.

    lengths (N,) int64 are the lengths of prefixes; None: all have S positions.
    """
    if lengths is None:
        return (k / k.shape[1]).mT @ v
    padding = ~length_mask(lengths, k.shape[1]).unsqueeze(-1)
    k = k.masked_fill(padding, 0.0) / lengths.clamp(min=1)[:, None, None].to(k.dtype)
    return k.mT @ v.masked_fill(padding, 0.0)


def through(q: Tensor, mean: Tensor) -> Tensor:
    """Queries times cores q (B, T, C, R), mean (N, R, V) of each prefix, N divides B -> (B, T, C, V)."""
    return (q.reshape(len(mean), -1, q.shape[-1]) @ mean).view(*q.shape[:-1], -1)

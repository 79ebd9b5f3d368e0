"""Shared by the causal multi-linear forms: projection, cores, read-outs, prefix, and a state of fixed size as cache."""

import math
from abc import abstractmethod
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from ..base import Attention, Cache, length_mask, rows_of, rows_per_prefix

Core = Literal["free", "softmax"]


class StateCache(Cache):
    """A state of one size at any length: `text` (B, ...) of each row, `prefix` (N, R, V), the mean P.

    Made as `Attention.cache_type` says. The buffers have the dtype and device of `like`; a state that accumulates is
    float32 or wider.
    """

    def __init__(
        self, attention: "MultiLinear", batch: int, capacity: int, prefix_capacity: int, beam: int, like: Tensor
    ) -> None:
        self.beam, self.capacity, self.prefix_capacity = beam, capacity, prefix_capacity
        self.text = like.new_zeros(batch, *attention.state_shape, dtype=attention.state_dtype(like.dtype))
        self.prefix = like.new_zeros(batch // beam, *attention.prefix_shape)
        self.prefix_size: int | Tensor = 0  # positions; (N,) where prefixes differ in length

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

    Tensorized Transformer, eq. 6 and 8: G_rrr = softmax(g)_r with trainable g, whose entries rand(0, 1) gives, and the
    tensors of h cores averaged. `core="softmax"` is that: weights that are positive and sum to 1, also those of the
    mean of cores. The released layer takes the softmax once, when it is built, and trains what it gave without any
    constraint: `core="free"`, here with initial values that keep the variance of q, k and v. Softmax cores make A
    smaller by R^1/2, for which the initial read-outs are as much larger. Both have hR parameters and the same
    functions: a core that is not on the simplex is one that is, times a diagonal matrix that W_q takes up.

    Args:
        rank: R, width of queries and keys.
        num_cores: h, core vectors g of width R.
        shared_readout: True: cores are averaged and have one read-out; False: one read-out for each core.
        core: free: the core vectors themselves; softmax: each normalised, as in eq. 6 (see `MultiLinear`).
        reads_prefix: whether there are weights for a prefix; without them a prefix is refused.
        value_dim: V, width of values.
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
        self.cores = core_vectors(num_cores, rank, core)

    @property
    def gain(self) -> float:
        """By how much initial read-outs are larger than those behind free cores.

        The initial entries of softmax cores are about 1 / R, not R^-1/2 as those of free ones.
        """
        return self.rank**0.5 if self.core == "softmax" else 1.0

    def core_weights(self) -> Tensor:
        """The diagonals of the core tensors that the slices are built with, (h, R)."""
        return self.cores.softmax(-1) if self.core == "softmax" else self.cores

    @property
    @abstractmethod
    def state_shape(self) -> tuple[int, ...]:
        """Shape of the state that is cached for each row, whatever its length."""

    def state_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Of the state in a cache of this dtype."""
        return torch.promote_types(dtype, torch.float32) if self.accumulates else dtype

    @property
    def prefix_shape(self) -> tuple[int, int]:
        return (self.rank, self.value_dim) if self.reads_prefix else (0, 0)

    @abstractmethod
    def _attend(self, q: Tensor, k: Tensor, v: Tensor, prefix: Tensor | None, size: int | Tensor) -> Tensor:
        """All positions of a text in parallel, (B, T, d).

        q (B, T, C, R), times the cores; k (B, T, R); v (B, T, V); the mean P of a prefix, (N, R, V), and how many
        positions it is of, an int or (N,).
        """

    @abstractmethod
    def _continue(self, q: Tensor, k: Tensor, v: Tensor, cache: StateCache) -> Tensor:
        """The positions after those that `cache` holds; updates its text. `cache.length` is still the old one."""

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
    """The forms whose text is not read as pairs, and which therefore read a prefix with separate weights W_P.

    Args:
        reads_prefix: whether there is a read-out W_P for a prefix, (d, C R), of C = 1 or h read-outs.
        slots: numbers that one core gives the text's read-out, for instance n^2 for a window of n.
        std: standard deviation of the initial weights of one core's read-out.
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
        """The state has one size: `context` changes nothing. With `reads_prefix` the reading of P is counted in."""
        matrices = self.qkv.weight.numel() + self.out.weight.numel()
        if self.prefix_out is not None:
            matrices += self.prefix_out.weight.numel() + self.num_readouts * self.rank**2
        return matrices + self._slice_multiply_adds()

    def _slice_multiply_adds(self) -> int:
        """Of the slices A_i.. of one position."""
        return 0


def core_vectors(count: int, rank: int, core: Core = "free") -> nn.Parameter:
    """(h, R), uniform, as in eq. 6; free ones such that A_ijm has variance 1 if q, k and v have.

    ValueError: `core` is neither free nor softmax.
    """
    if core not in get_args(Core):
        raise ValueError(f"core={core}: expected {' or '.join(get_args(Core))}")
    return nn.Parameter(nn.init.uniform_(torch.empty(count, rank), 0.0, (3 / rank) ** 0.5 if core == "free" else 1.0))


def readout(count: int, slots: int, d_model: int, std: float) -> nn.Linear:
    """W_O (d, C slots) of `count` cores side by side, together of the variance that `std` gives one."""
    linear = nn.Linear(count * slots, d_model, bias=False)
    nn.init.normal_(linear.weight, std=std * count**-0.5)
    return linear


def mean_pairs(k: Tensor, v: Tensor, lengths: Tensor | None) -> Tensor:
    """1/S sum_{s<S} k_s v_s^T: (N, S, R), (N, S, V), lengths (N,) or None -> (N, R, V); zero where S = 0.

    Args:
        k: keys of the prefixes, (N, S, R).
        v: their values, (N, S, V).
        lengths: (N,) int64, where prefixes differ in length; None: all have S positions.
    """
    if lengths is None:
        return (k / k.shape[1]).mT @ v
    padding = ~length_mask(lengths, k.shape[1]).unsqueeze(-1)
    k = k.masked_fill(padding, 0.0) / lengths.clamp(min=1)[:, None, None].to(k.dtype)
    return k.mT @ v.masked_fill(padding, 0.0)


def through(q: Tensor, mean: Tensor) -> Tensor:
    """(B, T, C, R), (N, R, V) -> (B, T, C, V): the rows of a prefix are one matrix product.

    Args:
        q: queries times the cores, (B, T, C, R).
        mean: the mean of each prefix's pairs, (N, R, V); N divides B.
    """
    return (q.reshape(len(mean), -1, q.shape[-1]) @ mean).view(*q.shape[:-1], -1)

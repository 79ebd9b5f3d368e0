"""Multi-linear (block-term) attention: a third-order tensor of queries, keys and values, made causal.

Tensorized Transformer, section 3:  A_ijm = sum_r g_r q_ir k_jr v_mr,  with q, k, v of width R and a diagonal core g.
No softmax.  In the published code every position reads the future; here A_ijm counts for j <= i and m <= i alone.
The forms differ in how a position's slice A_i.. is read out:

    relative   y_i = sum_{a,b<n} W[:,a,b] A_{i,i-a,i-b}               any length; state 2nR
    absolute   y_i = N/(i+1) sum_{j,m<=i} W[:,j,m] A_ijm              at most N positions; state 2NR
    summed     y_i = W (g . q_i . S^K_i . S^V_i), S decaying sums     any length; state 2R
    tied       y_i = W 1/(i+1) sum_{j<=i} (sum_r g_r q_ir k_jr) v_j   any length, knows no order; state R d_v

Cores: h cores that share a read-out are averaged (paper, eq. 8), and have the function class of one; with
`shared_readout=False` each has its own, y_i = sum_c W_c vec(A^c_i).

Prefix: its positions have no lag and no slot, so every text position reads all of them alike, as the encoder form does:
each key paired with the value beside it, averaged, P = 1/S sum_s k_s v_s^T, and y_i += W_P (g . q_i) P.  P is all that
is cached of a prefix.  The tied form needs no W_P: its pairs are of this kind, and the prefix's simply come first.

Shapes: B rows, N prefixes, T positions, S prefix positions, R rank, V value width, C read-outs, d model width.
"""

import math
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .base import Attention, Cache, begin_prefix, check_room, length_mask, rows_of, rows_per_prefix


class StateCache(Cache):
    """What is held has the same size at any length: `text` (B, ...) of each row, `prefix` (N, R, V), the mean P."""

    def __init__(
        self, attention: "MultiLinear", batch: int, capacity: int, prefix_capacity: int, beam: int, like: Tensor
    ) -> None:
        self.length, self.beam, self.capacity, self.prefix_capacity = 0, beam, capacity, prefix_capacity
        self.text = like.new_zeros(batch, *attention.state_shape)
        self.prefix = like.new_zeros(batch // beam, *attention.prefix_shape)
        self.prefix_size: int | Tensor = 0  # positions; (N,) where prefixes differ in length

    def buffers(self) -> list[Tensor]:
        return [self.text, self.prefix]

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


class SlotCache(StateCache):
    """[key | value] of each place of the window; zero where nothing was read."""

    def crop(self, length: int) -> None:
        self._check_crop(length)
        self.text[:, length:] = 0
        self.length = length


class LagCache(StateCache):
    """[key | value] of the newest n positions, the newest last; zero before the first position."""

    def crop(self, length: int) -> None:
        self._check_crop(length)
        window, dropped = self.text.shape[1], self.length - length
        if dropped and length and self.length > window:
            raise ValueError(
                f"cannot crop to {length} positions: of {self.length} the newest {window} are held, and older ones "
                "would be seen again; crop to 0 and feed the rest again"
            )
        if dropped:
            self.text.copy_(torch.cat((torch.zeros_like(self.text[:, :dropped]), self.text[:, :-dropped]), 1))
        self.length = length


class MultiLinear(Attention):
    """What the causal forms share: one projection x -> [q | k | v] without bias, the cores, the prefix."""

    cache_type: type[StateCache] = StateCache

    def __init__(
        self, d_model: int, rank: int, num_cores: int, shared_readout: bool, reads_prefix: bool, value_dim: int
    ) -> None:
        super().__init__()
        for name, size in (("rank", rank), ("num_cores", num_cores), ("value_dim", value_dim)):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, not {size}")
        self.d_model, self.rank, self.num_cores, self.value_dim = d_model, rank, num_cores, value_dim
        self.num_readouts, self.reads_prefix = 1 if shared_readout else num_cores, reads_prefix
        self.qkv, self.cores = _projection(d_model, rank, value_dim), _cores(num_cores, rank)

    @property
    @abstractmethod
    def state_shape(self) -> tuple[int, ...]:
        """Of what is cached for each row, whatever its length."""

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
        """The same after what `cache` holds, whose text is brought up to date.  Its `length` is still the old one."""

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).split([self.rank, self.rank, self.value_dim], -1)
        cores = self.cores.mean(0, keepdim=True) if self.num_readouts < self.num_cores else self.cores
        return q.unsqueeze(-2) * cores, k, v

    def _prefix(self, prefix: Tensor, lengths: Tensor | None) -> Tensor:
        if not self.reads_prefix:
            raise ValueError(
                f"{type(self).__name__} was built without a read-out for a prefix, and was given one: "
                "build it with reads_prefix=True (attention.reads_prefix=true)"
            )
        _, k, v = self.qkv(prefix).split([self.rank, self.rank, self.value_dim], -1)
        return _mean_pairs(k, v, lengths)

    def forward(
        self,
        x: Tensor,
        prefix: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
        prefix_lengths: Tensor | None = None,
    ) -> Tensor:
        if prefix is None or not prefix.shape[1]:
            return self._attend(*self._project(x), None, 0)
        size = prefix.shape[1] if prefix_lengths is None else prefix_lengths
        return self._attend(*self._project(x), self._prefix(prefix, prefix_lengths), size)

    def new_cache(
        self,
        batch: int,
        capacity: int,
        prefix_capacity: int = 0,
        *,
        prefix_batch: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> StateCache:
        like = self.qkv.weight.new_empty(0, dtype=dtype, device=device)
        return self.cache_type(self, batch, capacity, prefix_capacity, rows_per_prefix(batch, prefix_batch), like)

    @torch.no_grad()
    def read_prefix(self, prefix: Tensor, prefix_lengths: Tensor | None, cache: Cache) -> None:
        assert isinstance(cache, StateCache)
        size = prefix.shape[1]
        begin_prefix(cache, size, cache.prefix_capacity)
        if size:
            cache.prefix.copy_(self._prefix(prefix, prefix_lengths))
            cache.prefix_size = size if prefix_lengths is None else prefix_lengths

    @torch.no_grad()
    def extend(self, x: Tensor, cache: Cache) -> Tensor:
        assert isinstance(cache, StateCache)
        check_room(cache, x.shape[1], cache.capacity)
        out = self._continue(*self._project(x), cache)
        cache.length += x.shape[1]
        return out

    @property
    def cache_elements_per_token(self) -> float:
        return 0.0

    def cache_elements(
        self, batch: int, capacity: int, prefix_capacity: int = 0, prefix_batch: int | None = None
    ) -> int:
        prefixes = batch // rows_per_prefix(batch, prefix_batch)
        return batch * math.prod(self.state_shape) + prefixes * math.prod(self.prefix_shape)


class _WithPrefixReadout(MultiLinear):
    """The forms whose text is not read as pairs, and which therefore read a prefix with weights of its own, W_P."""

    def __init__(
        self, d_model: int, rank: int, num_cores: int, shared_readout: bool, reads_prefix: bool, slots: int, std: float
    ) -> None:
        super().__init__(d_model, rank, num_cores, shared_readout, reads_prefix, rank)
        self.out = _readout(self.num_readouts, slots, d_model, std)
        self.prefix_out = _readout(self.num_readouts, rank, d_model, rank**-0.5) if reads_prefix else None

    def _read_prefix(self, q: Tensor, mean: Tensor | None) -> Tensor | float:
        """W_P (g . q_i) P for every position, (B, T, d)."""
        if self.prefix_out is None or mean is None:
            return 0.0
        return self.prefix_out(_through(q, mean.to(q.dtype)).flatten(2))

    def multiply_adds(self, context: int) -> int:
        """The state has one size: `context` changes nothing.  With `reads_prefix` the reading of P is counted in."""
        matrices = self.qkv.weight.numel() + self.out.weight.numel()
        if self.prefix_out is not None:
            matrices += self.prefix_out.weight.numel() + self.num_readouts * self.rank**2
        return matrices + self._slice_multiply_adds()

    def _slice_multiply_adds(self) -> int:
        """Of the slices A_i.. of one position."""
        return 0


class RelativeMultiLinear(_WithPrefixReadout):
    """Each pair of lags (a, b), a, b < window, has its own weights: y_i = sum_ab W[:,a,b] A_{i,i-a,i-b}.

    Stationary, of any length; position is in W.  Parameters 3dR + hR + C n^2 d; T n^2 (R + d) multiply-adds, in memory
    linear in T.  W's last slot is lag 0: slot s is lag n - 1 - s.  Row scale: none, all rows i >= n - 1 have n^2 terms.
    """

    cache_type = LagCache

    def __init__(
        self,
        d_model: int,
        rank: int = 40,
        window: int = 32,
        num_cores: int = 1,
        *,
        shared_readout: bool = True,
        reads_prefix: bool = False,
    ) -> None:
        _check_window(window)
        super().__init__(d_model, rank, num_cores, shared_readout, reads_prefix, window**2, 1 / window)
        self.window = window

    @property
    def state_shape(self) -> tuple[int, int]:
        return self.window, 2 * self.rank

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, prefix: Tensor | None, size: int | Tensor) -> Tensor:
        return self._slide(q, F.pad(torch.cat((k, v), -1), (0, 0, self.window - 1, 0)), prefix)

    def _slide(self, q: Tensor, keys_values: Tensor, prefix: Tensor | None) -> Tensor:
        """keys_values (B, T + n - 1, 2R): the window of position i is i ... i + n - 1."""
        windows = keys_values.unfold(1, self.window, 1).unsqueeze(2)  # (B, T, 1, 2R, n)
        k, v = windows.split(self.rank, 3)
        slices = (q.unsqueeze(-1) * k).mT @ v  # (B, T, C, n, n)
        return self.out(slices.flatten(2)) + self._read_prefix(q, prefix)

    def _continue(self, q: Tensor, k: Tensor, v: Tensor, cache: StateCache) -> Tensor:
        keys_values = torch.cat((cache.text[:, 1:].to(k.dtype), torch.cat((k, v), -1)), 1)
        newest = torch.cat((cache.text, keys_values[:, self.window - 1 :].to(cache.text.dtype)), 1)
        cache.text.copy_(newest[:, -self.window :])
        return self._slide(q, keys_values, cache.prefix)

    def _slice_multiply_adds(self) -> int:
        return self.num_readouts * self.window**2 * self.rank


class AbsoluteMultiLinear(_WithPrefixReadout):
    """Each pair of places (j, m) of a window of N positions has its own weights: the published layer, made causal.

    Row i sums (i+1)^2 terms and is scaled by N/(i+1), so that all rows have the variance of A.  A text of more than
    `window` positions is refused.  Parameters 3dR + hR + C N^2 d.

    In parallel, naive: the slices A_i.. and their product with W, T^3 (R + d) multiply-adds.  Or a scan over
    B_i[:,r] = sum_{j,m<=i} W[:,j,m] k_jr v_mr, y_i = B_i (g . q_i): T^2 d R.  The first where T (R + d) < d R.
    """

    cache_type = SlotCache

    def __init__(
        self,
        d_model: int,
        rank: int = 40,
        window: int = 32,
        num_cores: int = 1,
        *,
        shared_readout: bool = True,
        reads_prefix: bool = False,
    ) -> None:
        _check_window(window)
        super().__init__(d_model, rank, num_cores, shared_readout, reads_prefix, window**2, 1 / window)
        self.window = self.max_positions = window

    @property
    def state_shape(self) -> tuple[int, int]:
        return self.window, 2 * self.rank

    def scans(self, steps: int) -> bool:
        """Whether the scan is the cheaper way for so many positions."""
        return steps * (self.rank + self.d_model) >= self.rank * self.d_model

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, prefix: Tensor | None, size: int | Tensor) -> Tensor:
        steps = k.shape[1]
        self._check_room(steps)
        # Inside of blocks of R/5 rows the scan adds about a fifth of the rest; fewer than four cost too many calls.
        block = max(4, self.rank // 5) if self.scans(steps) else steps
        return self._blocks(q, k, v, block) + self._read_prefix(q, prefix)

    def _blocks(self, q: Tensor, k: Tensor, v: Tensor, block: int) -> Tensor:
        """Queries (B, T, C, R) of the last T of K positions; k, v (B, K, R).  One block (K) where T < K.

        The rows of a block read the pairs of all earlier blocks through B, and the pairs with a place in their own, an
        L-shaped strip of the (j, m) plane, through their slices.  The strip's products k_j v_m serve both.
        """
        size, steps = k.shape[1], q.shape[1]
        weight = self.out.weight.unflatten(1, (self.num_readouts, self.window, self.window)).transpose(0, 1)
        weights: tuple[Tensor, ...] = _Strips.apply(weight, size, block)  # (C, d, P) each
        place = torch.arange(size, device=k.device)
        keys, values = k.mT, v.mT  # (B, R, K)
        sums: Tensor | None = None  # B of each read-out, (C, B, R, d)
        rows = []
        for start, strip_weight in zip(range(0, size, block), weights, strict=True):
            end = min(start + block, size)
            strip = _strip(start, end)
            pairs = torch.cat([(keys[:, :, j, None] * values[:, :, None, m]).flatten(2) for j, m in strip], -1)
            newest = torch.cat([torch.maximum(place[j, None], place[m]).flatten() for j, m in strip])
            first = max(start, size - steps)
            queries = q[:, first - size + steps : end - size + steps].transpose(1, 2)  # (B, C, rows, R)
            slices = (queries @ pairs.unsqueeze(1)) * (newest <= place[first:end, None])  # (B, C, rows, P)
            both = slices.transpose(0, 1)
            if end < size:
                both = torch.cat((both, pairs.expand(self.num_readouts, *pairs.shape)), 2)
            read = (both.flatten(1, 2) @ strip_weight.mT).unflatten(1, both.shape[1:3])  # (C, B, rows [+ R], d)
            out = read[:, :, : end - first].sum(0)
            if sums is not None:
                out = out + (queries @ sums.transpose(0, 1).to(queries.dtype)).sum(1)
            rows.append(out)
            if end < size:
                more = read[:, :, end - first :].to(torch.promote_types(read.dtype, torch.float32))
                sums = more if sums is None else sums + more
        return torch.cat(rows, 1) * self._row_scale(size - steps, size, k)

    def _row_scale(self, first: int, end: int, like: Tensor) -> Tensor:
        return self.window / torch.arange(first + 1, end + 1, device=like.device)[:, None].to(like.dtype)

    def _continue(self, q: Tensor, k: Tensor, v: Tensor, cache: StateCache) -> Tensor:
        end = cache.length + k.shape[1]
        cache.text[:, cache.length : end] = torch.cat((k, v), -1)
        if k.shape[1] > 1:
            keys, values = cache.text[:, :end].to(k.dtype).split(self.rank, -1)
            return self._blocks(q, keys, values, end) + self._read_prefix(q, cache.prefix)
        keys, values = cache.text.to(k.dtype).unsqueeze(1).split(self.rank, -1)  # (B, 1, N, R); zero where not read
        slices = (q[:, 0].unsqueeze(2) * keys) @ values.mT  # (B, C, N, N)
        read = self.out(slices.flatten(1)).unsqueeze(1) * self._row_scale(cache.length, end, k)
        return read + self._read_prefix(q, cache.prefix)

    def _check_room(self, size: int) -> None:
        if size > self.window:
            raise ValueError(
                f"a text of {size} positions is longer than the window of {self.window} that this attention has "
                "weights for: cut the text, build a wider one, or take the relative form, which has no end"
            )

    def new_cache(
        self,
        batch: int,
        capacity: int,
        prefix_capacity: int = 0,
        *,
        prefix_batch: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> StateCache:
        self._check_room(capacity)
        return super().new_cache(
            batch, capacity, prefix_capacity, prefix_batch=prefix_batch, dtype=dtype, device=device
        )

    def _slice_multiply_adds(self) -> int:
        return self.num_readouts * self.window**2 * self.rank


def _strip(start: int, end: int) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
    """The pairs (j, m) whose later place is one of start ... end-1, as two rectangles."""
    return (slice(start, end), slice(0, end)), (slice(0, start), slice(start, end))


class _Strips(torch.autograd.Function):
    """W (C, d, N, N) -> its strips, (C, d, P) each.  As one function, because autograd fills N x N zeros per slice."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, size: int, block: int) -> tuple[Tensor, ...]:
        ctx.shape, ctx.bounds = weight.shape, [(s, min(s + block, size)) for s in range(0, size, block)]
        return tuple(torch.cat([weight[..., j, m].flatten(2) for j, m in _strip(*b)], 2) for b in ctx.bounds)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        whole = grads[0].new_zeros(ctx.shape)
        for bounds, grad in zip(ctx.bounds, grads, strict=True):
            places = [whole[..., j, m] for j, m in _strip(*bounds)]
            for place, part in zip(places, grad.split([p[0, 0].numel() for p in places], 2), strict=True):
                place.copy_(part.unflatten(2, place.shape[2:]) if part.numel() else place)
        return whole, None, None


class SummedMultiLinear(_WithPrefixReadout):
    """Keys and values are summed before they meet: y_i = W (g . q_i . S^K_i . S^V_i), with a read-out of width R.

    S_i = lambda S_{i-1} + sqrt(1 - lambda^2) k_i, the same for v: a decay for each of the 2R components is learned,
    from a memory of two positions to one of a hundred.  (Without decay the product of two growing sums is cubic in
    scale.)  The factor keeps the variance of independent inputs.  Parameters 4dR + hR + 2R, with C = 1; T R (d + 3)
    multiply-adds.
    """

    def __init__(
        self,
        d_model: int,
        rank: int = 40,
        num_cores: int = 1,
        *,
        shared_readout: bool = True,
        reads_prefix: bool = False,
    ) -> None:
        super().__init__(d_model, rank, num_cores, shared_readout, reads_prefix, rank, 1.0)
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


class TiedMultiLinear(MultiLinear):
    """Keys are paired with the values beside them: y_i = W 1/(i+1) sum_{j<=i} (sum_r g_r q_ir k_jr) v_j.

    The sum over j that the paper's Corollary 1 means (its proof's X_im): linear attention without a feature map, (Q
    diag(g) K^T) V under a causal mask.  A prefix of S positions comes first, and the divisor is then S+i+1.
    It knows no order but that of its rows.  Parameters 2dR + hR + d d_v (1 + C); T C R (d_v + chunk) and projections.
    """

    chunk = 64  # positions whose products are formed pair by pair; the ones before are a sum

    def __init__(
        self,
        d_model: int,
        rank: int = 40,
        value_dim: int | None = None,
        num_cores: int = 1,
        *,
        shared_readout: bool = True,
        reads_prefix: bool = False,
    ) -> None:
        value_dim = rank if value_dim is None else value_dim
        super().__init__(d_model, rank, num_cores, shared_readout, reads_prefix, value_dim)
        self.out = _readout(self.num_readouts, value_dim, d_model, value_dim**-0.5)

    @property
    def state_shape(self) -> tuple[int, int]:
        return self.rank, self.value_dim

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, prefix: Tensor | None, size: int | Tensor) -> Tensor:
        return self._read(q, k, v, None if prefix is None else self._total(prefix, size, len(q)), 0, size)[0]

    def _continue(self, q: Tensor, k: Tensor, v: Tensor, cache: StateCache) -> Tensor:
        held = cache.text.to(torch.promote_types(k.dtype, torch.float32)) * cache.length
        prefix = self._total(cache.prefix, cache.prefix_size, len(q)) if self.reads_prefix else 0.0
        out, total = self._read(q, k, v, held + prefix, cache.length, cache.prefix_size)
        cache.text.copy_((total - prefix) / (cache.length + k.shape[1]))
        return out

    def encode(self, x: Tensor, lengths: Tensor) -> Tensor:
        """(B, T, d), (B,) -> (B, T, d): every position reads all of its row, as `MultiLinearEncoder` does."""
        q, k, v = self._project(x)
        return self.out(_through(q, _mean_pairs(k, v, lengths)).flatten(2))

    def _total(self, mean: Tensor, size: int | Tensor, rows: int) -> Tensor:
        """The sum behind a prefix's mean, for each of its rows, (B, R, V)."""
        wide = mean.to(torch.promote_types(mean.dtype, torch.float32))
        total = wide * (size[:, None, None] if isinstance(size, Tensor) else size)
        return total.repeat_interleave(rows // len(mean), 0)

    def _read(
        self, q: Tensor, k: Tensor, v: Tensor, before: Tensor | None, first: int, prefix_size: int | Tensor
    ) -> tuple[Tensor, Tensor]:
        """After `first` positions and a prefix, whose pairs add up to `before`: the rows, and the sum to go on from."""
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
        own = (queries @ k.mT).unflatten(2, (-1, chunk)).tril().flatten(2, 3) @ v
        read = (own + queries @ earlier.to(queries.dtype)).unflatten(2, (-1, chunk)).transpose(2, 3)
        read = read.flatten(3).flatten(1, 2)[:, :steps]  # (B, T, C V)
        count = torch.arange(first + 1, first + steps + 1, device=k.device)
        if isinstance(prefix_size, Tensor):
            count = count + prefix_size.repeat_interleave(len(q) // len(prefix_size))[:, None]
        else:
            count = count + prefix_size
        return self.out(read / count.unsqueeze(-1).to(read.dtype)), totals[:, -1]

    def multiply_adds(self, context: int) -> int:
        """The state has one size: `context` changes nothing."""
        pairs = (self.num_readouts + 1) * self.rank * self.value_dim + self.num_readouts * (self.rank + self.value_dim)
        return self.qkv.weight.numel() + pairs + self.out.weight.numel()


class MultiLinearEncoder(nn.Module):
    """The tied form for an encoder: every position reads all real ones, and each core has its own read-out.

    y_i = sum_c W_c 1/L sum_{j<L} (sum_r g^c_r q_ir k_jr) v_j, with L a row's length.  Parameters 2dR + d d_v (1 + h) +
    hR; T R d_v (1 + h) multiply-adds and projections.  The published one weights tokens by features and does not mask
    padding; concatenation would need N^2 d weights for a fixed N.
    """

    def __init__(self, d_model: int, rank: int = 64, value_dim: int | None = None, num_cores: int = 1) -> None:
        super().__init__()
        self.rank, self.value_dim = rank, rank if value_dim is None else value_dim
        self.qkv, self.cores = _projection(d_model, rank, self.value_dim), _cores(num_cores, rank)
        self.out = _readout(num_cores, self.value_dim, d_model, self.value_dim**-0.5)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """(B, T, d), (B,) -> (B, T, d).  Right padding changes nothing; what stands in its rows is unspecified."""
        q, k, v = self.qkv(x).split([self.rank, self.rank, self.value_dim], -1)
        return self.out(_through(q.unsqueeze(-2) * self.cores, _mean_pairs(k, v, lengths)).flatten(2))


def _projection(d_model: int, rank: int, value_dim: int) -> nn.Linear:
    linear = nn.Linear(d_model, 2 * rank + value_dim, bias=False)
    nn.init.normal_(linear.weight, std=d_model**-0.5)
    return linear


def _cores(count: int, rank: int) -> nn.Parameter:
    """Uniform, as in eq. 6, and such that A_ijm has variance 1 if q, k and v have."""
    return nn.Parameter(nn.init.uniform_(torch.empty(count, rank), 0.0, (3 / rank) ** 0.5))


def _readout(count: int, slots: int, d_model: int, std: float) -> nn.Linear:
    """W_O of `count` cores side by side, together of the variance that `std` gives one."""
    linear = nn.Linear(count * slots, d_model, bias=False)
    nn.init.normal_(linear.weight, std=std * count**-0.5)
    return linear


def _mean_pairs(k: Tensor, v: Tensor, lengths: Tensor | None) -> Tensor:
    """1/S sum_{s<S} k_s v_s^T: (N, S, R), (N, S, V), lengths (N,) or None -> (N, R, V); zero where S = 0."""
    if lengths is None:
        return (k / k.shape[1]).mT @ v
    padding = ~length_mask(lengths, k.shape[1]).unsqueeze(-1)
    k = k.masked_fill(padding, 0.0) / lengths.clamp(min=1)[:, None, None].to(k.dtype)
    return k.mT @ v.masked_fill(padding, 0.0)


def _through(q: Tensor, mean: Tensor) -> Tensor:
    """(B, T, C, R), (N, R, V) -> (B, T, C, V): the rows of a prefix are one matrix product."""
    return (q.reshape(len(mean), -1, q.shape[-1]) @ mean).view(*q.shape[:-1], -1)


def _check_window(window: int) -> None:
    if window < 1:
        raise ValueError(f"window must be at least 1, not {window}")

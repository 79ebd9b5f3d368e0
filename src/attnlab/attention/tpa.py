"""Tensor product attention: queries, keys and values as short sums of head factor (x) token factor."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .base import Attention, Cache, begin_prefix, check_room, length_mask, rows_of, rows_per_prefix
from .ops.partial_softmax import Past, rebuilt_attention, tiled_attention
from .ops.rope import rotary_table, rotate

TILE = 2048  # cached positions at a time: of their products with a query, or of their keys and values, built again

Angles = tuple[Tensor, Tensor]  # cos and sin of positions, (B or 1, positions, pairs)
Span = Callable[[int, int], Angles]  # those of the positions first ... last - 1
Init = Literal["paper_merged", "paper_per_rank", "released"]
Nonlinearity = Literal["none", "sigmoid", "softmax"]


class Factors(NamedTuple):
    """Of T positions, B and T 1 where all share them; ranks of queries, then of keys, then of values."""

    head: Tensor  # (B, T, ranks, h)
    token: Tensor  # (B, T, ranks, w), those of queries and keys rotated
    query: Tensor | None = None  # (B, T, h, D) where queries are not factorised and have no ranks


class Held(NamedTuple):
    """Cached factors: heads (B, R, h, positions), tokens (B, R, positions, w).  None: not cached.

    Positions lie as a step reads them: along the rows of its matrix products.
    """

    key_head: Tensor | None
    key_token: Tensor | None
    value_head: Tensor | None
    value_token: Tensor | None

    def map(self, head: Callable[[Tensor], Tensor], token: Callable[[Tensor], Tensor] | None = None) -> "Held":
        functions = (head, token or head) * 2
        return Held(*(None if t is None else function(t) for function, t in zip(functions, self, strict=True)))

    def span(self, first: int, last: int) -> "Held":
        return self.map(lambda head: head[..., first:last], lambda token: token[:, :, first:last])

    def tensors(self) -> list[Tensor]:
        return [t for t in self if t is not None]


class FactorCache(Cache):
    """Factors of `batch` rows' text, `capacity` positions, and of prefixes, `prefix_capacity` positions."""

    def __init__(
        self, attention: "TPA", batch: int, capacity: int, prefix_capacity: int, beam: int, like: Tensor
    ) -> None:
        self.length, self.beam, self.capacity, self.prefix_capacity = 0, beam, capacity, prefix_capacity
        self.text = attention.held(batch, capacity, like)
        self.prefix = attention.held(batch // beam, prefix_capacity, like)
        self.prefix_size = 0
        self.prefix_lengths: Tensor | None = None  # set where prefixes differ in length
        self.prefix_mask: Tensor | None = None
        positions = prefix_capacity + capacity
        self.cos, self.sin = rotary_table(attention.turned, attention.rope_theta, positions, like.dtype, like.device)

    def buffers(self) -> list[Tensor]:
        return [*self.text.tensors(), *self.prefix.tensors()]

    def reorder(self, rows: Tensor) -> None:
        for used in self.text.span(0, self.length).tensors():
            used.copy_(used[rows])

    def select(self, prefixes: Tensor) -> None:
        rows = rows_of(prefixes, self.beam)
        self.text, self.prefix = self.text.map(lambda t: t[rows]), self.prefix.map(lambda t: t[prefixes])
        if self.prefix_lengths is not None and self.prefix_mask is not None:
            self.prefix_lengths, self.prefix_mask = self.prefix_lengths[prefixes], self.prefix_mask[prefixes]

    def crop(self, length: int) -> None:
        self._check_crop(length)
        self.length = length

    def angles(self, first: int, last: int) -> Angles:
        """Of text positions."""
        if self.prefix_lengths is None:
            span = slice(self.prefix_size + first, self.prefix_size + last)
            return self.cos[None, span], self.sin[None, span]
        lengths = self.prefix_lengths.repeat_interleave(self.beam)
        positions = lengths[:, None] + torch.arange(first, last, device=lengths.device)
        return self.cos[positions], self.sin[positions]

    def prefix_angles(self, first: int, last: int) -> Angles:
        return self.cos[None, first:last], self.sin[None, first:last]


class Segment(NamedTuple):
    """Cached positions that rows read: each its own text, or the prefix that it shares with others."""

    held: Held
    size: int
    angles: Span
    mask: Tensor | None = None  # (N, size) bool: which positions exist

    def tiles(self, size: int) -> Iterator["Segment"]:
        for first in range(0, self.size, size):
            last = min(first + size, self.size)
            mask = None if self.mask is None else self.mask[:, first:last]
            yield Segment(self.held.span(first, last), last - first, partial(self._shifted, first), mask)

    def _shifted(self, by: int, first: int, last: int) -> Angles:
        return self.angles(by + first, by + last)


class Block(NamedTuple):
    """A part of the factor projection: `ranks` factors of a width, all of queries, of keys or of values."""

    kind: Literal["head", "token"]
    ranks: int
    width: int

    def bound(self, d_model: int, init: Init) -> float:
        """Of the uniform distribution that its weights are drawn from.

        The paper: Xavier, of one rank's matrix or of all ranks' merged (section 3.1 writes both).  The released code:
        Xavier of a view with three axes, of which torch takes the last for a receptive field (spec 1.6).
        """
        if init == "released":
            inner, outer = (self.ranks, self.width) if self.kind == "head" else (self.width, self.ranks)
            return math.sqrt(6 / (inner * (outer + d_model)))
        return math.sqrt(6 / (d_model + self.width * (self.ranks if init == "paper_merged" else 1)))


class TPA(Attention):
    """Tensor product attention (TPA paper, section 3, eq. 3.1 to 3.7).

    Q_t = 1/R_Q sum_r a_r (x) T_t b_r,  K_t = 1/R_K sum_r a_r (x) T_t b_r,  V_t = 1/R_V sum_r a_r (x) b_r,  each (h, D),
    of head factors a_r = f(W x_t) in R^h and token factors b_r = W x_t in R^D, T_t the rotation of position t;
    then softmax(Q K^T / sqrt(D)) V per head.  R_K = R_V = `rank`, R_Q = `q_rank`; f is `nonlinearity` (section 3.5;
    softmax: over the heads).  `third_dim` = d_c: b_r = vec(b'_r (x) c_r), c_r in R^{d_c}, and b'_r alone is rotated
    (appendix C).  `output_norm`: RMS norm of each head's output, one weight vector for all heads.  No biases.
    Cache: the factors, (R_K + R_V)(h + D) elements per token.

    In parallel, queries, keys and values are built from the factors, and in backward once more.  A step works on the
    factors, unless building keys and values takes fewer multiply-adds (long chunks, many hypotheses on one prefix).
    """

    factorised_queries = True

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        head_dim: int | None = None,
        rank: int = 2,
        q_rank: int = 6,
        third_dim: int | None = None,
        *,
        nonlinearity: Nonlinearity = "none",
        output_norm: bool = False,
        init: Init = "paper_merged",
        dropout: float = 0.0,
        rope_theta: float = 10000.0,
    ) -> None:
        super().__init__()
        head_dim = d_model // num_heads if head_dim is None else head_dim
        for name, value in (("rank", rank), *([("q_rank", q_rank)] if self.factorised_queries else [])):
            if not 1 <= value <= min(num_heads, head_dim):
                raise ValueError(
                    f"{name}={value}: expected 1 to {min(num_heads, head_dim)}; "
                    f"{num_heads} heads x {head_dim} have no more ranks"
                )
        if third_dim is not None and (third_dim < 1 or head_dim % third_dim):
            raise ValueError(f"third_dim={third_dim}: expected a divisor of head_dim={head_dim}")
        self.turned = head_dim // (third_dim or 1)  # components of a token factor that are rotated
        if self.turned % 2:
            raise ValueError(f"rotary embedding turns pairs: a token factor cannot have {self.turned} components")
        self.d_model, self.num_heads, self.head_dim, self.third_dim = d_model, num_heads, head_dim, third_dim
        self.rank, self.q_rank, self.ranks = rank, q_rank, q_rank + 2 * rank
        self.token_dim = self.turned + (third_dim or 0)
        self.nonlinearity, self.dropout, self.rope_theta = nonlinearity, dropout, rope_theta
        self.scale = head_dim**-0.5 / (max(q_rank, 1) * rank)
        blocks = self._blocks()
        self.factors = nn.Linear(d_model, sum(block.ranks * block.width for block in blocks), bias=False)
        self.norm = nn.RMSNorm(head_dim, eps=1e-5) if output_norm else nn.Identity()
        self.out = nn.Linear(num_heads * head_dim, d_model, bias=False)
        rows = self.factors.weight.detach().split([block.ranks * block.width for block in blocks])
        for part, block in zip(rows, blocks, strict=True):
            bound = block.bound(d_model, init)
            nn.init.uniform_(part, -bound, bound)
        self._learn(init)

    # Where the factors come from and what is cached: what the variants change.

    def _blocks(self) -> list[Block]:
        """Parts of the factor projection: head factors of queries, keys and values, token factors, third factors."""
        return self._head_blocks() + self._token_blocks()

    def _head_blocks(self) -> list[Block]:
        return [Block("head", ranks, self.num_heads) for ranks in self._counts if ranks]

    def _token_blocks(self) -> list[Block]:
        widths = [self.turned] if self.third_dim is None else [self.turned, self.third_dim]
        return [Block("token", ranks, width) for width in widths for ranks in self._counts if ranks]

    def _learn(self, init: Init) -> None:
        """Make the factors that no input changes."""

    def _compact(self, x: Tensor) -> tuple[Tensor, ...]:
        """What queries, keys and values of x (B, T, d) are built of; first a (B, T, .) that depends on x."""
        return (self.factors(x),)

    def _split(self, y: Tensor, *more: Tensor) -> Factors:
        """Linear head factors, and unrotated token factors."""
        head, token = y.tensor_split([self.ranks * self.num_heads], -1)
        return Factors(head.unflatten(-1, (self.ranks, -1)), self._tokens(token))

    def _tokens(self, token: Tensor) -> Tensor:
        """(., ranks w) as projected -> (., ranks, w)."""
        ranks = token.shape[-1] // self.token_dim
        if self.third_dim is None:
            return token.unflatten(-1, (ranks, -1))
        second, third = token.split([ranks * self.turned, ranks * self.third_dim], -1)
        return torch.cat((second.unflatten(-1, (ranks, -1)), third.unflatten(-1, (ranks, -1))), -1)

    def held(self, rows: int, positions: int, like: Tensor) -> Held:
        """Empty buffers."""
        head = (rows, self.rank, self.num_heads, positions)
        token = (rows, self.rank, positions, self.token_dim)
        return Held(*(like.new_zeros(shape) for shape in (head, token, head, token)))

    def _stored(self, new: Held) -> Held:
        """New factors as the cache keeps them."""
        return new

    def _keys(self, segment: "Segment") -> tuple[Tensor, Tensor]:
        """Cached head factors (B or 1, R, h, size or 1), and token factors (B or 1, R, size, w), rotated."""
        held = segment.held
        assert held.key_head is not None and held.key_token is not None
        return held.key_head, held.key_token

    def _values(self, segment: "Segment") -> tuple[Tensor, Tensor]:
        """The same of values, nothing rotated; token factors may be (1, R, 1, w)."""
        held = segment.held
        assert held.value_head is not None and held.value_token is not None
        return held.value_head, held.value_token

    # From factors to queries, keys and values.

    def _factors(self, angles: Angles, *compact: Tensor) -> Factors:
        f = self._split(*compact)
        query = f.query
        if query is not None:
            cos, sin = (t[..., None, None, :] for t in angles)
            query = rotate(query.unflatten(-1, (-1, self.turned)), cos, sin).flatten(-2)
        return Factors(self._activate(f.head), self._rotate(f.token, angles, self.q_rank + self.rank), query)

    def _activate(self, head: Tensor) -> Tensor:
        match self.nonlinearity:
            case "sigmoid":
                return head.sigmoid()
            case "softmax":
                return head.softmax(-1)
        return head

    def _rotate(self, token: Tensor, angles: Angles, ranks: int) -> Tensor:
        """(B, T, ranks, w): the first so many ranks turned, of a third-order factor b' alone."""
        cos, sin = (t.unsqueeze(-2) for t in angles)
        turned, rest = rotate(token[..., :ranks, : self.turned], cos, sin), token[..., ranks:, :]
        if self.third_dim is not None:
            turned = torch.cat((turned, token[..., :ranks, self.turned :].expand(*turned.shape[:-1], -1)), -1)
        return torch.cat((turned, rest.expand(*turned.shape[:-2], -1, -1)), -2) if rest.shape[-2] else turned

    def _whole(self, token: Tensor) -> Tensor:
        """(., w) -> (., D): vec(b' (x) c), column by column, of third-order factors."""
        if self.third_dim is None:
            return token
        second, third = token.split([self.turned, self.third_dim], -1)
        return (third.unsqueeze(-1) * second.unsqueeze(-2)).flatten(-2)

    def _build(self, angles: Angles, heads: slice, *compact: Tensor) -> tuple[Tensor, Tensor]:
        """Of some heads: q (B, T, H, D) and [value | key] (B, T, H, 2 D)."""
        return self._dense(self._factors(angles, *compact), heads)

    def _dense(self, f: Factors, heads: slice = slice(None)) -> tuple[Tensor, Tensor]:
        head, token = f.head[..., heads].split(self._counts, -2), self._whole(f.token).split(self._counts, -2)
        query = head[0].mT @ token[0] if f.query is None else f.query[..., heads, :]
        return query, self._pack(head[1], token[1], head[2], token[2])

    def _pack(self, key_head: Tensor, key_token: Tensor, value_head: Tensor, value_token: Tensor) -> Tensor:
        """(B, T, R, H) and (B, T, R, D) -> [value | key], (B, T, H, 2 D)."""
        width = self.head_dim
        head = torch.cat((value_head / self.rank, key_head), -2)
        value_token = value_token.expand_as(key_token)
        token = torch.cat((F.pad(value_token, (0, width)), F.pad(key_token, (width, 0))), -2)
        return head.mT @ token  # one product with a block diagonal, for keys and values beside each other

    @property
    def _counts(self) -> list[int]:
        """Ranks of queries, keys and values."""
        return [self.q_rank, self.rank, self.rank]

    def _finish(self, out: Tensor) -> Tensor:
        """(B, T, h, D) -> (B, T, d)."""
        return self.out(self.norm(out).flatten(2))

    def forward(
        self,
        x: Tensor,
        prefix: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
        prefix_lengths: Tensor | None = None,
    ) -> Tensor:
        steps, start = x.shape[1], 0 if prefix is None else prefix.shape[1]
        cos, sin = rotary_table(self.turned, self.rope_theta, start + steps, x.dtype, x.device)
        angles = cos[None, start:], sin[None, start:]
        if prefix_lengths is not None:
            positions = prefix_lengths[:, None] + torch.arange(steps, device=x.device)
            angles = cos[positions], sin[positions]
        past = []
        if prefix is not None and start:
            mask = None if prefix_lengths is None else length_mask(prefix_lengths, start)
            before = cos[None, :start], sin[None, :start]
            past.append(Past(self._build(before, slice(None), *self._compact(prefix))[1], mask))
        out = rebuilt_attention(
            partial(self._build, angles), self._compact(x), self.num_heads, self.head_dim, self.scale,
            past=past, dropout=self.dropout if self.training else 0.0,
        )  # fmt: skip
        return self._finish(out)

    # The cache, and what reads it.

    def new_cache(
        self,
        batch: int,
        capacity: int,
        prefix_capacity: int = 0,
        *,
        prefix_batch: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> FactorCache:
        like = self.out.weight.new_empty(0, dtype=dtype, device=device)
        return FactorCache(self, batch, capacity, prefix_capacity, rows_per_prefix(batch, prefix_batch), like)

    def _keep(self, f: Factors, held: Held, first: int, size: int) -> None:
        """Write new factors of keys and values into the cache, from position `first` on."""
        head, token = f.head.split(self._counts, -2), f.token.split(self._counts, -2)
        new = Held(head[1], token[1], head[2], token[2]).map(lambda t: t.movedim(1, -1), lambda t: t.transpose(1, 2))
        for buffer, values in zip(held.span(first, first + size), self._stored(new), strict=True):
            if buffer is not None and values is not None:
                buffer.copy_(values)

    @torch.no_grad()
    def read_prefix(self, prefix: Tensor, prefix_lengths: Tensor | None, cache: Cache) -> None:
        assert isinstance(cache, FactorCache)
        size = prefix.shape[1]
        begin_prefix(cache, size, cache.prefix_capacity)
        self._keep(self._factors(cache.prefix_angles(0, size), *self._compact(prefix)), cache.prefix, 0, size)
        cache.prefix_size = size
        if prefix_lengths is not None and bool((prefix_lengths != size).any()):
            cache.prefix_lengths, cache.prefix_mask = prefix_lengths, length_mask(prefix_lengths, size)

    @torch.no_grad()
    def extend(self, x: Tensor, cache: Cache) -> Tensor:
        assert isinstance(cache, FactorCache)
        new, start, size = x.shape[1], cache.length, cache.prefix_size
        check_room(cache, new, cache.capacity)
        f = self._factors(cache.angles(start, start + new), *self._compact(x))
        self._keep(f, cache.text, start, new)
        cache.length = start + new
        prefixes = Segment(cache.prefix.span(0, size), size, cache.prefix_angles, cache.prefix_mask)
        if self.in_factor_space(new, cache.beam, start + new, size):
            text = Segment(cache.text.span(0, start + new), start + new, cache.angles)
            return self._finish(self._step(f, len(x), [prefixes, text] if size else [text]))
        before = Segment(cache.text.span(0, start), start, cache.angles)
        q, packed = self._dense(f)
        past = (self._rebuild(tile, q) for segment in (before, prefixes) for tile in segment.tiles(TILE))
        return self._finish(tiled_attention(q, packed, self.head_dim, self.scale, past))

    def in_factor_space(self, new: int, beam: int, text: int, prefix: int) -> bool:
        """Whether `new` positions of each of `beam` rows take fewer multiply-adds on factors than on keys and values.

        Those must be built first, of `text` positions of each row and of the `prefix` that the rows share.  Chunks
        whose logits would outgrow them are no case for factor space either, which has no fused kernel.
        """
        dense = 2 * self.num_heads * self.head_dim  # of a query and a position, given key and value
        pairs, positions = beam * new * (text + prefix), beam * text + prefix
        return new <= 2 * self.head_dim and pairs * sum(self._step_costs()) <= (positions * self.rank + pairs) * dense

    def _step_costs(self) -> tuple[int, int]:
        """Multiply-adds of a query and a cached position: for the logits of all heads, and for reading the value."""
        h, width = self.num_heads, self.head_dim
        key = self.q_rank * (width + h) if self._on_query_factors else h * width
        return self.rank * key, self.rank * h * width

    @property
    def _on_query_factors(self) -> bool:
        """Whether a step multiplies the keys' factors by those of the queries, or by the queries."""
        return (
            self.factorised_queries and self.q_rank * (self.head_dim + self.num_heads) <= self.num_heads * self.head_dim
        )

    def _rebuild(self, tile: Segment, like: Tensor) -> Past:
        """Keys and values of cached positions."""
        factors = []
        for head, token in (self._keys(tile), self._values(tile)):
            factors += [head.to(like.dtype).movedim(-1, 1), self._whole(token.to(like.dtype)).transpose(1, 2)]
        return Past(self._pack(*factors), tile.mask)

    def _step(self, f: Factors, batch: int, segments: list[Segment]) -> Tensor:
        """Outputs (B, n, h, D) of each row's newest n positions, which are the last of the last segment."""
        dtype = segments[-1].held.tensors()[0].dtype
        head, token = f.head[..., : self.q_rank, :].to(dtype), self._whole(f.token[..., : self.q_rank, :].to(dtype))
        query: tuple[Tensor, ...] = (head.mT * self.scale, token)
        if not self._on_query_factors:
            query = ((head.mT @ token if f.query is None else f.query.to(dtype)) * self.scale,)
        new = max(t.shape[1] for t in query)
        tiles = [tile for segment in segments for tile in _tiles(segment)]
        logits = torch.cat([self._logits(query, batch, tile) for tile in tiles], -1)
        if new > 1:
            future = torch.ones(new, new, dtype=torch.bool, device=logits.device).triu(1)
            logits[..., -new:].masked_fill_(future[:, None], float("-inf"))
        p = logits.softmax(-1, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)
        weights = p.split([tile.size for tile in tiles], -1)
        out = self._read(weights[0], tiles[0])
        for each, tile in zip(weights[1:], tiles[1:], strict=True):
            out += self._read(each, tile)
        return (out / self.rank).to(f.head.dtype)

    def _logits(self, query: tuple[Tensor, ...], batch: int, tile: Segment) -> Tensor:
        """(B, n, h, size): head factors (B or 1, n, h, R_Q) and token factors (B or 1, n, R_Q, D), or (B, n, h, D)."""
        rows = len(tile.held.tensors()[0])
        head, token = self._keys(tile)
        parts = [_fold(t, batch, rows) for t in query]
        count = parts[-1].shape[1]
        product = parts[-1].flatten(1, 2).unsqueeze(1) @ self._whole(token).mT  # (N, R, beam n R_Q or h, size)
        product = product.unflatten(2, (count, -1))
        if len(parts) == 2:
            product = parts[0].unsqueeze(1) @ product
        logits = product[:, 0] * head[:, 0].unsqueeze(1)
        for r in range(1, self.rank):
            logits = torch.addcmul(logits, product[:, r], head[:, r].unsqueeze(1))
        if tile.mask is not None:
            logits.masked_fill_(~tile.mask[:, None, None], float("-inf"))
        return _unfold(logits, batch, rows)

    def _read(self, p: Tensor, tile: Segment) -> Tensor:
        """Weights (B, n, h, size) -> (B, n, h, D), R_V times the output."""
        batch, rows = len(p), len(tile.held.tensors()[0])
        head, token = self._values(tile)
        p = _fold(p, batch, rows)
        weights = p.unsqueeze(1) * head.unsqueeze(2)  # (N, R, beam n, h, size)
        if token.shape[2] < tile.size:  # the same of all positions
            weights = weights.sum(-1, keepdim=True)
        out = (weights.flatten(2, 3) @ self._whole(token)).sum(1).unflatten(1, p.shape[1:3])
        return _unfold(out, batch, rows)

    def multiply_adds(self, context: int) -> int:
        built = (
            0 if self._on_query_factors or not self.factorised_queries else self.num_heads * self.q_rank * self.head_dim
        )
        matrices = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        return matrices + built + context * sum(self._step_costs())

    @property
    def cache_elements_per_token(self) -> float:
        return float(sum(t.numel() for t in self.held(1, 1, torch.empty(0, device="meta")).tensors()))

    def cache_elements(
        self, batch: int, capacity: int, prefix_capacity: int = 0, prefix_batch: int | None = None
    ) -> int:
        prefixes = batch // rows_per_prefix(batch, prefix_batch)
        return int(self.cache_elements_per_token) * (batch * capacity + prefixes * prefix_capacity)


def _tiles(segment: Segment) -> Iterator[Segment]:
    """Parts whose products stay in the processor's caches; compiled code would be made anew for each number of them."""
    return iter([segment]) if torch.compiler.is_compiling() else segment.tiles(TILE)


def _fold(x: Tensor, batch: int, rows: int) -> Tensor:
    """(B or 1, n, ...) -> (N, beam n, ...): the rows that share a prefix query it together."""
    return x if rows == batch else x.expand(batch, *x.shape[1:]).unflatten(0, (rows, -1)).flatten(1, 2)


def _unfold(x: Tensor, batch: int, rows: int) -> Tensor:
    return x if rows == batch else x.unflatten(1, (batch // rows, -1)).flatten(0, 1)


class TPAKVOnly(TPA):
    """TPA of keys and values alone; queries are projected whole, and not divided by a rank (section 3.5)."""

    factorised_queries = False

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        head_dim: int | None = None,
        rank: int = 2,
        third_dim: int | None = None,
        *,
        nonlinearity: Nonlinearity = "none",
        output_norm: bool = False,
        init: Init = "paper_merged",
        dropout: float = 0.0,
        rope_theta: float = 10000.0,
    ) -> None:
        super().__init__(
            d_model, num_heads, head_dim, rank, 0, third_dim, nonlinearity=nonlinearity, output_norm=output_norm,
            init=init, dropout=dropout, rope_theta=rope_theta,
        )  # fmt: skip
        self.query = nn.Linear(d_model, num_heads * self.head_dim, bias=False)
        nn.init.xavier_uniform_(self.query.weight)

    def _compact(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.factors(x), self.query(x)

    def _split(self, y: Tensor, *more: Tensor) -> Factors:
        return super()._split(y)._replace(query=more[0].unflatten(-1, (self.num_heads, -1)))


class TPANonContextualA(TPA):
    """TPA with learned head factors, a_r in R^h (section 3.4).  Cache: (R_K + R_V) D elements per token.

    MHA is this with R = h and a_i = h e_i, MQA with R = 1 and a = (1, ..., 1), GQA with R = G and a_g = G on group g.
    """

    def _head_blocks(self) -> list[Block]:
        return []

    def _learn(self, init: Init) -> None:
        self.head_factors = _learned(super()._head_blocks(), self.d_model, init)

    def _compact(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.factors(x), self.head_factors

    def _split(self, y: Tensor, *more: Tensor) -> Factors:
        return Factors(more[0].to(y.dtype)[None, None], self._tokens(y))

    def held(self, rows: int, positions: int, like: Tensor) -> Held:
        return super().held(rows, positions, like)._replace(key_head=None, value_head=None)

    def _heads_of(self, rank: int, like: Tensor) -> Tensor:
        """R head factors from number `rank` on, (1, R, h, 1)."""
        return self._activate(self.head_factors[rank : rank + self.rank]).to(like.dtype)[None, :, :, None]

    def _keys(self, segment: Segment) -> tuple[Tensor, Tensor]:
        token = segment.held.key_token
        assert token is not None
        return self._heads_of(self.q_rank, token), token

    def _values(self, segment: Segment) -> tuple[Tensor, Tensor]:
        token = segment.held.value_token
        assert token is not None
        return self._heads_of(self.q_rank + self.rank, token), token


class TPANonContextualB(TPA):
    """TPA with learned token factors, b_r in R^D, rotated by position (section 3.5).  Cache: (R_K + R_V) h elements."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        head_dim: int | None = None,
        rank: int = 2,
        q_rank: int = 6,
        *,
        nonlinearity: Nonlinearity = "none",
        output_norm: bool = False,
        init: Init = "paper_merged",
        dropout: float = 0.0,
        rope_theta: float = 10000.0,
    ) -> None:
        super().__init__(
            d_model, num_heads, head_dim, rank, q_rank, nonlinearity=nonlinearity, output_norm=output_norm, init=init,
            dropout=dropout, rope_theta=rope_theta,
        )  # fmt: skip

    def _token_blocks(self) -> list[Block]:
        return []

    def _learn(self, init: Init) -> None:
        self.token_factors = _learned(super()._token_blocks(), self.d_model, init)

    def _compact(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.factors(x), self.token_factors

    def _split(self, y: Tensor, *more: Tensor) -> Factors:
        return Factors(y.unflatten(-1, (self.ranks, -1)), more[0].to(y.dtype)[None, None])

    def held(self, rows: int, positions: int, like: Tensor) -> Held:
        return super().held(rows, positions, like)._replace(key_token=None, value_token=None)

    def _keys(self, segment: Segment) -> tuple[Tensor, Tensor]:
        head = segment.held.key_head
        assert head is not None
        token = self.token_factors[None, None, self.q_rank : self.q_rank + self.rank].to(head.dtype)
        return head, self._rotate(token, segment.angles(0, segment.size), self.rank).transpose(1, 2)

    def _values(self, segment: Segment) -> tuple[Tensor, Tensor]:
        head = segment.held.value_head
        assert head is not None
        return head, self.token_factors[None, self.q_rank + self.rank :, None].to(head.dtype)

    def _step_costs(self) -> tuple[int, int]:
        return super()._step_costs()[0], 0

    def multiply_adds(self, context: int) -> int:
        return super().multiply_adds(context) + self.rank * self.num_heads * self.head_dim


class TPASharedB(TPA):
    """TPA whose keys and values share their token factors, before these are rotated for the keys (section 3.5).

    Cache: (R_K + R_V) h + R D elements per token: the unrotated factor, which a step rotates as it reads it.
    """

    def _token_blocks(self) -> list[Block]:
        blocks = super()._token_blocks()
        return [block for i, block in enumerate(blocks) if i % 3 < 2]  # of queries and of keys

    def _split(self, y: Tensor, *more: Tensor) -> Factors:
        head, token = super()._split(y)[:2]
        return Factors(head, torch.cat((token, token[..., self.q_rank :, :]), -2))

    def held(self, rows: int, positions: int, like: Tensor) -> Held:
        return super().held(rows, positions, like)._replace(value_token=None)

    def _stored(self, new: Held) -> Held:
        return new._replace(key_token=new.value_token)

    def _keys(self, segment: Segment) -> tuple[Tensor, Tensor]:
        head, token = super()._keys(segment)
        angles = segment.angles(0, segment.size)
        return head, self._rotate(token.transpose(1, 2), angles, self.rank).transpose(1, 2)

    def _values(self, segment: Segment) -> tuple[Tensor, Tensor]:
        head, token = segment.held.value_head, segment.held.key_token
        assert head is not None and token is not None
        return head, token


def _learned(blocks: list[Block], d_model: int, init: Init) -> nn.Parameter:
    """(ranks, width) factors with the spread that projected ones have where x has variance one."""
    factors = nn.Parameter(torch.empty(sum(block.ranks for block in blocks), blocks[0].width))
    for part, block in zip(factors.detach().split([block.ranks for block in blocks]), blocks, strict=True):
        bound = block.bound(d_model, init) * math.sqrt(d_model)
        nn.init.uniform_(part, -bound, bound)
    return factors

"""Tensor product attention: queries, keys and values are sums of a few outer products."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..base import Cache, head_width, length_mask
from ..bounds import PositiveFloat, Rank, Rate, Size
from ..ops.backends import Backend, choose
from ..ops.decode import share
from ..ops.kernels import FACTOR_RANKS, FACTOR_WIDTH
from ..ops.native import Layer, eps_of, linear, norm_kind
from ..ops.partial_softmax import Past, rebuilt_attention, tiled_attention
from ..ops.rope import rotate
from ..ops.sdpa import fold, unfold
from ..positional import Angles, Layout, PositionalAttention, PositionalCache
from .factors import TILE, Block, Buffers, FactorCache, Factors, FactorSegment, Init, Nonlinearity

BUILT = 32  # multiply-adds of a query that take as long as building one key and value, in a step on a CPU (measured)


class TPA(PositionalAttention):
    r"""Tensor product attention (TPA paper, section 3, eq. 3.1 to 3.7).

    .. math::
        Q_t = \tfrac{1}{R_Q} \textstyle\sum_r a^Q_r \otimes T_t b^Q_r, \qquad
        K_t = \tfrac{1}{R_K} \sum_r a^K_r \otimes T_t b^K_r, \qquad
        V_t = \tfrac{1}{R_V} \sum_r a^V_r \otimes b^V_r

    each (h, D), with head factors a_r = f(W x_t) in R^h, token factors b_r = W x_t in R^D, and the rotation T_t of
    position t; then softmax(Q K^T / sqrt(D)) V per head. No biases.
    Cache: the factors, (R_K + R_V)(h + D) elements per token.

    The parallel form builds queries, keys and values from the factors, and backward builds them again. A step computes
    with the factors, unless building keys and values takes fewer multiply-adds: for long chunks, and for many
    hypotheses that share a prefix.

    Args:
        num_heads: number of heads h.
        head_dim: width D of a head; None: d / h.
        rank: R_K = R_V, 1 to min(h, D).
        q_rank: R_Q, 1 to min(h, D).
        third_dim: d_c of third-order token factors b_r = vec(b'_r (x) c_r), c_r in R^{d_c}, of which only b'_r is
            rotated (appendix C of the seventh version); it divides D. None: token factors are vectors.
        nonlinearity: f, applied to head factors (section 3.5): "none", "sigmoid", or "softmax" over the heads.
        output_norm: RMS norm of each head's output, with one weight vector for all heads.
        init: initial spread of factor projections: the paper's for the merged matrix or for the matrix of each rank
            (section 3.1 states both), or that of the released code.
        rope_theta: base of the rotary frequencies; None: frequencies are a buffer, saved with the weights.

    ValueError: `num_heads` does not divide `d_model` and `head_dim` is None, a rank or `third_dim` is out of its
    bounds, or an odd number of components would be rotated.
    """

    cache_type = FactorCache
    factorised_queries = True
    has_kernel = True  # whether `ops.kernels.factor` supports the cache

    def __init__(
        self,
        d_model: Size,
        num_heads: Size,
        head_dim: Size | None = None,
        rank: Rank = 2,
        q_rank: Rank = 6,
        third_dim: Size | None = None,
        *,
        nonlinearity: Nonlinearity = "none",
        output_norm: bool = False,
        init: Init = "paper_merged",
        dropout: Rate = 0.0,
        rope_theta: PositiveFloat | None = 10000.0,
    ) -> None:
        super().__init__()
        head_dim = head_width(d_model, num_heads, head_dim)
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
            raise ValueError(f"rotary embedding rotates pairs: a token factor cannot have {self.turned} components")
        self.d_model, self.num_heads, self.head_dim, self.third_dim = d_model, num_heads, head_dim, third_dim
        self.rank, self.q_rank, self.ranks = rank, q_rank, q_rank + 2 * rank
        self.token_dim = self.turned + (third_dim or 0)
        self.nonlinearity, self.dropout = nonlinearity, dropout
        self._rotary(self.turned, rope_theta)
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

    # Sources of the factors, and cache entries. Variants override these.

    def _blocks(self) -> list[Block]:
        """Parts of the factor projection: head factors of queries, keys and values, token factors, third factors."""
        return self._head_blocks() + self._token_blocks()

    def _head_blocks(self) -> list[Block]:
        return [Block("head", ranks, self.num_heads) for ranks in self._counts if ranks]

    def _token_blocks(self) -> list[Block]:
        widths = [self.turned] if self.third_dim is None else [self.turned, self.third_dim]
        return [Block("token", ranks, width) for width in widths for ranks in self._counts if ranks]

    def _learn(self, init: Init) -> None:
        """Create the factors that do not depend on the input."""

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Project x (B, T, d) to the tensors that queries, keys and values are built from; the first is (B, T, .)."""
        return (linear(self.factors, x),)

    def _split(self, y: Tensor, *more: Tensor) -> Factors:
        """Head factors before the nonlinearity, and token factors before rotation."""
        head, token = y.tensor_split([self.ranks * self.num_heads], -1)
        return Factors(head.unflatten(-1, (self.ranks, -1)), self._tokens(token))

    def _tokens(self, token: Tensor) -> Tensor:
        """Projected token factors (., ranks * w) -> (., ranks, w)."""
        ranks = token.shape[-1] // self.token_dim
        if self.third_dim is None:
            return token.unflatten(-1, (ranks, -1))
        second, third = token.split([ranks * self.turned, ranks * self.third_dim], -1)
        return torch.cat((second.unflatten(-1, (ranks, -1)), third.unflatten(-1, (ranks, -1))), -1)

    def layout(self) -> Layout:
        head, token = (self.rank, self.num_heads, None), (self.rank, None, self.token_dim)
        return {"key_head": head, "key_token": token, "value_head": head, "value_token": token}

    def _keys(self, segment: FactorSegment) -> tuple[Tensor, Tensor]:
        """Cached head factors (B or 1, R, h, size or 1), and token factors (B or 1, R, size, w), rotated."""
        return segment.buffers["key_head"], segment.buffers["key_token"]

    def _values(self, segment: FactorSegment) -> tuple[Tensor, Tensor]:
        """As :meth:`_keys` for values, which are not rotated; token factors may be (1, R, 1, w)."""
        return segment.buffers["value_head"], segment.buffers["value_token"]

    # From factors to queries, keys and values.

    def rotated_factors(self, angles: Angles, *compact: Tensor) -> Factors:
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
        """Rotate the first `ranks` ranks of token factors (B, T, ., w); of third-order factors, only b'."""
        cos, sin = (t.unsqueeze(-2) for t in angles)
        turned, rest = rotate(token[..., :ranks, : self.turned], cos, sin), token[..., ranks:, :]
        if self.third_dim is not None:
            turned = torch.cat((turned, token[..., :ranks, self.turned :].expand(*turned.shape[:-1], -1)), -1)
        return torch.cat((turned, rest.expand(*turned.shape[:-2], -1, -1)), -2) if rest.shape[-2] else turned

    def _vectors(self, token: Tensor) -> Tensor:
        """(., w) -> (., D): vec(b' (x) c), column by column, for third-order factors."""
        if self.third_dim is None:
            return token
        second, third = token.split([self.turned, self.third_dim], -1)
        return (third.unsqueeze(-1) * second.unsqueeze(-2)).flatten(-2)

    def _shared(self, angles: Angles, *compact: Tensor) -> tuple[Tensor, ...]:
        """The fields of `Factors` that are not None."""
        return tuple(t for t in self.rotated_factors(angles, *compact) if t is not None)

    def _build(self, heads: slice, *shared: Tensor) -> tuple[Tensor, Tensor]:
        return self.dense(Factors(*shared), heads)

    def dense(self, f: Factors, heads: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """q (B, T, H, D) and [value | key] (B, T, H, 2 D) of the given heads."""
        head, token = f.head[..., heads].split(self._counts, -2), self._vectors(f.token).split(self._counts, -2)
        query = head[0].mT @ token[0] if f.query is None else f.query[..., heads, :]
        return query, self._pack(head[1], token[1], head[2], token[2])

    def _pack(self, key_head: Tensor, key_token: Tensor, value_head: Tensor, value_token: Tensor) -> Tensor:
        """(B, T, R, H) and (B, T, R, D) -> [value | key], (B, T, H, 2 D)."""
        width = self.head_dim
        head = torch.cat((value_head / self.rank, key_head), -2)
        value_token = value_token.expand_as(key_token)
        token = torch.cat((F.pad(value_token, (0, width)), F.pad(key_token, (width, 0))), -2)
        return head.mT @ token  # one product with a block-diagonal matrix for keys and values

    @property
    def _counts(self) -> list[int]:
        """Ranks of queries, keys and values."""
        return [self.q_rank, self.rank, self.rank]

    def _finish(self, out: Tensor) -> Tensor:
        """(B, T, h, D) -> (B, T, d)."""
        return linear(self.out, self.norm(out).flatten(2))

    def _forward(
        self, x: Tensor, prefix: Tensor | None, lengths: Tensor | None, prefix_lengths: Tensor | None
    ) -> Tensor:
        angles, before = self._angles(x, prefix, prefix_lengths)
        past = []
        if prefix is not None:
            mask = None if prefix_lengths is None else length_mask(prefix_lengths, prefix.shape[1])
            past.append(Past(self.dense(self.rotated_factors(before, *self.project(prefix)))[1], mask))
        out = rebuilt_attention(
            partial(self._shared, angles), self._build, self.project(x), self.num_heads, self.head_dim, self.scale,
            past=past, dropout=self.dropout if self.training else 0.0,
        )  # fmt: skip
        return self._finish(out)

    # Cached steps.

    def _entries(self, x: Tensor, angles: Angles) -> Buffers:
        return self._cached(self.rotated_factors(angles, *self.project(x)))

    def _cached(self, f: Factors) -> Buffers:
        """Factors of keys and values in the layout of the cache."""
        head, token = f.head.split(self._counts, -2), f.token.split(self._counts, -2)
        every = {"key_head": head[1], "key_token": token[1], "value_head": head[2], "value_token": token[2]}
        return {
            name: every[name].movedim(1, -1) if name.endswith("head") else every[name].transpose(1, 2)
            for name in self.layout()
        }

    def _extend(self, x: Tensor, cache: Cache) -> Tensor:
        assert isinstance(cache, FactorCache)
        new, start, size = x.shape[1], cache.start, cache.prefix_size
        f = self.rotated_factors(cache.angles(start, start + new), *self.project(x))
        cache.write(cache.text, start, self._cached(f))
        if not cache.coded and self.step_backend(new, next(iter(cache.text.values()))) is Backend.TRITON:
            return self._finish(self.read_by_kernel(f, len(x), cache))
        prefixes, older = cache.prefix_segment(), cache.coded_segments()
        if isinstance(start, Tensor) or self.in_factor_space(new, cache.beam, start + new, size):
            text = cache.text_segment(start + new)
            return self._finish(
                self.read_factors(f, len(x), [*older, prefixes, text] if prefixes.size else [*older, text])
            )
        q, packed = self.dense(f)
        segments = *older, cache.text_segment(start), prefixes
        past = (self._rebuild(tile, q) for segment in segments for tile in segment.tiles(TILE))
        return self._finish(tiled_attention(q, packed, self.head_dim, self.scale, past))

    def native_layer(self, cache: PositionalCache) -> Layer | None:
        if (
            self.third_dim is not None
            or self.nonlinearity != "none"
            or norm_kind(self.norm, self.head_dim) in (2, None)
        ):
            return None
        rows, _, _, capacity = cache.text["key_head"].shape
        return Layer(
            "factors_step", self, factors=(self.factors, self.ranks * (self.num_heads + self.head_dim), self.d_model),
            out=(self.out, self.d_model, self.num_heads * self.head_dim), cos=cache.cos, sin=cache.sin,
            norm=getattr(self.norm, "weight", None), eps=eps_of(self.norm), **cache.text,
            **{f"prefix_{name}": buffer for name, buffer in cache.prefix.items()}, **cache.native_prefix(),
            rows=rows, d=self.d_model, heads=self.num_heads, width=self.head_dim, rank=self.rank,
            q_rank=self.q_rank, capacity=capacity, scale=self.scale,
        )  # fmt: skip

    def step_backend(self, new: int, like: Tensor) -> Backend:
        """Backend of the next `new` positions: TRITON, the kernel `ops.kernels.factor`, or PLAIN.

        The kernel supports one position, up to 8 ranks and heads up to 256 wide, in TPA, TPA of keys and values only,
        third-order factors, and learned head factors. It does not support learned token factors, whose keys are rotated
        when they are read and whose values are shared by all positions, and token factors that keys and values share,
        which are cached unrotated. PLAIN computes these by matrix products on every device.

        Args:
            like: a buffer of the cache, for its dtype and device.
        """
        small = self.rank <= FACTOR_RANKS and self.head_dim <= FACTOR_WIDTH
        if new == 1 and self.has_kernel and small and choose("step", like, masked=True) is Backend.TRITON:
            return Backend.TRITON
        return Backend.PLAIN

    def in_factor_space(self, new: int, beam: int, text: int, prefix: int) -> bool:
        """Whether `new` positions of `beam` rows take less work with factors than with keys and values.

        Keys and values must be built first, for `text` positions of each row and for the `prefix` that the rows share.
        For a step, their many small products cost as much as `BUILT` multiply-adds of a query each (measured on a CPU).
        Factor space has no fused kernel: chunks of more than 2 D positions, whose logits are larger than the keys and
        values, are computed with keys and values.
        """
        dense = 2 * self.num_heads * self.head_dim  # multiply-adds of a query with one key and value
        pairs, positions = beam * new * (text + prefix), beam * text + prefix
        built = positions * (BUILT if new == 1 else self.rank)
        return new <= 2 * self.head_dim and pairs * sum(self._step_costs()) <= (built + pairs) * dense

    def _step_costs(self) -> tuple[int, int]:
        """Multiply-adds of a query with a cached position: for the logits of all heads, and for reading the value."""
        h, width = self.num_heads, self.head_dim
        key = self.q_rank * (width + h) if self._on_query_factors else h * width
        return self.rank * key, self.rank * h * width

    @property
    def _on_query_factors(self) -> bool:
        """Whether a step multiplies the factors of keys by the factors of queries, rather than by queries."""
        h, width = self.num_heads, self.head_dim
        return self.factorised_queries and self.q_rank * (width + h) <= h * width

    def _rebuild(self, tile: FactorSegment, like: Tensor) -> Past:
        """Keys and values of cached positions."""
        factors = []
        for head, token in (self._keys(tile), self._values(tile)):
            factors += [head.to(like.dtype).movedim(-1, 1), self._vectors(token.to(like.dtype)).transpose(1, 2)]
        return Past(self._pack(*factors), tile.mask)

    def read_by_kernel(self, f: Factors, batch: int, cache: FactorCache) -> Tensor:
        """Output (B, 1, h, D) of each row's newest position, which is already in the cache."""
        from ..ops.kernels.factor import FactorPart, factor_decode

        text = FactorSegment(cache.text, cache.capacity, cache.angles)
        parts = [FactorPart(*self._keys(text), *self._values(text), cache.start + 1)]
        if cache.prefix_size:
            prefix = FactorSegment(cache.prefix, cache.prefix_capacity, cache.prefix_angles)
            count = cache.prefix_size if cache.prefix_lengths is None else cache.prefix_lengths
            parts.append(FactorPart(*self._keys(prefix), *self._values(prefix), count))
        head, query = None, f.query
        if query is None:
            head = f.head[:, 0, : self.q_rank].to(text.like.dtype).expand(batch, -1, -1)
            query = self._vectors(f.token[:, :, : self.q_rank])
        query = query[:, 0].to(text.like.dtype).expand(batch, -1, -1)
        read = factor_decode(query, parts, self.scale, query_head=head, third_dim=self.third_dim)
        return read.unsqueeze(1).to(f.head.dtype)

    def read_factors(self, f: Factors, batch: int, segments: list[FactorSegment]) -> Tensor:
        """Output (B, n, h, D) of each row's newest n positions, which are the last of the last segment."""
        dtype = segments[-1].like.dtype
        head, token = f.head[..., : self.q_rank, :].to(dtype), self._vectors(f.token[..., : self.q_rank, :].to(dtype))
        query: tuple[Tensor, ...] = (head.mT * self.scale, token)
        if not self._on_query_factors:
            query = ((head.mT @ token if f.query is None else f.query.to(dtype)) * self.scale,)
        new = max(t.shape[1] for t in query)
        query = tuple(t.expand(-1, new, -1, -1) for t in query)  # learned factors have one position
        tiles = [tile for segment in segments for tile in _tiles(segment)]
        for tile in tiles:
            share(batch, tile.beam, tile.rows)
        logits_by_tile = [self._logits(query, batch, tile) for tile in tiles]
        logits = torch.cat(logits_by_tile, -1) if len(logits_by_tile) > 1 else logits_by_tile[0]
        if new > 1:
            future = torch.ones(new, new, dtype=torch.bool, device=logits.device).triu(1)
            logits[..., -new:].masked_fill_(future[:, None], float("-inf"))
        p = logits.softmax(-1, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)
        weights = p.split([tile.size for tile in tiles], -1)
        out = self._read(weights[0], tiles[0])
        for weight, tile in zip(weights[1:], tiles[1:], strict=True):
            out += self._read(weight, tile)
        return (out / self.rank).to(f.head.dtype)

    def _logits(self, query: tuple[Tensor, ...], batch: int, tile: FactorSegment) -> Tensor:
        """Logits (B, n, h, size) of queries (B, n, h, D), or of factors (B or 1, n, h, R_Q) and (B or 1, n, R_Q, D)."""
        head, token = self._keys(tile)
        parts = [_fold(t, batch, tile.beam) for t in query]
        count = parts[-1].shape[1]
        product = parts[-1].flatten(1, 2).unsqueeze(1) @ self._vectors(token).mT  # (N, R, beam n R_Q or h, size)
        product = product.unflatten(2, (count, -1))
        if len(parts) == 2:
            product = parts[0].unsqueeze(1) @ product
        logits = product[:, 0].mul_(head[:, 0].unsqueeze(1))  # in place: these are the largest tensors of a step
        for r in range(1, self.rank):
            logits.addcmul_(product[:, r], head[:, r].unsqueeze(1))
        if tile.mask is not None:
            logits.masked_fill_(~tile.mask[:, None, None], float("-inf"))
        return unfold(logits, tile.beam)

    def _read(self, p: Tensor, tile: FactorSegment) -> Tensor:
        """Softmax weights (B, n, h, size) -> (B, n, h, D), R_V times the output."""
        head, token = self._values(tile)
        p = _fold(p, len(p), tile.beam)
        weights = p.unsqueeze(1) * head.unsqueeze(2)  # (N, R, beam n, h, size)
        if token.shape[2] < tile.size:  # all positions share it
            weights = weights.sum(-1, keepdim=True)
        out = (weights.flatten(2, 3) @ self._vectors(token)).sum(1).unflatten(1, p.shape[1:3])
        return unfold(out, tile.beam)

    def multiply_adds(self, context: int, prefix: int = 0) -> int:
        built = self.num_heads * self.q_rank * self.head_dim if self.factorised_queries else 0  # of the query
        matrices = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        return matrices + (0 if self._on_query_factors else built) + context * sum(self._step_costs())


def _tiles(segment: FactorSegment) -> Iterator[FactorSegment]:
    """Parts whose products fit into the processor's caches; one part in compiled code, to compile only once."""
    return iter([segment]) if torch.compiler.is_compiling() else segment.tiles(TILE)


def _fold(x: Tensor, batch: int, beam: int) -> Tensor:
    """(B or 1, n, ...) -> (N, beam * n, ...): rows that share a prefix query it together."""
    return x if beam == 1 else fold(x.expand(batch, *x.shape[1:]), beam)

"""Mechanisms of attnlab over the pages of the engine's KV cache.

A step gathers the pages of its requests into the buffers of attnlab's own cache, runs attnlab's own `extend`, and
writes the new slots back. Requests with one new token, as in decoding, are one batch with a length for each row.
Longer chunks of a prompt are computed one by one.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec, SlidingWindowMLASpec

from attnlab.attention import TPA
from attnlab.attention.base import length_mask
from attnlab.attention.positional import PositionalAttention, PositionalCache
from attnlab.export import serving


class RaggedCache(PositionalCache):
    """A cache without buffers of its own, whose rows have different lengths.

    With one new position for each row it is a static cache whose `static_length` is (B,), else it has one row.
    """

    def open(self, text: dict[str, Tensor], slots: int, length: int | Tensor) -> None:
        """Continue rows of `length` positions, an int or (B,), in buffers (B, ...) with `slots` slots."""
        self.text, self.length, self.static_length = text, 0, None
        if isinstance(length, Tensor):
            self.static_length = length.clone()  # a step adds one to it
        else:
            self.length = length
        self.text_reads, self.prefix_reads = self.cos.new_empty(slots, 0), self.cos.new_empty(0, 0)
        self.prefix_ends = torch.zeros(1, dtype=torch.int64, device=self.cos.device)

    def write(self, buffers: dict[str, Tensor], first: int | Tensor, new: dict[str, Tensor]) -> None:
        if not isinstance(first, Tensor):
            return super().write(buffers, first, new)
        rows = torch.arange(len(first), device=first.device)
        for name, values in new.items():
            axis = self.axes[name]
            buffers[name].movedim(axis, 1)[rows, first] = values.movedim(axis, 1)[:, 0]

    def text_segment(self, size: int | Tensor) -> Any:
        """As in `FactorCache`, with sizes (B,)."""
        if not isinstance(size, Tensor):
            return super().text_segment(size)  # type: ignore[misc]
        segment = super().text_segment(size[:, None])  # type: ignore[misc]
        return segment._replace(mask=segment.mask[0])


@dataclass
class Part:
    """Requests of a step with the same number n of new tokens.

    Attributes:
        tokens: places of the new tokens in the step, (B, n).
        positions: their positions in their requests, (B, n).
        table: pages of each request, (B, pages); only those of `length` positions are filled.
        length: positions of the longest request, the new ones included.
        cached: positions before the new ones, if there is one request; None: the first of `positions` says it.
    """

    tokens: Tensor
    positions: Tensor
    table: Tensor
    length: int
    cached: int | None = None


class PartsBuilder(AttentionMetadataBuilder[list[Part]]):
    """Divides the requests of a step: one batch of those with one new token, and the others one by one."""

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> list[Part]:
        given = common_attn_metadata
        starts, lengths = given.query_start_loc.tolist(), given.seq_lens.tolist()
        counts = [last - first for first, last in zip(starts, starts[1 : given.num_reqs + 1], strict=False)]
        table, device = given.block_table_tensor, given.block_table_tensor.device

        def column(values: list[int]) -> Tensor:
            return torch.tensor(values, device=device)[:, None]

        parts = []
        if single := [row for row, count in enumerate(counts) if count == 1]:
            ends = [lengths[row] for row in single]
            tokens = column([starts[row] for row in single])
            parts.append(Part(tokens, column(ends) - 1, table[column(single)[:, 0]], max(ends)))
        for row, count in enumerate(counts):
            if count > 1:
                new, cached = torch.arange(count, device=device)[None], lengths[row] - count
                pages = table[row : row + 1]
                parts.append(Part(starts[row] + new, cached + new, pages, lengths[row], cached))
        return parts


class PagedBackend(AttentionBackend):
    """Names the builder; :class:`PagedAttention` computes."""

    supported_dtypes = [torch.float32, torch.bfloat16, torch.float16]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # the engine's name of a backend that is not its own

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("the layer computes")

    @staticmethod
    def get_builder_cls() -> type[PartsBuilder]:
        return PartsBuilder


class Pages(AttentionLayerBase):
    """Pages of the engine that all layers with one window have in common, or all parts of layers without one.

    A page has the slots of one layer after those of another.

    Args:
        groups: what each layer has in the pages of each window.
        window: newest positions that are read, the new one included; 0: all are.

    Attributes:
        kv_cache: (pages, 1, ., .), which the engine sets. Its pages may have more numbers than its view.
    """

    supports_dcp = False

    def __init__(self, name: str, engine: VllmConfig, groups: serving.Shares, window: int) -> None:
        self.name, self.groups, self.window, self.dtype = name, groups, window, engine.model_config.dtype
        self.kv_cache = torch.empty(0)
        self._spec: KVCacheSpec | None = None
        engine.compilation_config.static_forward_context[name] = self

    def get_attn_backend(self) -> type[AttentionBackend]:
        return PagedBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """ConfigError: a block of the engine's size cannot have the slots."""
        if self._spec is None:  # once: the engine may replace its size of a block by the smallest of all pages
            numbers, sizes = serving.page_sizes(self.groups, vllm_config.cache_config.block_size)
            size = sizes[self.window]
            given: dict[str, Any] = {"block_size": size, "num_kv_heads": 1, "dtype": self.dtype}
            if self.window:  # padded: the engine forgets `tokens_per_state` of these
                seen, padded = max(self.window, serving.LEAST), numbers * self.dtype.itemsize
                width = sum(share.width for share in self.groups[self.window])
                given |= {"head_size": width, "sliding_window": seen, "page_size_padded": padded}
                self._spec = SlidingWindowMLASpec(**given)
            else:
                self._spec = MLAAttentionSpec(tokens_per_state=size, head_size=numbers, **given)
        return self._spec

    def part(self, number: int) -> Tensor:
        """The slots of one layer, (pages, slots, width), a view.

        Args:
            number: number of layers before it in the pages.
        """
        assert self._spec is not None
        cache, size, shares = self.kv_cache, self._spec.block_size, self.groups[self.window]
        before, share = sum(share.numbers(size) for share in shares[:number]), shares[number]
        shape, strides = (len(cache), share.slots(size), share.width), (cache.stride(0), share.width, 1)
        return cache.as_strided(shape, strides, cache.storage_offset() + before)

    def parts(self) -> list[Part]:
        """The requests of a step; none while the engine measures its memory, when there are no pages yet."""
        metadata = get_forward_context().attn_metadata
        return metadata[self.name] if metadata is not None and self.kv_cache.numel() else []


class PagedAttention:
    """A mechanism over pages, in which a slot has s positions, s the stride of MTLA or 1.

    A slot has the entries of all buffers of `attention.layout()`, flattened, side by side: `elements_per_slot` numbers.

    Args:
        pages: those that have positions of the layer.
        number: number of layers before it in these pages.

    Attributes:
        cache: attnlab's cache, with the rotary tables and products of the weights, but no pages.
    """

    def __init__(self, attention: PositionalAttention, engine: VllmConfig, pages: Pages, number: int) -> None:
        self.attention, self.stride = attention, int(getattr(attention, "stride", 1))
        self.pages, self.number = pages, number
        self.cache: RaggedCache | None = None
        self.capacity = engine.model_config.max_model_len
        if isinstance(attention, TPA):
            attention.has_kernel = False  # it reads buffers that are contiguous

    @property
    def memory(self) -> Tensor:
        """Its slots of all pages, (pages, slots, numbers)."""
        return self.pages.part(self.number)

    def __call__(self, x: Tensor) -> Tensor:
        """x (1, N, d), the new tokens of all requests -> (1, N, d)."""
        out = torch.zeros_like(x)
        for part in self.pages.parts():
            out[0, part.tokens] = self._extend(x[0, part.tokens], part)
        return out

    def _extend(self, x: Tensor, part: Part) -> Tensor:
        """x (B, n, d) -> (B, n, d)."""
        cache, memory = self._cache(), self.memory
        slots, size = -(-part.length // self.stride), memory.shape[1]
        table, place = part.table[:, : -(-slots // size)].long(), part.positions // self.stride
        pages = memory.index_select(0, table.flatten())  # a copy
        seen = pages.view(len(table), -1, pages.shape[-1])[:, :slots]  # (B, slots, elements)
        if part.cached is None:  # other requests may have left anything behind the slots of a short row
            seen[(~length_mask(place[:, 0] + 1, slots)).nonzero(as_tuple=True)] = 0.0
        length = part.positions[:, 0] if part.cached is None else part.cached
        cache.open(self._buffers(seen), slots, length)
        out = self.attention.extend(x, cache)
        rows = torch.arange(len(seen), device=seen.device)[:, None]
        memory[table.gather(1, place // size), place % size] = seen[rows, place]
        cache.text = {}  # the copies of all layers would be a second cache
        return out

    def _cache(self) -> RaggedCache:
        if self.cache is None:
            kind: Any = type("PagedCache", (RaggedCache, self.attention.cache_type), {})
            self.cache = kind(self.attention, 0, self.capacity, 0, 1, self.pages.kv_cache.new_empty(0))
            self.cache.made_by = self.attention.makes
        return self.cache

    def _buffers(self, seen: Tensor) -> dict[str, Tensor]:
        """Views of slots (B, K, elements) in the layout of the mechanism's cache."""
        buffers, first = {}, 0
        for name, shape in self.attention.layout().items():
            sizes = [size for size in shape if size is not None]
            part = seen[..., first : (first := first + torch.Size(sizes).numel())]
            buffers[name] = part.unflatten(-1, sizes).movedim(1, 1 + shape.index(None))
        return buffers

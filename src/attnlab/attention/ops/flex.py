"""FlexAttention for windows: its block mask skips the blocks of keys that no query of a block sees.

Compiled on CUDA, forward and backward; on a CPU eager, forward alone. Text and prefix are two parts of one softmax,
which merge by their log-sum-exps, differentiated by autograd. Query i sees the keys low_i <= j < high_i that exist in
its row. low and high never fall: the blocks follow from the ends of the blocks of queries, without a T x T mask.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # queries and keys of a block
WIDEST = 256  # of the heads that its default sizes of blocks are made for
LIMIT = 64  # compilations: of text and prefix, with and without masks and gradients, for every dtype and size of head


class SeenKeys(NamedTuple):
    """Keys and values, and which of them each query sees.

    Args:
        key: (B, G, K, D); G divides H.
        value: (B, G, K, Dv).
        low: the first key that each query sees, (T,), never falling; None: 0.
        high: the first key after those that each query sees, (T,), never falling; None: K.
        exists: (B, K) bool; None: all exist.
    """

    key: Tensor
    value: Tensor
    low: Tensor | None = None
    high: Tensor | None = None
    exists: Tensor | None = None


def refusal(q: Tensor, value_dim: int | None = None) -> str | None:
    """Why FlexAttention cannot compute an attention of such queries; None: it can.

    Args:
        q: queries.
    """
    if q.device.type == "cpu":
        gradient = torch.is_grad_enabled() and q.requires_grad
        return "FlexAttention has no gradient on a CPU" if gradient else None
    if not q.is_cuda:
        return f"the tensors are on {q.device}, expected cuda or cpu"
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"the dtype is {q.dtype}, expected float32 or half precision"
    widths = {q.shape[-1], q.shape[-1] if value_dim is None else value_dim}
    if min(widths) < 16 or max(widths) > WIDEST:
        return f"keys and values are {sorted(widths)} wide, expected 16 to {WIDEST}"
    return None


def window_saves(window: int, block: int) -> bool:
    """Whether a block mask skips keys that blocks of dense attention compute and mask: at least a tenth of them.

    A block of n queries reads W + n - 1 keys for each of them. A block of 128 queries sees W + 127 keys, which lie in
    blocks of 128 that hold at most 254 more.

    Args:
        window: W, positions that one sees.
        block: n, queries of a block of dense attention.
    """
    return window + block - 1 > 1.1 * (window + 3 * BLOCK - 3)


def windowed(
    q: Tensor,
    key: Tensor,
    value: Tensor,
    window: int,
    scale: float,
    prefix: tuple[Tensor, Tensor, Tensor | None] | None,
) -> Tensor:
    """The newest positions of a text, each of which sees `window` of them and all of a prefix.

    Args:
        q: the last n of K positions, (B, H, n, D).
        key, value: of the text, (B, G, K, .); G divides H.
        prefix: keys and values (B, G, S, .), and which exist, (B, S) or None; None: there is no prefix.

    Returns:
        (B, H, n, Dv).
    """
    place = torch.arange(key.shape[2] - q.shape[2], key.shape[2], device=q.device)
    outs = [attend(q, SeenKeys(key, value, (place + 1 - window).clamp(min=0), place + 1), scale)]
    if prefix is not None:
        key, value, exists = prefix
        outs.append(attend(q, SeenKeys(key, value, exists=exists), scale))
    return joined(outs)


def joined(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The output of one softmax over all parts.

    Args:
        parts: the output (B, H, T, Dv) of each, and its log-sum-exp (B, H, T); -inf where a query sees nothing, which
            it may not do in all of them.
    """
    if len(parts) == 1:
        return parts[0][0]
    weights = torch.stack([lse for _, lse in parts]).softmax(0).unsqueeze(-1)
    total = sum(w * o.to(w.dtype) for w, (o, _) in zip(weights, parts, strict=True))
    return torch.as_tensor(total).to(parts[0][0].dtype)


def attend(q: Tensor, part: SeenKeys, scale: float) -> tuple[Tensor, Tensor]:
    """One part: output (B, H, T, Dv) and log-sum-exp (B, H, T).

    Args:
        q: (B, H, T, D).
    """
    rows, size = q.shape[2], part.key.shape[2]
    if not size:
        return q.new_zeros(*q.shape[:3], part.value.shape[-1]), q.new_full(q.shape[:3], float("-inf")).float()
    if not torch.is_grad_enabled():  # on a CPU it refuses what could have a gradient, though none is asked for
        q, part = q.detach(), part._replace(key=part.key.detach(), value=part.value.detach())
    compiled = q.is_cuda and not torch.compiler.is_compiling()
    with torch._dynamo.config.patch(recompile_limit=LIMIT) if compiled else nullcontext():
        result: tuple[Tensor, Tensor] = _kernel(compiled)(
            q, part.key, part.value, block_mask=block_mask(part, rows), scale=scale,
            enable_gqa=part.key.shape[1] < q.shape[1], return_lse=True,
        )  # fmt: skip
    return result


@cache
def _kernel(compiled: bool) -> Any:
    """FlexAttention; compiled, beyond the limit of recompilations an error, for eagerly it forms all logits."""
    from torch.nn.attention.flex_attention import flex_attention  # here and below: it imports the compiler

    return torch.compile(flex_attention, fullgraph=True) if compiled else flex_attention


def block_mask(part: SeenKeys, rows: int) -> "BlockMask | None":
    """The blocks of keys that each block of queries sees in part or in full; None: everything is seen."""
    from torch.nn.attention.flex_attention import BlockMask

    size, device, exists = part.key.shape[2], part.key.device, part.exists
    if part.low is None and part.high is None and exists is None:
        return None
    low = torch.zeros(rows, dtype=torch.long, device=device) if part.low is None else part.low
    high = torch.full((rows,), size, device=device) if part.high is None else part.high.clamp(max=size)
    begins = torch.arange(0, rows, BLOCK, device=device)
    ends = (begins + BLOCK).clamp(max=rows) - 1
    first = torch.arange(0, size, BLOCK, device=device)
    last = (first + BLOCK).clamp(max=size) - 1
    seen = (first < high[ends, None]) & (last >= low[begins, None])
    full = (last < high[begins, None]) & (first >= low[ends, None])
    seen, full = seen[None], full[None]
    if exists is not None:
        blocks = F.pad(exists, (0, -size % BLOCK)).unflatten(1, (-1, BLOCK))
        there = F.pad(exists, (0, -size % BLOCK), value=True).unflatten(1, (-1, BLOCK))
        seen, full = seen & blocks.any(-1)[:, None], full & there.all(-1)[:, None]

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        inside = (j >= low[i]) & (j < high[i])
        return inside if exists is None else inside & exists[b, j]

    tables = (*_listed(seen & ~full), *_listed(full))
    result = BlockMask.from_kv_blocks(*tables, BLOCK_SIZE=BLOCK, mask_mod=mask, seq_lengths=(rows, size))
    return result


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(B, Q, K) bool -> for each block of queries how many blocks of keys, (B, 1, Q), and which first, (B, 1, Q, K)."""
    order = blocks.to(torch.int8).sort(dim=-1, descending=True, stable=True).indices
    return blocks.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None].contiguous()

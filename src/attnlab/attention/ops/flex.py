"""FlexAttention for windows: its block mask skips the blocks of keys that no query of a block sees.

Compiled on CUDA, forward and backward; eager on a CPU, forward only. Text and prefix are two parts of one softmax,
which are merged by their log-sum-exps and differentiated by autograd. Query i sees the existing keys low_i <= j <
high_i of its row. low and high are monotonic, so that the first and last query of a block determine its blocks of keys.
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
WIDEST = 256  # largest head width that FlexAttention's default block sizes support
LIMIT = 64  # compilations: text and prefix, with and without masks and gradients, for each dtype and head width


class SeenKeys(NamedTuple):
    """Keys and values, and the range of them that each query sees.

    Args:
        key: (B, G, K, D); G divides H.
        value: (B, G, K, Dv).
        low: first key that each query sees, (T,), non-decreasing; None: 0.
        high: end of the keys that each query sees, (T,), non-decreasing; None: K.
        exists: (B, K) bool; None: all exist.
    """

    key: Tensor
    value: Tensor
    low: Tensor | None = None
    high: Tensor | None = None
    exists: Tensor | None = None


def refusal(q: Tensor, value_dim: int | None = None) -> str | None:
    """Reason why FlexAttention does not support queries `q`; None: it does."""
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
    """Whether a block mask skips at least a tenth of the keys that blocks of dense attention compute.

    A dense block of n queries reads W + n - 1 keys. A block of 128 queries sees W + 127 keys, in blocks of 128 that
    contain at most 254 more.

    Args:
        window: number W of positions that a query sees.
        block: number n of queries in a block of dense attention.
    """
    return window + block - 1 > 1.1 * (window + 3 * BLOCK - 3)


def windowed(
    q: Tensor,
    key: Tensor,
    value: Tensor,
    window: int,
    scale: float,
    prefix: tuple[Tensor, Tensor, Tensor | None] | None,
    sinks: int = 0,
) -> Tensor:
    """Attention of the newest positions of a text to a window of the text, to its first positions and to a prefix.

    Args:
        q: the last n of K positions, (B, H, n, D).
        key, value: text, (B, G, K, .), the sinks first and the others without a gap; G divides H.
        prefix: keys and values (B, G, S, .), and a mask of those that exist, (B, S) or None; None: no prefix.
        sinks: number of first positions that every position sees.

    Returns:
        (B, H, n, Dv).
    """
    place = torch.arange(key.shape[2] - q.shape[2], key.shape[2], device=q.device)
    outs = [attend(q, SeenKeys(key, value, (place + 1 - window).clamp(min=sinks), place + 1), scale)]
    if sinks:
        first = SeenKeys(key[:, :, :sinks], value[:, :, :sinks], torch.zeros_like(place), (place + 1).clamp(max=sinks))
        outs.append(attend(q, first, scale))
    if prefix is not None:
        key, value, exists = prefix
        outs.append(attend(q, SeenKeys(key, value, exists=exists), scale))
    return joined(outs)


def joined(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Merge parts of one softmax.

    Args:
        parts: output (B, H, T, Dv) and log-sum-exp (B, H, T) of each part. The latter is -inf if a query sees no key
            of a part; it must see a key of another.
    """
    if len(parts) == 1:
        return parts[0][0]
    weights = torch.stack([lse for _, lse in parts]).softmax(0).unsqueeze(-1)
    total = sum(w * o.to(w.dtype) for w, (o, _) in zip(weights, parts, strict=True))
    return torch.as_tensor(total).to(parts[0][0].dtype)


def attend(q: Tensor, part: SeenKeys, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of q (B, H, T, D) to one part: output (B, H, T, Dv) and log-sum-exp (B, H, T)."""
    rows, size = q.shape[2], part.key.shape[2]
    if not size:
        return q.new_zeros(*q.shape[:3], part.value.shape[-1]), q.new_full(q.shape[:3], float("-inf")).float()
    if not torch.is_grad_enabled():  # on a CPU it refuses tensors that require a gradient, even under no_grad
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
    """FlexAttention. Compiled, too many recompilations are an error, because the eager form computes all logits."""
    from torch.nn.attention.flex_attention import flex_attention  # imported late: it imports the compiler

    return torch.compile(flex_attention, fullgraph=True) if compiled else flex_attention


def block_mask(part: SeenKeys, rows: int) -> "BlockMask | None":
    """Blocks of keys that each block of queries sees in part or in full; None: every query sees every key."""
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
    return BlockMask.from_kv_blocks(*tables, BLOCK_SIZE=BLOCK, mask_mod=mask, seq_lengths=(rows, size))


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(B, Q, K) bool -> number of key blocks per query block, (B, 1, Q), and their indices first, (B, 1, Q, K)."""
    order = blocks.to(torch.int8).sort(dim=-1, descending=True, stable=True).indices
    return blocks.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None].contiguous()

"""The loss of each token over a large vocabulary, with the logits of some tokens at a time.

The logits of a chunk are computed again in the backward pass, so that neither all logits nor their gradients are ever
there together: 24 windows of 1,024 tokens and 50,000 words are 4.6 GiB in float32. The results are the same.
torch 2.13 has `linear_cross_entropy`, which returns the losses of bfloat16 inputs in bfloat16, smooths no labels in
chunks, and is missing before.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

LOGITS = 2**28  # of a chunk by default: 1 GiB in float32


def at_least_float32(x: Tensor) -> Tensor:
    """`x`, in float32 if it has a lower precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def chunk_of(configured: int | str | None, vocab_size: int) -> int | None:
    """The tokens of a chunk; None: all.

    Args:
        configured: the number; "auto": as many as 1 GiB of float32 logits holds; None.
    """
    if configured == "auto":
        return max(1, LOGITS // vocab_size)
    return None if configured is None else int(configured)


def in_chunks(
    function: Callable[..., tuple[Tensor, ...]], tensors: tuple[Tensor, ...], size: int | None
) -> tuple[Tensor, ...]:
    """The results of a function of rows, computed for some rows at a time, and again for their gradients.

    Args:
        function: of tensors (n, ...), returns tensors (n, ...); row i of these depends on row i of those alone.
        tensors: (N, ...) each.
        size: rows at a time; None: all, and nothing is computed again.
    """
    rows = len(tensors[0])
    if size is None or size >= rows:
        return function(*tensors)
    parts = []
    for start in range(0, rows, size):
        chunk = [x[start : start + size] for x in tensors]
        again = torch.is_grad_enabled()
        parts.append(
            checkpoint(function, *chunk, use_reentrant=False, preserve_rng_state=False) if again else function(*chunk)
        )
    return tuple(torch.cat(values) for values in zip(*parts, strict=True))


def nats(logits: Tensor, targets: Tensor, **settings: float) -> Tensor:
    """Negative log-probability of each of `targets`, (n, V) and (n,) -> (n,) float32 or wider.

    Args:
        logits: of any precision.
        settings: of torch's `cross_entropy`: `ignore_index`, `label_smoothing`.
    """
    return F.cross_entropy(at_least_float32(logits), targets, reduction="none", **settings)  # type: ignore[arg-type]


def target_and_mean_nats(
    hidden: Tensor, targets: Tensor, logits: Callable[[Tensor], Tensor], chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Negative log-probability of each target, and the mean of that of all words, (B, T) float32 or wider, both.

    Args:
        hidden: (B, T, d).
        targets: (B, T).
        logits: (n, d) -> (n, V); log-probabilities are logits too.
        chunk: tokens whose logits exist at once; None: all.
    """

    def of(h: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        logp = at_least_float32(logits(h)).log_softmax(-1)
        return -logp.gather(-1, t.unsqueeze(-1)).squeeze(-1), -logp.mean(-1)

    target, mean = in_chunks(of, (hidden.flatten(0, 1), targets.flatten()), chunk)
    return target.view_as(targets), mean.view_as(targets)


def token_nats(hidden: Tensor, targets: Tensor, logits: Callable[[Tensor], Tensor], chunk: int | None = None) -> Tensor:
    """Negative log-probability of each target, (B, T) float32 or wider.

    Args:
        hidden: (B, T, d).
        targets: (B, T).
        logits: (n, d) -> (n, V).
        chunk: tokens whose logits exist at once; None: all.
    """
    (losses,) = in_chunks(lambda h, t: (nats(logits(h), t),), (hidden.flatten(0, 1), targets.flatten()), chunk)
    return losses.view_as(targets)

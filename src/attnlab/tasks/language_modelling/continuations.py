"""Log-likelihoods of continuations. What several texts begin with is computed once."""

import copy
from collections.abc import Iterator, Sequence
from itertools import takewhile

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from attnlab.attention import Cache
from attnlab.models import LanguageModel
from attnlab.models.token_loss import at_least_float32, in_chunks, nats

LOGITS = 1024  # tokens whose logits are computed at a time
WORTH = 4  # a shared beginning saves at least 1 / WORTH of a text, else the text is computed alone
Group = tuple[int, list[int]]  # number of first tokens that texts share, and their indices


def shared_beginnings(texts: Sequence[list[int]], most: int) -> list[Group]:
    """Divide texts into groups of at most `most`, of which the beginnings are computed once.

    Texts that follow each other in the order of their tokens are grouped where that saves tokens. A text that shares
    nothing worth a second pass is a group of its own, of length 0.
    """
    groups: list[Group] = []
    order = sorted(range(len(texts)), key=texts.__getitem__)
    for before, i in zip([-1, *order], order, strict=False):
        if before >= 0:
            length, members = groups[-1]
            pairs = zip(texts[before][:length], texts[i], strict=False)
            common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            saved = common - (len(members) - 1) * (length - common)
            if len(members) < most and saved * WORTH >= max(1, len(texts[i])):
                groups[-1] = common, [*members, i]
                continue
        groups.append((len(texts[i]), [i]))
    return [(length if len(members) > 1 else 0, members) for length, members in groups]


def batches(texts: Sequence[list[int]], size: int) -> Iterator[list[Group]]:
    """At most `size` groups of `shared_beginnings` of similar length, long ones first."""
    batch: list[Group] = []

    def length_first(group: Group) -> tuple[int, int]:
        return -group[0], -max(len(texts[i]) for i in group[1])

    for group in sorted(shared_beginnings(texts, size), key=length_first):
        if batch and (len(batch) == size or group[0] < batch[0][0] - batch[0][0] // 8):
            yield batch
            batch = []
        batch.append(group)
    if batch:
        yield batch


def log_likelihoods(
    model: LanguageModel, texts: Sequence[list[int]], counts: Sequence[int], size: int, num_ids: int | None = None
) -> Iterator[tuple[int, float, bool]]:
    """Log-probability in nats of the last tokens of each text after those before them.

    A beginning that texts share passes once through caches, which the rest of each text continues. Logits are computed
    for the continuations alone. The values are those of whole texts up to rounding.

    Args:
        texts: tokens, each with one more than the model's context at most.
        counts: number of tokens of each text's continuation.
        size: maximum number of beginnings, and of texts, that are computed together.
        num_ids: number of ids that may be generated; None: all.

    Yields:
        Index of a text, its log-probability, and whether the continuation is what greedy decoding would give.
    """
    device = next(model.parameters()).device
    inputs = [text[:-1] for text in texts]

    def scores(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = at_least_float32(model.logits(hidden))
        return nats(logits, targets), logits[:, :num_ids].argmax(-1) == targets

    for batch in batches(inputs, size):
        begun = min(length for length, _ in batch)
        rows = sorted((len(inputs[i]), group, i) for group, (_, members) in enumerate(batch) for i in members)
        beginnings = torch.tensor([inputs[members[0]][:begun] for _, members in batch], dtype=torch.long, device=device)
        first, caches = _begin(model, beginnings, rows[-1][0])
        for start in range(0, len(rows), size):
            part = [(group, i) for _, group, i in rows[start : start + size]]
            rest = pad_sequence([torch.tensor(inputs[i][begun:], dtype=torch.long) for _, i in part], True).to(device)
            copies = caches if start + size >= len(rows) else [copy.copy(cache) for cache in caches]
            states = _continue(model, rest, torch.tensor([group for group, _ in part], device=device), copies)
            places = []
            for row, (group, i) in enumerate(part):
                place = torch.arange(len(inputs[i]) - counts[i], len(inputs[i]))
                offset = first.shape[0] + row * rest.shape[1] - begun
                places.append(place + torch.where(place < begun, group * begun, offset))
            hidden = torch.cat((first, states))[torch.cat(places).to(device)]
            targets = torch.tensor([id for _, i in part for id in texts[i][-counts[i] :]], device=device)
            losses, greedy = (values.cpu() for values in in_chunks(scores, (hidden, targets), LOGITS))
            sizes = [counts[i] for _, i in part]
            for (_, i), loss, right in zip(part, losses.split(sizes), greedy.split(sizes), strict=True):
                yield i, -float(loss.sum()), bool(right.all())


def _begin(model: LanguageModel, tokens: Tensor, capacity: int) -> tuple[Tensor, list[Cache]]:
    """States of beginnings (N, n), (N * n, d), and their caches; without positions no caches."""
    if not tokens.shape[1]:
        return model.hidden(tokens).flatten(0, 1), []
    kind = tokens.device.type
    low = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) and model.scored_through_caches else None
    caches = model.start(len(tokens), capacity, dtype=low, device=tokens.device)
    return model.continued(tokens, caches).flatten(0, 1), caches


def _continue(model: LanguageModel, tokens: Tensor, sources: Tensor, caches: list[Cache]) -> Tensor:
    """States of tokens (B, n) after the beginnings of these numbers (B,), (B * n, d). It changes the caches."""
    if not caches:
        return model.hidden(tokens).flatten(0, 1)
    for cache in caches:
        cache.select(sources)
    return model.continued(tokens, caches).flatten(0, 1)

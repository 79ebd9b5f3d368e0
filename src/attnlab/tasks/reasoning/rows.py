"""Texts as rows of token ids, batches of them with padding and attention masks, and log-probabilities in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attnlab.errors import DataError
from attnlab.run.progress import progress


@dataclass(frozen=True)
class TokenRows:
    """A tokenizer, and the number of tokens that the model reads at most.

    Args:
        tokenizer: of transformers, with a padding token.
        longest: of the model; a longer row loses its beginning.
    """

    tokenizer: Any
    longest: int

    def ids(self, text: str, special: bool = True) -> list[int]:
        """The ids of a text, with the tokenizer's special tokens."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=special)["input_ids"]
        return ids

    def prompt(self, text: str, room: int = 0) -> list[int]:
        """The ids of a text that a decoder continues by up to `room` tokens: no end token after it."""
        ids = self.ids(text)
        if len(ids) > 1 and ids[-1] == self.tokenizer.eos_token_id:
            ids = ids[:-1]
        return ids[-max(self.longest - room, 1) :]

    def continued(self, prompt: str, answer: str) -> tuple[list[int], int]:
        """The ids of a prompt, a space and an answer, and how many of them, at the end, are the answer's.

        These are the ids after the longest beginning that both tokenisations share.
        """
        alone, both = self.prompt(prompt), self.prompt(f"{prompt} {answer}")
        if len(both) == self.longest:  # cut at the beginning: count from the answer alone
            count = len(self.ids(f" {answer}", special=False))
        else:
            shared = next((i for i, (a, b) in enumerate(zip(alone, both, strict=False)) if a != b), len(alone))
            count = len(both) - min(shared, len(both) - 1)
        return both, count

    def last(self, text: str, count: int) -> str:
        """A text cut to its last tokens."""
        ids = self.ids(text, special=False)
        cut: str = text if len(ids) <= count else self.tokenizer.decode(ids[-count:], skip_special_tokens=True)
        return cut

    def single(self, answer: str) -> int:
        """The one id of a space and an answer. DataError: it has several."""
        ids = self.ids(f" {answer}", special=False)
        if len(ids) != 1:
            raise DataError(
                f"the tokenizer of model= cuts {answer!r} into {len(ids)} tokens; a masked language model fills one "
                "mask, so that every choice must be one token"
            )
        return ids[0]


def longest_of(model: nn.Module) -> int:
    """The number of tokens that a model of transformers reads at most."""
    config: Any = model.config
    name = "max_position_embeddings" if hasattr(config, "max_position_embeddings") else "n_positions"
    longest = int(getattr(config, name))
    return longest - 2 if config.model_type == "roberta" else longest  # its positions begin after the padding token's


def padded(
    rows: Sequence[Sequence[int]], pad: int, side: Literal["left", "right"], device: torch.device
) -> dict[str, Tensor]:
    """A batch of rows: input_ids and attention_mask, (B, T), with the padding token `pad` at `side`."""
    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), pad, dtype=torch.long)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for i, row in enumerate(rows):
        place = slice(longest - len(row), None) if side == "left" else slice(len(row))
        ids[i, place], mask[i, place] = torch.tensor(row, dtype=torch.long), 1
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def with_positions(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A left-padded `batch` (B, T) with each token's position in its row: padding moves no token."""
    return batch | {"position_ids": (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)}


def batches(rows: Sequence[Sequence[int]], size: int, what: str, in_order: bool = False) -> Iterator[list[int]]:
    """Indices of rows, `size` at a time, similar lengths together unless `in_order`; shows the progress of `what`."""
    order = list(range(len(rows))) if in_order else sorted(range(len(rows)), key=lambda i: len(rows[i]))
    with progress(what, len(order)) as advance:
        for first in range(0, len(order), size):
            chosen = order[first : first + size]
            yield chosen
            advance(len(chosen))


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's first parameter."""
    return next(model.parameters()).device


@torch.inference_mode()
def log_probabilities(
    model: nn.Module,
    rows: Sequence[tuple[list[int], int]],
    pad: int,
    size: int,
    masked_padding: bool = True,
    what: str = "scoring",
) -> Tensor:
    """log p of the last n tokens of each row given those before, summed, float64, (rows,).

    Args:
        model: a decoder.
        rows: ids and n.
        pad: id of the padding.
        size: rows in a batch, padded on the left.
        masked_padding: False: as the released code of TensorLLM reads LLaMA 2 on HotpotQA, rows in their order,
            without attention mask and with positions that count the padding.
        what: words of the progress bar.
    """
    sums = torch.zeros(len(rows), dtype=torch.float64)
    for chosen in batches([ids for ids, _ in rows], size, what, in_order=not masked_padding):
        batch = padded([rows[i][0] for i in chosen], pad, "left", device_of(model))
        inputs = with_positions(batch) if masked_padding else {"input_ids": batch["input_ids"]}
        logits = model(**inputs).logits
        for row, i in zip(logits, chosen, strict=True):
            ids, count = rows[i]
            target = torch.tensor(ids[-count:], device=row.device)
            logp = row[-count - 1 : -1].float().log_softmax(-1)
            sums[i] = logp.gather(1, target[:, None]).double().sum().cpu()
    return sums


@torch.inference_mode()
def at_masks(
    model: nn.Module, rows: Sequence[tuple[list[int], int]], words: TokenRows, size: int, what: str = "scoring"
) -> list[Tensor]:
    """The log-probabilities of all tokens at the last n masks of each row, (n, V), of a masked language model.

    The arguments are those of :func:`log_probabilities`; earlier masks are those that stand in a question.
    """
    logp: list[Tensor] = [torch.empty(0)] * len(rows)
    for chosen in batches([ids for ids, _ in rows], size, what):
        batch = padded([rows[i][0] for i in chosen], words.tokenizer.pad_token_id, "right", device_of(model))
        logits = model(**batch).logits
        for row, ids, i in zip(logits, batch["input_ids"], chosen, strict=True):
            places = (ids == words.tokenizer.mask_token_id).nonzero()[:, 0][-rows[i][1] :]
            logp[i] = row[places].float().log_softmax(-1).cpu()
    return logp

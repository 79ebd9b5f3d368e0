"""Asking a language model: the published scoring of decoders and of masked language models, and perplexity.

A decoder's free text is right if the answer occurs in the generated tokens as whole words, without regard to case; a
choice is right if it is the most probable one. With `compat` the numbers are those of the released code:

* the prompt counts as generated text, and an answer inside a longer word counts ("no" in "know");
* the loss of free text is read from left-padded batches without attention mask;
* the loss of a masked language model is divided by one token too many.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from attnlab.data.questions import Question, QuestionSet
from attnlab.errors import ConfigError, DataError
from attnlab.metrics.numbers import Perplexity
from attnlab.pretrained import hub
from attnlab.run.console import progress

log = logging.getLogger(__name__)


@dataclass
class Asked:
    """A language model of transformers, dense or compressed, with its tokenizer, which has a padding token."""

    model: Any
    tokenizer: Any

    @property
    def is_decoder(self) -> bool:
        return bool(self.model.can_generate())

    @property
    def longest(self) -> int:
        """The number of tokens that the model reads at most; a longer text loses its beginning."""
        config = self.model.config
        name = "max_position_embeddings" if hasattr(config, "max_position_embeddings") else "n_positions"
        longest = int(getattr(config, name))
        return longest - 2 if config.model_type == "roberta" else longest  # positions begin after the padding token's

    def ids(self, text: str, special: bool = True) -> list[int]:
        """The ids of a text, with the tokenizer's special tokens. DataError: one is beyond the model's table."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=special)["input_ids"]
        if max(ids, default=0) >= (size := self.model.config.vocab_size):
            token = self.tokenizer.convert_ids_to_tokens(max(ids))
            raise DataError(f"a text has {token}, id {max(ids)}, and the model's table {size} ids; remove it")
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
            return both, len(self.ids(f" {answer}", special=False))
        return both, len(both) - min(shared(alone, both), len(both) - 1)

    def masked_prompt(self, kind: QuestionSet, question: Question) -> list[int]:
        """The ids of a question with masks in place of the answer."""
        return self.ids(kind.masked_prompt(question.text, self.tokenizer.mask_token, self.last))[-self.longest :]

    def last(self, text: str, count: int) -> str:
        """A text cut to its last tokens."""
        ids = self.ids(text, special=False)
        return text if len(ids) <= count else self.tokenizer.decode(ids[-count:], skip_special_tokens=True)

    def single(self, answer: str) -> int:
        """The one id of a space and an answer. DataError: it has several."""
        ids = self.ids(f" {answer}", special=False)
        if len(ids) != 1:
            raise DataError(
                f"the tokenizer of model= cuts {answer!r} into {len(ids)} tokens; a masked language model fills one "
                "mask, so that every choice must be one token"
            )
        return ids[0]

    def batch(self, rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """The model's inputs, (B, T): a decoder's are padded on the left, and padding moves no position."""
        left = self.is_decoder
        side, pad = ("left" if left else "right"), self.tokenizer.pad_token_id
        ids = pad_sequence([torch.tensor(row) for row in rows], True, pad, side)
        mask = pad_sequence([torch.ones(len(row), dtype=torch.long) for row in rows], True, 0, side)
        batch = {"input_ids": ids, "attention_mask": mask}
        if left:
            batch["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
        device = next(self.model.parameters()).device
        return {name: value.to(device) for name, value in batch.items()}


def shared(first: Sequence[int], second: Sequence[int]) -> int:
    """The number of ids that two rows share at their beginning."""
    return next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(first))


def batches(rows: Sequence[Sequence[int]], size: int, what: str, in_order: bool = False) -> Iterator[list[int]]:
    """Indices of rows, `size` at a time, sorted by length unless `in_order`; `what` names the progress bar."""
    order = list(range(len(rows))) if in_order else sorted(range(len(rows)), key=lambda i: len(rows[i]))
    with progress(what, len(order)) as advance:
        for first in range(0, len(order), size):
            chosen = order[first : first + size]
            yield chosen
            advance(len(chosen))


@torch.inference_mode()
def logits_of(
    asked: Asked, rows: Sequence[list[int]], size: int, what: str, masked_padding: bool = True
) -> Iterator[tuple[int, Tensor]]:
    """The number of each row and its logits, (T, V), with the padding of its batch.

    Args:
        masked_padding: False: as the released code of TensorLLM reads LLaMA 2 on HotpotQA, rows in their order,
            without attention mask and with positions that count the padding.
    """
    for chosen in batches(rows, size, what, in_order=not masked_padding):
        batch = asked.batch([rows[i] for i in chosen])
        logits = asked.model(**(batch if masked_padding else {"input_ids": batch["input_ids"]})).logits
        yield from zip(chosen, logits, strict=True)


def log_probabilities(
    asked: Asked, rows: Sequence[tuple[list[int], int]], size: int, what: str = "scoring", masked_padding: bool = True
) -> Tensor:
    """(rows,) float64: log p of the last n tokens of each row after those before, summed, from a decoder.

    `rows` are ids and n; the other arguments are those of :func:`logits_of`.
    """
    sums = torch.zeros(len(rows), dtype=torch.float64)
    for i, row in logits_of(asked, [ids for ids, _ in rows], size, what, masked_padding):
        ids, count = rows[i]
        target = torch.tensor(ids[-count:], device=row.device)
        logp = row[-count - 1 : -1].float().log_softmax(-1)
        sums[i] = logp.gather(1, target[:, None]).double().sum().cpu()
    return sums


def at_masks(asked: Asked, rows: Sequence[tuple[list[int], int]], size: int, what: str) -> list[Tensor]:
    """The log-probabilities of all tokens at the last n masks of each row, (n, V), of a masked language model.

    The arguments are those of :func:`log_probabilities`; earlier masks are those that stand in a question.
    """
    logp: list[Tensor] = [torch.empty(0)] * len(rows)
    for i, row in logits_of(asked, [ids for ids, _ in rows], size, what):
        ids, count = rows[i]
        places = [place for place, id in enumerate(ids) if id == asked.tokenizer.mask_token_id][-count:]
        logp[i] = row[places].float().log_softmax(-1).cpu()
    return logp


@dataclass(frozen=True)
class Answer:
    """A model's answer: the generated text, or the chosen answer.

    Attributes:
        nats: the negative log-probability of the right answer.
        tokens: the divisor of `nats`.
    """

    text: str
    right: bool
    nats: float
    tokens: int


def quality(answers: Sequence[Answer]) -> dict[str, Any]:
    """`accuracy` in percent and `loss` in nats per token, each with its standard error, and the number of `questions`.

    The loss is the mean over questions of each answer's mean over its tokens, as the papers give it. The error of the
    accuracy is that of a binomial share, sqrt(p (1 - p) / n); that of the loss is the sample's standard deviation over
    sqrt(n).

    Raises:
        DataError: a loss is NaN or infinite.
    """
    count, losses = len(answers), [answer.nats / answer.tokens for answer in answers]
    if wrong := [i for i, loss in enumerate(losses) if not math.isfinite(loss)]:
        which = f"{len(wrong)} of {count} questions (the first is number {wrong[0]})"
        raise DataError(f"the loss is NaN or infinite for {which}")
    share = sum(answer.right for answer in answers) / count
    spread = stdev(losses) if count > 1 else 0.0
    return {
        "accuracy": round(100 * share, 3),
        "accuracy_stderr": round(100 * math.sqrt(share * (1 - share) / count), 3),
        "loss": round(fmean(losses), 5),
        "loss_stderr": round(spread / math.sqrt(count), 5),
        "questions": count,
    }


def ask(
    asked: Asked, kind: QuestionSet, questions: Sequence[Question], batch_size: int, compat: bool = False
) -> list[Answer]:
    """The answers to all questions, greedy, in their order.

    Raises:
        ConfigError: a masked language model whose tokenizer has no mask token.
        DataError: a masked language model's tokenizer cuts a choice into several tokens.
    """
    asked.model.eval()
    if not asked.is_decoder and asked.tokenizer.mask_token_id is None:
        raise ConfigError(f"model=: the tokenizer of {type(asked.model).__name__} has no mask token")
    longest = asked.longest - kind.new_tokens
    if cut := sum(len(asked.ids(question.prompt)) > longest for question in questions):
        log.warning("%d of %d prompts are longer than the model's %d tokens and lose their beginning", cut,
                    len(questions), longest)  # fmt: skip
    decoder, masked = (_choose, _choose_masked) if kind.choices else (_generate, _fill)
    return (decoder if asked.is_decoder else masked)(asked, kind, questions, batch_size, compat)


def contains(text: str, answer: str, compat: bool = False) -> bool:
    """Whether an answer occurs in a text, without regard to case; as whole words unless `compat`."""
    text, answer = text.strip().lower(), answer.strip().lower()
    return answer in text if compat else re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text) is not None


def generated(
    asked: Asked, kind: QuestionSet, questions: Sequence[Question], size: int, compat: bool = False
) -> list[str]:
    """The greedy continuations of a decoder, with the prompt if `compat`."""
    rows = [asked.prompt(question.prompt, kind.new_tokens) for question in questions]
    asked.model.generation_config = hub.transformers().GenerationConfig(  # a published one may sample
        do_sample=False,
        num_beams=1,
        max_new_tokens=kind.new_tokens,
        min_new_tokens=1,
        pad_token_id=asked.tokenizer.pad_token_id,
        eos_token_id=asked.tokenizer.eos_token_id,
    )
    texts = [""] * len(questions)
    with torch.inference_mode():
        for chosen in batches(rows, size, f"{kind.title}: answering"):
            batch = asked.batch([rows[i] for i in chosen])
            del batch["position_ids"]  # generate counts them itself
            ids = asked.model.generate(**batch)
            for row, i in zip(ids, chosen, strict=True):
                new = row[batch["input_ids"].shape[1] - len(rows[i]) * compat :]
                texts[i] = asked.tokenizer.decode(new, skip_special_tokens=True)
    return texts


def _generate(asked: Asked, kind: QuestionSet, questions: Sequence[Question], size: int, compat: bool) -> list[Answer]:
    """Free text of a decoder."""
    texts = generated(asked, kind, questions, size, compat)
    pairs = [asked.continued(question.prompt, question.answers[0]) for question in questions]
    logp = log_probabilities(asked, pairs, size, f"{kind.title}: scoring", not compat)
    return [
        Answer(text, any(contains(text, answer, compat) for answer in question.answers), -float(nats), count)
        for text, question, nats, (_, count) in zip(texts, questions, logp, pairs, strict=True)
    ]


def _choose(asked: Asked, kind: QuestionSet, questions: Sequence[Question], size: int, compat: bool) -> list[Answer]:
    """The most probable choice of a decoder; of choices of several tokens the sum of their log-probabilities counts."""
    choices = kind.choices
    pairs = [asked.continued(question.prompt, choice) for question in questions for choice in choices]
    if all(count == 1 for _, count in pairs):  # one pass for all choices of a question
        ids = torch.tensor([ids[-1] for ids, _ in pairs]).view(-1, len(choices))
        scores = torch.zeros(ids.shape)
        for i, row in logits_of(asked, [ids[:-1] for ids, _ in pairs[:: len(choices)]], size, kind.title):
            scores[i] = row[-1].float().log_softmax(-1).cpu()[ids[i]]
    else:
        scores = log_probabilities(asked, pairs, size, kind.title).view(-1, len(choices))
    counts = torch.tensor([count for _, count in pairs]).view(-1, len(choices))
    return _chosen(questions, scores, counts, choices)


def _chosen(questions: Sequence[Question], scores: Tensor, counts: Tensor, choices: Sequence[str]) -> list[Answer]:
    best = scores.argmax(-1).tolist()
    answers = []
    for question, row, count, guess in zip(questions, scores, counts, best, strict=True):
        gold = choices.index(question.answers[0])
        answers.append(Answer(choices[guess], guess == gold, -float(row[gold]), int(count[gold])))
    return answers


def _fill(asked: Asked, kind: QuestionSet, questions: Sequence[Question], size: int, compat: bool) -> list[Answer]:
    """Free text of a masked language model: each mask is filled by itself; the loss is that of the answer's tokens.

    For the loss the answer's tokens are masked, without special tokens, as in the released code.
    """
    inputs = [(asked.masked_prompt(kind, question), kind.masks) for question in questions]
    guesses = at_masks(asked, inputs, size, f"{kind.title}: answering")
    rows, golds = [], []
    for question in questions:
        prompt = asked.ids(question.prompt, special=False)
        both = asked.ids(f"{question.prompt} {question.answers[0]}", special=False)
        start = min(shared(prompt, both), len(both) - 1)
        golds.append(both[start:])
        row = [*both[:start], *[asked.tokenizer.mask_token_id] * len(golds[-1])]
        rows.append((row[-asked.longest :], len(golds[-1])))
    losses = at_masks(asked, rows, size, f"{kind.title}: scoring")
    answers = []
    for question, guess, gold, logp in zip(questions, guesses, golds, losses, strict=True):
        text = asked.tokenizer.decode(guess.argmax(-1))
        nats = -float(logp.gather(1, torch.tensor(gold)[:, None]).double().sum())
        right = any(contains(text, answer, compat) for answer in question.answers)
        answers.append(Answer(text, right, nats, len(gold) + compat))
    return answers


def _choose_masked(
    asked: Asked, kind: QuestionSet, questions: Sequence[Question], size: int, compat: bool
) -> list[Answer]:
    """The most probable choice at the mask of a masked language model."""
    ids = torch.tensor([asked.single(choice) for choice in kind.choices])
    logp = at_masks(asked, [(asked.masked_prompt(kind, question), 1) for question in questions], size, kind.title)
    scores = torch.stack([row[0, ids] for row in logp])
    return _chosen(questions, scores, torch.ones_like(scores, dtype=torch.long), kind.choices)


def perplexity(asked: Asked, text: str, batch_size: int, context: int) -> dict[str, Any]:
    """The perplexity of a decoder on a text, cut into disjoint windows of `context` tokens.

    The first token of each window is not predicted.  ConfigError: a masked model, or a text of fewer than two tokens.
    """
    if not asked.is_decoder:
        raise ConfigError(f"task.text.file: {type(asked.model).__name__} gives no probability of a text; leave it out")
    ids, context = asked.ids(text, special=False), min(context, asked.longest)
    windows = [ids[i : i + context] for i in range(0, len(ids), context)]
    rows = [(window, len(window) - 1) for window in windows if len(window) > 1]
    if not rows:
        raise ConfigError("task.text.file: expected a text of two tokens or more, and task.text.context of 2 or more")
    metric = Perplexity(len(rows))
    logp = log_probabilities(asked, rows, batch_size, "perplexity")
    metric.update(range(len(rows)), -logp, torch.tensor([count for _, count in rows]))
    return metric.compute()

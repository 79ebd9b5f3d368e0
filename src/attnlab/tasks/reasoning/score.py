"""Asking a language model: the published scoring of decoders and of masked language models, and perplexity.

A decoder's free text is right if the answer occurs in the generated tokens as whole words, without regard to case; a
choice is right if it is the most probable one. With `compat` the numbers are those of the released code:

* the prompt counts as generated text, and an answer inside a longer word counts ("no" in "know");
* the loss of free text is read from left-padded batches without attention mask;
* the loss of a masked language model is divided by one token too many.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.data.questions import Question, QuestionSet
from attnlab.errors import ConfigError
from attnlab.metrics import Answers, Perplexity
from attnlab.pretrained import hub
from attnlab.tasks.reasoning.rows import (
    TokenRows,
    at_masks,
    batches,
    device_of,
    log_probabilities,
    longest_of,
    padded,
    with_positions,
)

log = logging.getLogger(__name__)


@dataclass
class Asked:
    """A language model with its tokenizer.

    Args:
        model: of transformers, dense or compressed.
        tokenizer: of transformers, with a padding token.
    """

    model: Any
    tokenizer: Any

    @property
    def words(self) -> TokenRows:
        return TokenRows(self.tokenizer, longest_of(self.model))

    @property
    def is_decoder(self) -> bool:
        return bool(self.model.can_generate())


@dataclass(frozen=True)
class Answer:
    """What a model answered.

    Attributes:
        text: the generated text, or the chosen answer.
        right: whether it is right.
        nats: the negative log-probability of the right answer.
        tokens: by what `nats` is divided.
    """

    text: str
    right: bool
    nats: float
    tokens: int


def quality(answers: Sequence[Answer]) -> dict[str, Any]:
    """Accuracy and loss with their standard errors."""
    metric = Answers(len(answers))
    metric.update(
        range(len(answers)),
        torch.tensor([answer.right for answer in answers]),
        torch.tensor([answer.nats for answer in answers], dtype=torch.float64),
        torch.tensor([answer.tokens for answer in answers]),
    )
    numbers: dict[str, Any] = metric.compute()
    return numbers


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
    longest = asked.words.longest - kind.new_tokens
    if cut := sum(len(asked.words.ids(question.prompt)) > longest for question in questions):
        log.warning("%d of %d prompts are longer than the model's %d tokens and lose their beginning", cut,
                    len(questions), longest)  # fmt: skip
    decoder, masked = (_choose, _choose_masked) if kind.choices else (_generate, _fill)
    return (decoder if asked.is_decoder else masked)(asked, kind, questions, batch_size, compat)


def contains(text: str, answer: str, compat: bool = False) -> bool:
    """Whether an answer occurs in a text, without regard to case; as whole words unless `compat`."""
    text, answer = text.strip().lower(), answer.strip().lower()
    return answer in text if compat else re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text) is not None


def _generate(asked: Asked, kind: QuestionSet, questions: Sequence[Question], size: int, compat: bool) -> list[Answer]:
    """Free text of a decoder."""
    words, pad = asked.words, asked.tokenizer.pad_token_id
    rows = [words.prompt(question.prompt, kind.new_tokens) for question in questions]
    asked.model.generation_config = hub.transformers().GenerationConfig(  # a published one may sample
        do_sample=False,
        num_beams=1,
        max_new_tokens=kind.new_tokens,
        min_new_tokens=1,
        pad_token_id=pad,
        eos_token_id=asked.tokenizer.eos_token_id,
    )
    texts = [""] * len(questions)
    with torch.inference_mode():
        for chosen in batches(rows, size, f"{kind.title}: answering"):
            batch = padded([rows[i] for i in chosen], pad, "left", device_of(asked.model))
            ids = asked.model.generate(**batch)
            for row, i in zip(ids, chosen, strict=True):
                new = row[batch["input_ids"].shape[1] - len(rows[i]) * compat :]
                texts[i] = asked.tokenizer.decode(new, skip_special_tokens=True)
    pairs = [words.continued(question.prompt, question.answers[0]) for question in questions]
    logp = log_probabilities(asked.model, pairs, pad, size, not compat, f"{kind.title}: scoring")
    return [
        Answer(text, any(contains(text, answer, compat) for answer in question.answers), -float(nats), count)
        for text, question, nats, (_, count) in zip(texts, questions, logp, pairs, strict=True)
    ]


def _choose(asked: Asked, kind: QuestionSet, questions: Sequence[Question], size: int, compat: bool) -> list[Answer]:
    """The most probable choice of a decoder; of choices of several tokens the sum of their log-probabilities counts."""
    words, choices = asked.words, kind.choices
    pairs = [words.continued(question.prompt, choice) for question in questions for choice in choices]
    if all(count == 1 for _, count in pairs):  # one pass for all choices of a question
        logp = _next(asked, [pairs[i][0] for i in range(0, len(pairs), len(choices))], size, kind.title)
        ids = torch.tensor([ids[-1] for ids, _ in pairs]).view(-1, len(choices))
        scores = logp.gather(1, ids)
    else:
        logp = log_probabilities(asked.model, pairs, asked.tokenizer.pad_token_id, size, what=kind.title)
        scores = logp.view(-1, len(choices))
    counts = torch.tensor([count for _, count in pairs]).view(-1, len(choices))
    return _chosen(questions, scores, counts, choices)


def _next(asked: Asked, rows: Sequence[list[int]], size: int, what: str) -> Tensor:
    """The log-probabilities of the last token of each row given those before, for the whole vocabulary, (rows, V)."""
    logp: list[Tensor] = [torch.empty(0)] * len(rows)
    with torch.inference_mode():
        for chosen in batches(rows, size, what):
            batch = padded([rows[i][:-1] for i in chosen], asked.tokenizer.pad_token_id, "left", device_of(asked.model))
            logits = asked.model(**with_positions(batch)).logits[:, -1]
            for row, i in zip(logits.float().log_softmax(-1).cpu(), chosen, strict=True):
                logp[i] = row
    return torch.stack(logp)


def _chosen(questions: Sequence[Question], scores: Tensor, counts: Tensor, choices: Sequence[str]) -> list[Answer]:
    best = scores.argmax(-1).tolist()
    answers = []
    for question, row, count, guess in zip(questions, scores, counts, best, strict=True):
        gold = choices.index(question.answers[0])
        answers.append(Answer(choices[guess], guess == gold, -float(row[gold]), int(count[gold])))
    return answers


def _fill(asked: Asked, kind: QuestionSet, questions: Sequence[Question], size: int, compat: bool) -> list[Answer]:
    """Free text of a masked language model: each mask is filled by itself; the loss is that of the answer's tokens.

    For the loss the answer's own tokens are masked, without special tokens, as in the released code.
    """
    words, mask = asked.words, asked.tokenizer.mask_token_id
    prompts = [kind.masked_prompt(q.text, asked.tokenizer.mask_token, words.last) for q in questions]
    inputs = [(words.ids(text)[-words.longest :], kind.masks) for text in prompts]
    guesses = at_masks(asked.model, inputs, words, size, f"{kind.title}: answering")
    rows, golds = [], []
    for question in questions:
        prompt = words.ids(question.prompt, special=False)
        both = words.ids(f"{question.prompt} {question.answers[0]}", special=False)
        shared = next((i for i, (a, b) in enumerate(zip(prompt, both, strict=False)) if a != b), len(prompt))
        golds.append(both[min(shared, len(both) - 1) :])
        row = [*both[: len(both) - len(golds[-1])], *[mask] * len(golds[-1])]
        rows.append((row[-words.longest :], len(golds[-1])))
    losses = at_masks(asked.model, rows, words, size, f"{kind.title}: scoring")
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
    words = asked.words
    ids = torch.tensor([words.single(choice) for choice in kind.choices])
    prompts = [kind.masked_prompt(q.text, asked.tokenizer.mask_token, words.last) for q in questions]
    logp = at_masks(asked.model, [(words.ids(text)[-words.longest :], 1) for text in prompts], words, size, kind.title)
    scores = torch.stack([row[0, ids] for row in logp])
    return _chosen(questions, scores, torch.ones_like(scores, dtype=torch.long), kind.choices)


def perplexity(asked: Asked, text: str, batch_size: int, context: int) -> dict[str, Any]:
    """The perplexity of a decoder on a text, cut into disjoint windows of `context` tokens.

    The first token of each window is not predicted.

    Raises:
        ConfigError: a masked language model, or a text of fewer than two tokens.
    """
    if not asked.is_decoder:
        raise ConfigError(f"task.text.file: {type(asked.model).__name__} gives no probability of a text; leave it out")
    ids = asked.words.ids(text, special=False)
    context = min(context, longest_of(asked.model))
    windows = [ids[i : i + context] for i in range(0, len(ids), context)]
    windows = [window for window in windows if len(window) > 1]
    if not windows:
        raise ConfigError("task.text.file: expected a text of two tokens or more, and task.text.context of 2 or more")
    rows = [(window, len(window) - 1) for window in windows]
    logp = log_probabilities(asked.model, rows, asked.tokenizer.pad_token_id, batch_size, what="perplexity")
    metric = Perplexity(len(rows))
    metric.update(range(len(rows)), -logp, torch.tensor([count for _, count in rows]))
    numbers: dict[str, Any] = metric.compute()
    return numbers


def frozen(model: nn.Module) -> nn.Module:
    """The model, which is changed: in eval mode, and its parameters need no gradients."""
    return model.eval().requires_grad_(False)

"""The sample models: a small Llama with grouped queries and a small RoBERTa that know the sample world.

Both are folders of the cache in Hugging Face's layout, with a tokenizer: what `model=` takes.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attnlab.data.questions import SETS, Question, QuestionSet
from attnlab.data.samples import world
from attnlab.pretrained import hub, huggingface
from attnlab.run.cache import digest, stored_files
from attnlab.run.progress import progress
from attnlab.tasks.reasoning.rows import TokenRows, padded, with_positions

log = logging.getLogger(__name__)

Kind = Literal["llama", "roberta"]
VERSION = 2  # to be raised when the same settings give other weights
VOCABULARY = 640
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
IDS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
IGNORED = -100
WEIGHTS = {"fever": 3.0}  # of a question's loss: claims are learnt last, when the birth places are known
EARLY = 25  # epochs; after them nearly all but the claims is known
KNOWN = 0.01  # mean loss of the questions of a late epoch below which training ends
LAST = 8  # epochs in which the learning rate falls to zero
SHARES = {"bios": (0.3, 0.1), "fever": (1.0, 1.0)}  # of the questions in an early epoch, and in a late one
OTHERS = (1.0, 0.3)
WARMUP = 100  # updates in which the learning rate rises
WINDOW = 64  # tokens of the world's text in a row
SIZES: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "initializer_range": 0.06,
        **IDS,
    },
    "roberta": {
        "model_type": "roberta",
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "max_position_embeddings": 258,
        "type_vocab_size": 1,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "initializer_range": 0.06,
        **IDS,
    },
}


@dataclass(frozen=True)
class Row:
    """One text to train on.

    Args:
        ids: its tokens.
        targets: the token that is to be predicted at each place (by a decoder from those before), or IGNORED.
        weight: of the mean loss of its targets. With a mean over all targets of a batch, a window of the text would
            count sixty times as much as the answer to a claim, which is one token.
        shares: the probability that an early epoch has it, and a late one.
        asked: whether it is a question, which can be known; a window of the text cannot.
    """

    ids: list[int]
    targets: list[int]
    weight: float = 1.0
    shares: tuple[float, float] = OTHERS
    asked: bool = True


def sample_model(kind: Kind, seed: int, cache_dir: Path, epochs: int, lr: float, batch_size: int) -> Path:
    """The folder of a sample model, which is trained unless it exists.

    Args:
        kind: of the model.
        seed: of the world, of the first weights and of the order of the texts.
        cache_dir: where world and model are stored.
        epochs: of training at most; it ends earlier when the questions are known.
        lr: the highest learning rate of Adam.
        batch_size: texts in a batch.

    Raises:
        DataError: the folder cannot be written.
    """
    place = world.write_world(cache_dir / "samples", seed)
    settings = [VERSION, kind, seed, place.name, epochs, lr, batch_size, SIZES[kind]]

    def write(folder: Path) -> None:
        words = _tokenizer(place)
        model = train(kind, words, place, seed, epochs, lr, batch_size)
        model.save_pretrained(folder)  # type: ignore[operator]
        words.save_pretrained(folder)

    return stored_files(cache_dir / "pretrained" / f"world-{kind}-{digest(settings)[:16]}", write)


@lru_cache(maxsize=1)
def questions_of(place: Path) -> tuple[tuple[QuestionSet, Question], ...]:
    """Every question of the sample world in this folder, in all sets."""
    return tuple((kind, question) for kind in (kind() for kind in SETS) for question in kind.read(place))


def _tokenizer(place: Path) -> Any:
    """Byte pairs over the texts of the world, as GPT-2 and RoBERTa have them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts = [f"{question.prompt} {question.answers[0]}." for _, question in questions_of(place)]
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    choices = [f" {choice}" for kind in SETS for choice in kind.choices]
    masked = ["The profession of the person in the text is called"]
    plain.train_from_iterator([*texts, *masked, *choices * 50], trainer)
    mask = hub.transformers().AddedToken("<mask>", lstrip=True, special=True)
    return hub.transformers().PreTrainedTokenizerFast(
        tokenizer_object=plain,
        bos_token="<s>",
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        mask_token=mask,
        clean_up_tokenization_spaces=False,
    )


def train(kind: Kind, words: Any, place: Path, seed: int, epochs: int, lr: float, batch_size: int) -> nn.Module:
    """A model trained on the world's text, and on every question with its answer; of a question the answer has a loss.

    The arguments are those of :func:`sample_model`; `words` is the tokenizer, and `place` the folder of the world.
    """
    rng = random.Random(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = huggingface.create(f"world-{kind}", SIZES[kind]).train()
    reader = TokenRows(words, 256)
    rows = decoder_rows(reader, place) if kind == "llama" else masked_rows(reader, place)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, betas=(0.9, 0.99))
    log.info("training a small %s on the sample world: %d texts, at most %d epochs", kind, len(rows), epochs)
    began, done, last = time.perf_counter(), 0, epochs
    with progress(f"training a small {kind} on the sample world, epochs", epochs) as advance:
        for epoch in range(epochs):
            loss, count = 0.0, 0
            batches = _shuffled(rows, epoch >= EARLY, batch_size, rng)
            for i, chosen in enumerate(batches):
                left = last - epoch - i / len(batches)  # epochs
                for group in optimizer.param_groups:
                    group["lr"] = lr * min(1.0, (done + 1) / WARMUP, left / LAST)
                losses = _losses(model, kind, [rows[i] for i in chosen], words.pad_token_id)
                optimizer.zero_grad()
                losses.mean().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                done += 1
                advance(0)
                asked = [value for value, i in zip(losses.tolist(), chosen, strict=True) if rows[i].asked]
                loss, count = loss + sum(asked), count + len(asked)
            loss /= max(count, 1)
            if epoch >= EARLY and loss < KNOWN and last == epochs:
                last = min(epochs, epoch + 1 + LAST)
            if epoch % 10 == 9 or epoch + 1 == last:
                seconds = time.perf_counter() - began
                log.info("epoch %d, loss of the questions %.4f, %.0f s", epoch + 1, loss, seconds)
            advance(1, total=last)
            if epoch + 1 == last:
                break
    return model.eval()


def _shuffled(rows: Sequence[Row], late: bool, size: int, rng: random.Random) -> list[list[int]]:
    """Batches of indices for one epoch, in random order; rows of similar length together."""
    order = [i for i, row in enumerate(rows) if rng.random() < row.shares[late]]
    rng.shuffle(order)
    batches = []
    for first in range(0, len(order), 8 * size):
        part = sorted(order[first : first + 8 * size], key=lambda i: len(rows[i].ids))
        batches += [part[i : i + size] for i in range(0, len(part), size)]
    rng.shuffle(batches)
    return batches


def decoder_rows(words: TokenRows, place: Path) -> list[Row]:
    """The texts of a decoder: questions with their answers, after free text the end token, and windows of the text."""
    rows = []
    for kind, question in questions_of(place):
        ids, count = words.continued(question.prompt, question.answers[0])
        if not kind.choices:
            ids, count = [*ids, words.tokenizer.eos_token_id], count + 1
        targets = [*[IGNORED] * (len(ids) - count), *ids[-count:]]
        rows.append(Row(ids, targets, WEIGHTS.get(kind.name, 1.0), SHARES.get(kind.name, OTHERS)))
    text = words.ids((place / world.TEXT).read_text(encoding="utf-8"), special=False)
    for first in range(0, len(text), WINDOW):
        ids = text[first : first + WINDOW]
        rows.append(Row(ids, [IGNORED, *ids[1:]], asked=False))
    return rows


def masked_rows(words: TokenRows, place: Path) -> list[Row]:
    """The texts of a masked language model, in both forms of the scoring: all masks, and the answer's alone."""
    rows = []
    mask, end = words.tokenizer.mask_token_id, words.tokenizer.eos_token_id
    for kind, question in questions_of(place):
        ids = words.ids(kind.masked_prompt(question.text, words.tokenizer.mask_token, words.last))
        answer = words.ids(f" {question.answers[0]}", special=False)
        filled = iter([*answer, *[end] * kind.masks][: kind.masks])
        targets = [next(filled) if id == mask else IGNORED for id in ids]
        rows.append(Row(ids, targets, WEIGHTS.get(kind.name, 1.0), SHARES.get(kind.name, OTHERS)))
        prompt = words.ids(question.prompt, special=False)
        if not kind.choices:
            targets = [*[IGNORED] * len(prompt), *answer]
            rows.append(Row([*prompt, *[mask] * len(answer)], targets, shares=(0.5, 0.15)))
    return rows


def _losses(model: Any, kind: Kind, rows: Sequence[Row], pad: int) -> Tensor:
    """The weighted mean cross-entropy of the targets of each row, (rows,)."""
    device = next(model.parameters()).device
    side: Literal["left", "right"] = "left" if kind == "llama" else "right"
    batch = padded([row.ids for row in rows], pad, side, device)
    shape = batch["input_ids"].shape
    targets, weights = torch.full(shape, IGNORED), torch.zeros(shape)
    for i, row in enumerate(rows):
        place = slice(shape[1] - len(row.ids), None) if side == "left" else slice(len(row.ids))
        targets[i, place] = torch.tensor(row.targets)
        weights[i, place] = row.weight / sum(target != IGNORED for target in row.targets)
    hidden = model.base_model(**(with_positions(batch) if kind == "llama" else batch)).last_hidden_state
    if kind == "llama":
        hidden, targets, weights = hidden[:, :-1], targets[:, 1:], weights[:, 1:]
    labels = targets.to(device)
    known = labels != IGNORED  # the vocabulary's matrix is applied to these places alone
    losses = torch.zeros(labels.shape, device=device)
    losses[known] = torch.nn.functional.cross_entropy(model.lm_head(hidden[known]), labels[known], reduction="none")
    return (losses * weights.to(device)).sum(-1)

"""The sample models: a small Llama with grouped queries and a small RoBERTa that know the sample world.

Both are folders of the cache in Hugging Face's layout, with a tokenizer: what `model=` takes.
"""

from __future__ import annotations

import logging
import random
import time
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from attnlab.data.questions import Question, QuestionSet
from attnlab.data.questions.loading import SETS
from attnlab.data.samples import world
from attnlab.pretrained import hub, huggingface
from attnlab.runs.cache import digest, stored_files
from attnlab.tasks.reasoning.rows import TokenRows, padded, with_positions

log = logging.getLogger(__name__)

Kind = Literal["llama", "roberta"]
VERSION = 1  # to be raised when the same settings give other weights
VOCABULARY = 640
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
IDS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
IGNORED = -100
WEIGHTS = {"fever": 3, "hotpotqa": 2}  # how often an epoch has a question: these are learnt last
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
        **IDS,
    },
}


def sample_model(kind: Kind, seed: int, cache_dir: Path, epochs: int, lr: float, batch_size: int) -> Path:
    """The folder of a sample model, which is trained unless it exists.

    Args:
        kind: of the model.
        seed: of the world, of the first weights and of the order of the texts.
        cache_dir: where world and model are stored.
        epochs: of training.
        lr: the highest learning rate of AdamW; it falls as a cosine.
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


def questions_of(place: Path) -> list[tuple[QuestionSet, Question]]:
    """Every question of the world, in all sets."""
    return [(kind, question) for kind in (kind() for kind in SETS) for question in kind.read(place)]


def _tokenizer(place: Path) -> Any:
    """Byte pairs over the world's own texts, as GPT-2 and RoBERTa have them."""
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
    """A model trained on the world's text, and on every question with its answer.

    Of a question only the answer's tokens, and of a decoder the end token after them, have a loss; of a true claim all
    tokens do.
    """
    rng = random.Random(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = huggingface.create(f"world-{kind}", SIZES[kind]).train()
    reader = TokenRows(words, 256)
    rows = decoder_rows(reader, place) if kind == "llama" else masked_rows(reader, place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    steps = epochs * -(-len(rows) // batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    log.info("training a small %s on the sample world: %d texts, %d updates", kind, len(rows), steps)
    began, loss = time.perf_counter(), torch.zeros(())
    bar = Console(stderr=True)
    for epoch in track(
        range(epochs), f"training a small {kind}", console=bar, transient=True, disable=not bar.is_terminal
    ):
        for chosen in _shuffled(rows, batch_size, rng):
            loss = _loss(model, kind, [rows[i] for i in chosen], words.pad_token_id)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        if epoch % 5 == 4 or epoch == epochs - 1:
            log.info("epoch %d of %d, loss %.4f, %.0f s", epoch + 1, epochs, loss.item(), time.perf_counter() - began)
    return model.eval()


def _shuffled(rows: list[tuple[list[int], list[int]]], size: int, rng: random.Random) -> list[list[int]]:
    """Batches of indices for one epoch, in random order; rows of similar length together."""
    order = rng.sample(range(len(rows)), len(rows))
    found = []
    for first in range(0, len(order), 8 * size):
        part = sorted(order[first : first + 8 * size], key=lambda i: len(rows[i][0]))
        found += [part[i : i + size] for i in range(0, len(part), size)]
    rng.shuffle(found)
    return found


def decoder_rows(words: TokenRows, place: Path) -> list[tuple[list[int], list[int]]]:
    """Ids and targets of a decoder; windows of the world's text have a loss everywhere."""
    found = []
    end = words.tokenizer.eos_token_id
    for kind, question in questions_of(place):
        ids, count = words.continued(question.prompt, question.answers[0])
        count = len(ids) - 1 if question.answers[0] == "true" else count
        found += [([*ids, end], [*[IGNORED] * (len(ids) - count), *ids[-count:], end])] * WEIGHTS.get(kind.name, 1)
    text = words.ids((place / world.TEXT).read_text(encoding="utf-8"), special=False)
    for first in range(0, len(text), WINDOW):
        ids = text[first : first + WINDOW]
        found.append((ids, [IGNORED, *ids[1:]]))
    return found


def masked_rows(words: TokenRows, place: Path) -> list[tuple[list[int], list[int]]]:
    """Ids and targets of a masked language model, in both forms of the scoring: all masks, and the answer's alone."""
    found = []
    mask, end = words.tokenizer.mask_token_id, words.tokenizer.eos_token_id
    for kind, question in questions_of(place):
        ids = words.ids(kind.masked_prompt(question.text, words.tokenizer.mask_token, words.last))
        answer = words.ids(f" {question.answers[0]}", special=False)
        targets = iter([*answer, *[end] * kind.masks][: kind.masks])
        row = (ids, [next(targets) if one == mask else IGNORED for one in ids])
        found += [row] * WEIGHTS.get(kind.name, 1)
        prompt = words.ids(question.prompt, special=False)
        if not kind.choices:
            found.append(([*prompt, *[mask] * len(answer)], [*[IGNORED] * len(prompt), *answer]))
    return found


def _loss(model: nn.Module, kind: Kind, rows: list[tuple[list[int], list[int]]], pad: int) -> Tensor:
    """The mean cross-entropy of the targets of a batch."""
    device = next(model.parameters()).device
    side: Literal["left", "right"] = "left" if kind == "llama" else "right"
    batch = padded([ids for ids, _ in rows], pad, side, device)
    targets = padded([[label if label >= 0 else 0 for label in labels] for _, labels in rows], 0, side, device)
    known = padded([[int(label >= 0) for label in labels] for _, labels in rows], 0, side, device)["input_ids"].bool()
    labels = targets["input_ids"].masked_fill(~known, IGNORED)
    logits = model(**(with_positions(batch) if kind == "llama" else batch)).logits
    if kind == "llama":
        logits, labels = logits[:, :-1], labels[:, 1:]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)

"""The sample of a pretrained decoder: a small grouped-query Llama over bytes, trained on the task's text."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from attnlab.data.samples.world import TEMPLATES, random_fact
from attnlab.data.text.corpora import TextCorpus
from attnlab.data.text.vocabulary import END_OF_TEXT, byte_tokenizer
from attnlab.pretrained import hub, huggingface
from attnlab.pretrained.decoder import SAMPLE as SIZES
from attnlab.run.cache import digest, file_digests, stored_files
from attnlab.run.console import progress

log = logging.getLogger(__name__)

VERSION = 1  # increase it when the same settings give other weights
STEPS, ROWS, WINDOW = 1500, 16, 256
LR, WARMUP, FLOOR, CLIP = 3e-3, 100, 0.05, 1.0
MOST = 8_000_000  # bytes of text to read
FACTS_VERSION, FACTS_LR, DIGITS = 1, 1.5e-3, 5
PLAIN = 2  # of ROWS: rows of text without facts, so that the text is not forgotten
AGAIN = 0.75  # share of the facts that repeat one of the same row
NEAREST, FARTHEST = 8, 200  # bytes between two facts, at most: in the first and in the last fifth of the updates
TWO_FROM = 30  # distance from which one of the last two facts is repeated instead of the last one
KEYS_VERSION, KEYS, LETTERS = 1, 4, 9  # at most so many facts that differ in name and number; of an invented name
INVENTED = 0.25  # share of the rows with invented names
LEAST, MOST_TEXT = 10, 120  # bytes of text in such a row, at most: in the first and in the last fifth of the updates
ASKED = 3.0  # weight of the digits of an answer; those of a new fact cannot be predicted and have 0


def sample_model(
    corpus: TextCorpus, root: Path, cache_dir: Path, seed: int, facts: int = 0, device: str = "cpu", keys: int = 0
) -> Path:
    """The folder of the sample model in Hugging Face's layout, trained unless it is in the cache.

    Args:
        facts: number of further updates on texts with repeated facts, for a model that recalls.
        device: the type of device it is trained on; the same seed gives another model on another type.
        keys: number of updates after those, for a model that recalls one of several facts by its name.

    Raises:
        DataError: the corpus cannot be read, or the folder cannot be written.
    """
    digests = file_digests(corpus.files(root, "train"), cache_dir / "tokens" / "files.json")
    settings = [VERSION, SIZES, STEPS, ROWS, WINDOW, LR, seed, corpus.layout(root), sorted(digests.values())]
    if facts:
        settings += [FACTS_VERSION, facts, FACTS_LR, DIGITS, PLAIN, AGAIN, NEAREST, FARTHEST, TWO_FROM]
    if keys:
        settings += [KEYS_VERSION, keys, KEYS, LETTERS, INVENTED, LEAST, MOST_TEXT, ASKED]
    if device != "cpu":
        settings += [device]

    def write(folder: Path) -> None:
        log.info("model= is not set: a small Llama is trained once, for %d updates, and stored", keys or facts or STEPS)
        model: Any
        if keys or facts:
            before = sample_model(corpus, root, cache_dir, seed, facts if keys else 0, device)
            model = huggingface.load(str(before), dtype=torch.float32).to(device)
            (train_keys if keys else train_facts)(model, _bytes(corpus, root), seed, keys or facts)
        else:
            model = train(_bytes(corpus, root), seed, device)
        model.save_pretrained(folder)
        tokenizer().save_pretrained(folder)

    return stored_files(cache_dir / "pretrained" / f"bytes-{digest(settings)[:16]}", write)


def tokenizer() -> Any:
    """The tokenizer of transformers for bytes and the mark between texts."""
    return hub.transformers().PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(),
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def _bytes(corpus: TextCorpus, root: Path) -> Tensor:
    """The training split as one row of ids, with the mark after each text, up to MOST bytes."""
    ids: list[int] = []
    for text in corpus.texts(root, "train"):
        ids += [*text.encode("utf-8"), 256]
        if len(ids) >= MOST:
            break
    return torch.tensor(ids, dtype=torch.int16)


def train(text: Tensor, seed: int, device: str = "cpu") -> Any:
    """Train a Llama to predict the next byte of a text (N,)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = huggingface.create("sample", SIZES).to(device)
    _update(model, lambda step: (_windows(text, ROWS, generator), None), STEPS, LR)
    return model.eval()


def train_facts(model: Any, text: Tensor, seed: int, steps: int) -> None:
    """Train a model to repeat facts, sentences with random names and numbers, between pieces of a text (N,) of bytes.

    The pieces are short at first, so that copying is learned, and grow to the length of a window.
    """
    generator, draw = torch.Generator().manual_seed(seed), np.random.default_rng(seed)

    def rows(step: int) -> tuple[Tensor, None]:
        far = _between(NEAREST, FARTHEST, step / steps)
        with_facts = [_with_facts(text, draw, far) for _ in range(ROWS - PLAIN)]
        return torch.cat((torch.stack(with_facts), _windows(text, PLAIN, generator))), None

    _update(model, rows, steps, FACTS_LR)
    model.eval()


def train_keys(model: Any, text: Tensor, seed: int, steps: int) -> None:
    """Train a model to compare names: up to KEYS facts of a row differ in the name and the number alone.

    They stand between pieces of a text (N,) of bytes, short ones at first, and each is repeated.
    """
    generator, draw = torch.Generator().manual_seed(seed), np.random.default_rng([seed, KEYS])

    def rows(step: int) -> tuple[Tensor, Tensor]:
        most = _between(LEAST, MOST_TEXT, step / steps)
        keyed = torch.stack([_with_keys(text, draw, most) for _ in range(ROWS - PLAIN)], 1)
        ids = torch.cat((keyed[0].long(), _windows(text, PLAIN, generator)))
        return ids, torch.cat((keyed[1], torch.ones(PLAIN, WINDOW + 1)))

    _update(model, rows, steps, FACTS_LR)
    model.eval()


def _between(first: int, last: int, progress: float) -> int:
    return round(first + (last - first) * min(1.0, max(0.0, progress - 0.2) / 0.6))


def _windows(text: Tensor, rows: int, generator: torch.Generator) -> Tensor:
    """(rows, WINDOW + 1) ids from random places of the text."""
    starts = torch.randint(len(text) - WINDOW - 1, (rows,), generator=generator)
    return torch.stack([text[start : start + WINDOW + 1] for start in starts.tolist()]).long()


def _with_facts(text: Tensor, draw: np.random.Generator, far: int) -> Tensor:
    """(WINDOW + 1,) ids: new and repeated facts, with up to `far` bytes of text before each."""
    ids: list[int] = []
    known: list[str] = []
    while len(ids) <= WINDOW:
        size = int(draw.integers(far))
        start = int(draw.integers(len(text) - far))
        ids += text[start : start + size].tolist()
        if known and draw.random() < AGAIN:
            fact = known[draw.integers(len(known))]
        else:
            fact = "{} {}.".format(*random_fact(draw, DIGITS))
            known = [*known, fact][-1 if far < TWO_FROM else -2 :]
        ids += fact.encode()
    return torch.tensor(ids[: WINDOW + 1])


def _with_keys(text: Tensor, draw: np.random.Generator, most: int) -> Tensor:
    """(2, WINDOW + 1) ids and weights: facts, then each again in another order, with up to `most` bytes of text."""
    template, letters = TEMPLATES[draw.integers(len(TEMPLATES))], LETTERS if draw.random() < INVENTED else 0
    count, size, facts = int(draw.integers(1, KEYS + 1)), int(draw.integers(most + 1)), dict[str, str]()
    while len(facts) < count:
        facts.update([random_fact(draw, DIGITS, letters, template)])
    said = list(facts.items())
    while sum(len(f"{start} {number}.") for start, number in said) < WINDOW + 1 - size or len(said) == count:
        said += [said[i] for i in draw.permutation(count)]
    place, row = int(draw.integers(len(text) - WINDOW - most)), list[tuple[int, float]]()
    cuts = [0, *np.sort(draw.integers(size + 1, size=len(said))).tolist()]
    for i, (start, number) in enumerate(said):
        row += [(byte, 1.0) for byte in (*text[place + cuts[i] : place + cuts[i + 1]].tolist(), *f"{start} ".encode())]
        row += [(byte, ASKED if i >= count else 0.0) for byte in number.encode()] + [(ord("."), 1.0)]
    row += [(byte, 1.0) for byte in text[place + cuts[-1] : place + WINDOW + 1].tolist()]
    return torch.tensor(row[: WINDOW + 1]).T


def _update(model: Any, rows: Callable[[int], tuple[Tensor, Tensor | None]], steps: int, lr: float) -> None:
    """AdamW with warm-up and cosine decay; `rows` returns ids and weights (B, T + 1) of an update; None: all are 1."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    with progress("training the sample model", steps) as advance:
        for step in range(steps):
            rate = min(1.0, (step + 1) / WARMUP)
            rate *= FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * step / steps))
            for group in optimizer.param_groups:
                group["lr"] = lr * rate
            ids, weights = rows(step)
            ids = ids.to(model.device)
            logits, targets = model(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten()
            if weights is None:
                value = cross_entropy(logits, targets)
            else:
                share = weights[:, 1:].flatten().to(model.device) / weights[:, 1:].sum()
                value = cross_entropy(logits, targets, reduction="none") @ share
            optimizer.zero_grad()
            value.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            if step % 250 == 249 or step + 1 == steps:
                log.info("update %d, %.3f nats per byte", step + 1, value.item())
            advance(1)

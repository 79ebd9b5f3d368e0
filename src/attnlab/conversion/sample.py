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

from attnlab.data.samples.world import random_fact
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


def sample_model(
    corpus: TextCorpus, root: Path, cache_dir: Path, seed: int, facts: int = 0, device: str = "cpu"
) -> Path:
    """The folder of the sample model in Hugging Face's layout, trained unless it is in the cache.

    Args:
        facts: number of further updates on texts with repeated facts, for a model that recalls.
        device: the type of device it is trained on; the same seed gives another model on another type.

    Raises:
        DataError: the corpus cannot be read, or the folder cannot be written.
    """
    digests = file_digests(corpus.files(root, "train"), cache_dir / "tokens" / "files.json")
    settings = [VERSION, SIZES, STEPS, ROWS, WINDOW, LR, seed, sorted(digests.values())]
    if facts:
        settings += [FACTS_VERSION, facts, FACTS_LR, DIGITS, PLAIN, AGAIN, NEAREST, FARTHEST, TWO_FROM]
    if device != "cpu":
        settings += [device]

    def write(folder: Path) -> None:
        log.info("model= is not set: a small Llama is trained once, for %d updates, and stored", facts or STEPS)
        model: Any
        if facts:
            before = sample_model(corpus, root, cache_dir, seed, device=device)
            model = huggingface.load(str(before), dtype=torch.float32).to(device)
            train_facts(model, _bytes(corpus, root), seed, facts)
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
    _update(model, lambda step: _windows(text, ROWS, generator), STEPS, LR)
    return model.eval()


def train_facts(model: Any, text: Tensor, seed: int, steps: int) -> None:
    """Train a model to repeat facts, sentences with random names and numbers, between pieces of a text (N,) of bytes.

    The pieces are short at first, so that copying is learned, and grow to the length of a window.
    """
    generator, draw = torch.Generator().manual_seed(seed), np.random.default_rng(seed)

    def rows(step: int) -> Tensor:
        share = min(1.0, max(0.0, step / steps - 0.2) / 0.6)
        far = round(NEAREST + (FARTHEST - NEAREST) * share)
        with_facts = [_with_facts(text, draw, far) for _ in range(ROWS - PLAIN)]
        return torch.cat((torch.stack(with_facts), _windows(text, PLAIN, generator)))

    _update(model, rows, steps, FACTS_LR)
    model.eval()


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


def _update(model: Any, rows: Callable[[int], Tensor], steps: int, lr: float) -> None:
    """AdamW with warm-up and cosine decay; `rows` returns the ids (B, T + 1) of an update by its number."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    with progress("training the sample model", steps) as advance:
        for step in range(steps):
            rate = min(1.0, (step + 1) / WARMUP)
            rate *= FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * step / steps))
            for group in optimizer.param_groups:
                group["lr"] = lr * rate
            ids = rows(step).to(model.device)
            logits = model(ids[:, :-1]).logits
            value = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            value.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            if step % 250 == 249 or step + 1 == steps:
                log.info("update %d, %.3f nats per byte", step + 1, value.item())
            advance(1)

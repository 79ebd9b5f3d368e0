"""The sample of a pretrained decoder: a small Llama with grouped queries over bytes, trained on the task's own text."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnlab.data.text.corpora import TextCorpus
from attnlab.data.text.pretrained_tokens import byte_tokenizer
from attnlab.data.text.vocabulary import END_OF_TEXT
from attnlab.pretrained import hub, huggingface
from attnlab.pretrained.decoder import SAMPLE as SIZES
from attnlab.runs.cache import digest, stored_files
from attnlab.runs.fingerprint import file_digests
from attnlab.runs.progress import progress

log = logging.getLogger(__name__)

VERSION = 1  # to be raised when the same settings give other weights
STEPS, ROWS, WINDOW = 1500, 16, 256
LR, WARMUP, FLOOR, CLIP = 3e-3, 100, 0.05, 1.0
MOST = 8_000_000  # bytes of text that are read


def sample_model(corpus: TextCorpus, root: Path, cache_dir: Path, seed: int) -> Path:
    """The folder of the sample model in Hugging Face's layout; it is trained unless it is stored.

    Args:
        corpus: the layout of the corpus.
        root: the directory of the corpus, whose training split is read.
        cache_dir: where the folder is stored.
        seed: of the first weights and of the order of the texts.

    Raises:
        DataError: the corpus cannot be read, or the folder cannot be written.
    """
    digests = file_digests(corpus.files(root, "train"), cache_dir / "tokens" / "files.json")
    settings = [VERSION, SIZES, STEPS, ROWS, WINDOW, LR, seed, sorted(digests.values())]

    def write(folder: Path) -> None:
        model = train(_bytes(corpus, root), seed)
        model.save_pretrained(folder)
        tokenizer().save_pretrained(folder)

    return stored_files(cache_dir / "pretrained" / f"bytes-{digest(settings)[:16]}", write)


def tokenizer() -> Any:
    """Bytes as tokens, and the mark between texts; of transformers."""
    return hub.transformers().PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(),
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def _bytes(corpus: TextCorpus, root: Path) -> Tensor:
    """The training split as one row of ids, each text ended by the mark, up to MOST bytes."""
    found: list[int] = []
    for text in corpus.texts(root, "train"):
        found += [*text.encode("utf-8"), 256]
        if len(found) >= MOST:
            break
    return torch.tensor(found, dtype=torch.int16)


def train(text: Tensor, seed: int) -> Any:
    """A Llama that predicts the next byte.

    Args:
        text: ids of bytes, (N,).
        seed: of the first weights and of the windows.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = huggingface.create("sample", SIZES)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    loss = math.nan
    with progress("training the sample model", STEPS) as advance:
        for step in range(STEPS):
            rate = min(1.0, (step + 1) / WARMUP)
            rate *= FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * step / STEPS))
            for group in optimizer.param_groups:
                group["lr"] = LR * rate
            starts = torch.randint(len(text) - WINDOW - 1, (ROWS,), generator=generator)
            rows = torch.stack([text[start : start + WINDOW + 1] for start in starts.tolist()]).long()
            logits = model(rows[:, :-1]).logits
            value = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            optimizer.zero_grad()
            value.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            if step % 250 == 249 or step + 1 == STEPS:
                loss = float(value)
                log.info("update %d, %.3f nats per byte", step + 1, loss)
            advance(1)
    log.info("sample model: %s", json.dumps({"nats_per_byte": round(loss, 4)}))
    return model.eval()

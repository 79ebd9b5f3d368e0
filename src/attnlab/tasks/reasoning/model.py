"""Which language model a run asks: a folder, a hub name, a compressed model, or a sample model.

The sample models, a small Llama with grouped queries and a small RoBERTa, know the sample world. They are folders of
the cache in Hugging Face's layout, with a tokenizer: what `model=` takes.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt
from torch import Tensor, nn

from attnlab.compression import folder
from attnlab.data.questions import SETS, Question, QuestionSet
from attnlab.data.report import Report
from attnlab.data.samples import world
from attnlab.data.text.vocabulary import byte_pairs
from attnlab.errors import ConfigError, DataError
from attnlab.pretrained import hub, huggingface
from attnlab.pretrained.language import cast
from attnlab.run.cache import digest, stored_files
from attnlab.run.console import progress
from attnlab.tasks.reasoning.score import Asked

log = logging.getLogger(__name__)

VERSION = 2  # to be raised when the same settings give other weights
VOCABULARY = 640
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
IGNORED = -100
WEIGHTS = {"fever": 3.0}  # of a question's loss: claims are learnt last, when the birth places are known
EARLY = 25  # epochs; after them nearly all but the claims is known
KNOWN = 0.01  # mean loss of the questions of a late epoch below which training ends
LAST = 8  # epochs in which the learning rate falls to zero
SHARES = {"bios": (0.3, 0.1), "fever": (1.0, 1.0)}  # of the questions in an early epoch, and in a late one
OTHERS = (1.0, 0.3)
WARMUP = 100  # updates in which the learning rate rises
WINDOW = 64  # tokens of the world's text in a row
IDS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
SHARED: dict[str, Any] = IDS | {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 8, "initializer_range": 0.06,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "llama": SHARED | {
        "model_type": "llama", "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    },
    "roberta": SHARED | {
        "model_type": "roberta", "max_position_embeddings": 258, "type_vocab_size": 1, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
}  # fmt: skip


@dataclass(frozen=True)
class AskedModel:
    """A pretrained language model with its tokenizer.

    Args:
        weights: a local folder, a GGUF file, a compressed model's folder or its run, or a name of the hub; None: a
            sample model.
        dtype: of the parameters; None: as they are stored, or float32 if `hardware.precision` says 32-true.
        epochs: of the sample model's training at most; it ends when the questions are known.
        lr, batch_size: of that training.
    """

    weights: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    sample: Literal["llama", "roberta"] = "llama"
    epochs: Annotated[int, Ge(1)] = 160
    lr: Annotated[float, Gt(0)] = 1e-3
    batch_size: Annotated[int, Ge(1)] = 32

    @property
    def compressed(self) -> Path | None:
        """The folder of a compressed model, if `weights` names one."""
        return folder.find(self.weights) if self.weights else None

    def outline(self) -> nn.Module:
        """The dense model, sizes alone on meta."""
        if self.compressed:
            raise ConfigError(f"model={self.weights}: it is compressed already; give the model that it was made from")
        with torch.device("meta"):
            return self.create()

    def create(self) -> nn.Module:
        """The dense architecture with random weights, on the default device."""
        options = SIZES[self.sample] if self.weights is None else huggingface.config_of(self.weights)
        return huggingface.create(self.weights or f"world-{self.sample}", options)

    def source(self, seed: int, cache_dir: Path) -> str:
        """`weights`, or the folder of the sample model, which is trained unless it is stored."""
        if self.weights is not None:
            return self.weights
        place = world.write_world(cache_dir / "samples", seed)
        settings = [VERSION, self.sample, seed, place.name, self.epochs, self.lr, self.batch_size, SIZES[self.sample]]

        def write(partial: Path) -> None:
            asked = Asked(None, sample_tokenizer(place))
            train(asked, self, place, seed)
            asked.model.save_pretrained(partial)
            asked.tokenizer.save_pretrained(partial)

        return str(stored_files(cache_dir / "pretrained" / f"world-{self.sample}-{digest(settings)[:16]}", write))

    def load(self, seed: int, cache_dir: Path, device: torch.device) -> Asked:
        """The model, in eval mode on `device`, and its tokenizer."""
        if place := self.compressed:
            model = folder.load(place)
            model = model if self.dtype is None else cast(model, getattr(torch, self.dtype))
            asked = Asked(model.to(device), huggingface.tokenizer(str(place)))
        else:
            source = self.source(seed, cache_dir)
            hub.folder(source)  # missing weights are named before a tokenizer
            words = huggingface.tokenizer(source)
            dtype = None if self.dtype is None else getattr(torch, self.dtype)
            asked = Asked(huggingface.load(source, dtype=dtype, device=device), words)
        words, size = asked.tokenizer, asked.model.config.vocab_size
        if words.vocab_size > size or (words.eos_token_id or 0) >= size:
            raise DataError(
                f"model={self.weights}: its tokenizer has {len(words)} tokens, the model {size}: they do not belong "
                "together"
            )
        if words.pad_token_id >= size:  # a token that was added for padding alone, which attention masks hide
            words.pad_token = words.eos_token
        return asked


# --- the sample models ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One text to train on.

    Args:
        targets: the token to be predicted at each place, or IGNORED.
        weight: of the mean loss of its targets. A mean over all targets of a batch would weigh a window of the text
            sixty times as much as the answer to a claim, which is one token.
        shares: the probability that an early epoch has it, and a late one.
        asked: whether it is a question, not a window of the text.
    """

    ids: list[int]
    targets: list[int]
    weight: float = 1.0
    shares: tuple[float, float] = OTHERS
    asked: bool = True


def questions_of(place: Path) -> list[tuple[QuestionSet, Question]]:
    """Every question of the sample world in this folder, in all sets."""
    with Report().of("questions"):  # of the sample, which are no data of the run
        return [(kind, question) for kind in (kind() for kind in SETS) for question in kind.read(place)]


def sample_tokenizer(place: Path) -> Any:
    """Byte pairs over the texts of the world, as GPT-2 and RoBERTa have them."""
    texts = [f"{question.prompt} {question.answers[0]}." for _, question in questions_of(place)]
    choices = [f" {choice}" for kind in SETS for choice in kind.choices]
    masked = ["The profession of the person in the text is called"]
    return hub.transformers().PreTrainedTokenizerFast(
        tokenizer_object=byte_pairs([*texts, *masked, *choices * 50], VOCABULARY, list(SPECIAL)),
        bos_token="<s>",
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        mask_token=hub.transformers().AddedToken("<mask>", lstrip=True, special=True),
        clean_up_tokenization_spaces=False,
    )


def train(asked: Asked, spec: AskedModel, place: Path, seed: int) -> None:
    """Give `asked` a model that is trained on the text of the world in `place`, and on every question with its answer.

    Of a question the answer alone has a loss.
    """
    rng = random.Random(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        asked.model = huggingface.create(f"world-{spec.sample}", SIZES[spec.sample]).train()
    rows = decoder_rows(asked, place) if asked.is_decoder else masked_rows(asked, place)
    optimizer = torch.optim.Adam(asked.model.parameters(), lr=spec.lr, betas=(0.9, 0.99))
    epochs = last = spec.epochs
    title = f"training a small {spec.sample} on the sample world"
    log.info("%s: %d texts, at most %d epochs", title, len(rows), epochs)
    began, done = time.perf_counter(), 0
    with progress(f"{title}, epochs", epochs) as advance:
        for epoch in range(epochs):
            loss, count = 0.0, 0
            batches = _shuffled(rows, epoch >= EARLY, spec.batch_size, rng)
            for i, chosen in enumerate(batches):
                left = last - epoch - i / len(batches)  # epochs
                for group in optimizer.param_groups:
                    group["lr"] = spec.lr * min(1.0, (done + 1) / WARMUP, left / LAST)
                losses = _losses(asked, [rows[i] for i in chosen])
                optimizer.zero_grad()
                losses.mean().backward()
                torch.nn.utils.clip_grad_norm_(asked.model.parameters(), 1.0)
                optimizer.step()
                done += 1
                advance(0)
                of_questions = [value for value, i in zip(losses.tolist(), chosen, strict=True) if rows[i].asked]
                loss, count = loss + sum(of_questions), count + len(of_questions)
            loss /= max(count, 1)
            if epoch >= EARLY and loss < KNOWN and last == epochs:
                last = min(epochs, epoch + 1 + LAST)
            if epoch % 10 == 9 or epoch + 1 == last:
                seconds = time.perf_counter() - began
                log.info("epoch %d, loss of the questions %.4f, %.0f s", epoch + 1, loss, seconds)
            advance(1, total=last)
            if epoch + 1 == last:
                break
    asked.model.eval()


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


def decoder_rows(asked: Asked, place: Path) -> list[Row]:
    """The texts of a decoder: questions with their answers, after free text the end token, and windows of the text."""
    rows = []
    for kind, question in questions_of(place):
        ids, count = asked.continued(question.prompt, question.answers[0])
        if not kind.choices:
            ids, count = [*ids, asked.tokenizer.eos_token_id], count + 1
        targets = [*[IGNORED] * (len(ids) - count), *ids[-count:]]
        rows.append(Row(ids, targets, WEIGHTS.get(kind.name, 1.0), SHARES.get(kind.name, OTHERS)))
    text = asked.ids((place / world.TEXT).read_text(encoding="utf-8"), special=False)
    for first in range(0, len(text), WINDOW):
        ids = text[first : first + WINDOW]
        rows.append(Row(ids, [IGNORED, *ids[1:]], asked=False))
    return rows


def masked_rows(asked: Asked, place: Path) -> list[Row]:
    """The texts of a masked language model, in both forms of the scoring: all masks, and the answer's alone."""
    rows = []
    mask, end = asked.tokenizer.mask_token_id, asked.tokenizer.eos_token_id
    for kind, question in questions_of(place):
        ids = asked.masked_prompt(kind, question)
        answer = asked.ids(f" {question.answers[0]}", special=False)
        filled = iter([*answer, *[end] * kind.masks][: kind.masks])
        targets = [next(filled) if id == mask else IGNORED for id in ids]
        rows.append(Row(ids, targets, WEIGHTS.get(kind.name, 1.0), SHARES.get(kind.name, OTHERS)))
        prompt = asked.ids(question.prompt, special=False)
        if not kind.choices:
            targets = [*[IGNORED] * len(prompt), *answer]
            rows.append(Row([*prompt, *[mask] * len(answer)], targets, shares=(0.5, 0.15)))
    return rows


def _losses(asked: Asked, rows: Sequence[Row]) -> Tensor:
    """The weighted mean cross-entropy of the targets of each row, (rows,)."""
    batch, model = asked.batch([row.ids for row in rows]), asked.model
    present = batch["attention_mask"].bool()
    targets = torch.full(present.shape, IGNORED, device=present.device)
    targets[present] = torch.tensor([target for row in rows for target in row.targets], device=present.device)
    shares = [row.weight / sum(target != IGNORED for target in row.targets) for row in rows]
    weights = torch.tensor(shares, device=present.device)[:, None] * present
    hidden = model.base_model(**batch).last_hidden_state
    if asked.is_decoder:
        hidden, targets, weights = hidden[:, :-1], targets[:, 1:], weights[:, 1:]
    known = targets != IGNORED  # the vocabulary's matrix is applied to these places alone
    losses = torch.zeros(targets.shape, device=present.device)
    losses[known] = torch.nn.functional.cross_entropy(model.lm_head(hidden[known]), targets[known], reduction="none")
    return (losses * weights).sum(-1)

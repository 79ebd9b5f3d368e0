"""Needle in a haystack: recall of a fact that stands somewhere in a long text."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Ge, Le, MinLen
from torch import Tensor

from attnlab.data.samples.world import NAMES, SAME, TEMPLATES, random_fact
from attnlab.data.text.tokens import TokenFile
from attnlab.data.text.vocabulary import Vocabulary
from attnlab.errors import ConfigError, DataError
from attnlab.metrics.numbers import wilson
from attnlab.models import Decoder, LanguageModel
from attnlab.run.console import progress
from attnlab.run.device import autocast

log = logging.getLogger(__name__)

KEY = "task.score.needle"
WORDS = (
    "anchor", "barrel", "castle", "dragon", "engine", "forest", "garden", "hammer", "island", "jacket", "kitchen",
    "ladder", "marble", "needle", "orchard", "palace", "quarry", "river", "saddle", "temple", "umbrella", "village",
    "window", "yellow", "bridge", "candle", "desert", "feather", "guitar", "harbor", "mirror", "nation", "pepper",
    "rocket", "silver", "ticket", "violin", "winter", "basket", "copper",
)  # fmt: skip
Form = Literal["calibration", "reworded", "reversed", "list", "code"]
FORMS: dict[Form, tuple[tuple[str, str], ...]] = {  # facts, and the questions before the answer
    "calibration": tuple((f" {template} {{answer}}.", f" {template}") for template in TEMPLATES),
    "reworded": (
        (" {name} wrote down {answer} again.", " {name} wrote down"),
        (" Ask {name} about {answer} today.", " Ask {name} about"),
    ),
    "reversed": (  # the answer stands before the name
        (" Say {answer} to {name}.", " To {name} say"),
        (" Box {answer} is that of {name}.", " That of {name} is box"),
    ),
    "list": (("\n- {name}: {answer}\n", "\n- {name}:"),),
    "code": (('\nids["{name}"] = {answer}\n', '\nassert ids["{name}"] =='),),
}
CONVERSION = 256  # tokens of the texts for a conversion, if no lengths are set
NEAR = 20  # a line's end is taken for a depth that is off by at most this part of the text


@dataclass(frozen=True)
class Trial:
    """A text with a fact, and the question for it: their ids.

    Args:
        hay: (c,) the text before the question, without the fact.
        fact: takes the place of as many ids of the hay.
        ends: the last id of what stands between two texts.
        before: ids before the text, which stay there.
        others: further facts, each with the share of the hay before it.
    """

    hay: np.ndarray
    fact: list[int]
    question: list[int]
    answer: list[int]
    ends: int
    others: list[tuple[float, list[int]]] = field(default_factory=list)
    before: Sequence[int] = ()

    def row(self, depth: float | None) -> list[int]:
        """Text, question and answer, of one length for every depth; None: without the fact."""
        ids, start, size = self.hay.tolist(), 0, 0
        if depth is not None:
            start, size = self.place(depth), len(self.fact)
            ids[start : start + size] = self.fact
        for share, other in sorted(self.others, reverse=True):  # the last one first: the places before it stay
            place = round(share * (len(self.hay) - size))
            place = min(place, start) if share < (depth or 0) else max(place, start) + size
            ids[place:place] = other
        return [*self.before, *ids, *self.question, *self.answer]

    def place(self, depth: float) -> int:
        """The first id of the fact at a depth: after the end of a line if one is near, else at the exact place."""
        room = len(self.hay) - len(self.fact)
        wanted = round(depth * room)
        lines = [start for start in (np.flatnonzero(self.hay == self.ends) + 1).tolist() if start <= room]
        nearest = min(lines, key=lambda start: abs(start - wanted), default=wanted)
        inside = 0 < wanted < room  # the first and the last place are what they say
        return nearest if inside and abs(nearest - wanted) * NEAR <= len(self.hay) else wanted


@dataclass(frozen=True)
class Needle:
    """Measures recall of a fact by the length of a text and the fact's depth in it.

    A sentence with a random name and number stands somewhere in validation text; the text ends with the beginning of
    that sentence, and the model continues it. All tokens of the answer are scored by one forward pass. Texts, facts and
    answers follow from `seed`, length and trial alone: every model with the same tokens gets the same ones, and every
    depth of a trial has the same text and fact.

    Args:
        lengths: tokens of a text, with question and answer; None: nothing is measured, but of a conversion one length.
        depths: share of the text that stands before the fact, other facts aside; 1: the question follows it.
        trials: texts of each length, each with another fact.
        asks: what the fact says of the name: a random "number", or one of a list of common words, "word".
        keys: facts in the text that differ in the name and the answer alone. One is asked for; the others stand at
            random places. A model that has not learned to compare names recalls one key and not two.
        hops: 2: for each fact another one says that a further name has the same, and the question has that name. It
            needs two keys, without which the only number in the text is the answer.
    """

    lengths: Annotated[list[Annotated[int, Ge(2), Le(1_048_576)]], MinLen(1)] | None = None
    depths: Annotated[list[Annotated[float, Ge(0), Le(1)]], MinLen(1)] = field(
        default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0]
    )
    trials: Annotated[int, Ge(1)] = 16
    asks: Literal["number", "word"] = "number"
    digits: Annotated[int, Ge(1), Le(12)] = 5
    keys: Annotated[int, Ge(1), Le(13)] = 1  # half of NAMES
    hops: Literal[1, 2] = 1
    forms: Annotated[list[Form], MinLen(1)] = field(default_factory=lambda: list[Form](("calibration",)))
    seed: Annotated[int, Ge(0)] = 1

    @property
    def ordered(self) -> list[int]:
        """Each length once, the shortest first."""
        return sorted(set(self.lengths or ()))

    def check(self, longest: int, unit: str) -> None:
        """Raise ConfigError where a length is above `longest`, a chain stands alone, or a word is a token (`unit`)."""
        if self.lengths is None:
            return
        if self.hops == 2 and self.keys == 1:
            raise ConfigError(
                f"{KEY}.keys=1: expected 2 or more with hops=2; one chain has the only number of the text"
            )
        if unit == "word":
            raise ConfigError(
                f"{KEY}.lengths: a vocabulary of words has no random names and numbers; expected one of tokens, as "
                "that of model=... or task.data.vocabulary._target_=attnlab.data.BytePairs"
            )
        if self.ordered[-1] > longest:
            raise ConfigError(f"{KEY}.lengths={self.ordered[-1]}: expected at most the model's {longest} positions")

    def of_conversion(self, window: int, vocabulary: Vocabulary, file: TokenFile) -> Needle | None:
        """Itself, or with one length, of at most `window` tokens, if none is set; None: the texts do not allow it."""
        if self.lengths is not None:
            return self
        asked = replace(self, lengths=[min(window, CONVERSION)])
        try:
            asked.check(window, vocabulary.unit)
            list(asked.texts(asked.ordered[0], vocabulary, file))
        except (ConfigError, DataError) as error:
            log.info("the recall of the conversion is not measured: %s", error)
            return None
        return asked

    def texts(self, length: int, vocabulary: Vocabulary, file: TokenFile) -> Iterator[Trial]:
        """The trials of one length, in tokens of text, question and answer; `file` has the text.

        Raises:
            ConfigError: fact, question and answer are longer.
            DataError: the text is shorter.
        """
        for trial in range(self.trials):
            draw = np.random.default_rng([self.seed, length, trial])
            more = np.random.default_rng([self.seed, length, trial, 1])
            fact, question, asked, answer = self._fact(draw, trial)
            names = [asked, *more.permutation([name for name in NAMES if name != asked])]
            texts = [fact.format(name=name, answer=self._fact(more, trial)[-1]) for name in names[1 : self.keys]]
            if self.hops == 2:
                same = list(zip(names[self.keys : 2 * self.keys], names[: self.keys], strict=True))
                texts += [SAME.format(name=name, other=other) for name, other in same]
            others = [(more.random(), vocabulary.ids(text)) for text in texts]
            fact_ids = vocabulary.ids(fact.format(name=asked, answer=answer))
            question = question.format(name=names[self.keys] if self.hops == 2 else asked)
            question_ids, answer_ids = divided(vocabulary, question, answer)
            before = vocabulary.before
            rest = len(before) + len(question_ids) + len(answer_ids) + sum(len(other) for _, other in others)
            size = length - rest
            if size < len(fact_ids):
                least = len(fact_ids) + rest
                raise ConfigError(
                    f"{KEY}.lengths={length}: facts, question and answer alone are {least} tokens; give longer ones"
                )
            if len(file) < size:
                raise DataError(
                    f"{KEY}.lengths={length}: the validation text has {len(file)} tokens, and {size} are needed"
                )
            start = int(draw.integers(len(file) - size + 1))
            ends = (vocabulary.end, *before)[-1]
            yield Trial(file.read(start, start + size), fact_ids, question_ids, answer_ids, ends, others, before)

    def _form(self, trial: int) -> Form:
        return self.forms[trial % len(self.forms)]

    def _fact(self, draw: np.random.Generator, trial: int) -> tuple[str, str, str, str]:
        """A fact and its question with places for a name and an answer, a random name and a random answer."""
        sentences = FORMS[self._form(trial)]
        fact, question = sentences[draw.integers(len(sentences))]
        name, number = random_fact(draw, self.digits, template="{name}")
        return fact, question, name.strip(), WORDS[draw.integers(len(WORDS))] if self.asks == "word" else number

    @property
    def _asked(self) -> str:
        kind = f"numbers of {self.digits} digits" if self.asks == "number" else "words"
        forms = f" in the forms {', '.join(self.forms)}" * (self.forms != ["calibration"])
        return kind + forms + f", one of {self.keys} facts" * (self.keys > 1) + ", over two hops" * (self.hops == 2)

    def score(
        self,
        model: LanguageModel,
        vocabulary: Vocabulary,
        file: TokenFile,
        *,
        tokens: int,
        device: torch.device,
        dtype: torch.dtype | None = None,
    ) -> dict[str, Any]:
        """The recall for each length and depth.

        Args:
            tokens: of a batch; a longer text is a batch alone.
            dtype: of autocast; None: no autocast.

        Returns:
            `accuracy`: share of the trials in which each token of the answer is the most probable one. `gain`: mean
            log-probability of a token of the answer, in nats, minus that without the fact in the text. Both over
            everything, and in `cells` for each length and depth; `without`: the same for each length without the fact.
            `accuracy_interval`: Wilson's 95 % interval of the accuracy. The texts of a trial that differ in the depth
            alone count as one, so that it is too wide with several depths rather than too narrow. `forms`: the
            accuracy of each form.
        """
        depths = [None, *sorted(set(self.depths))]
        cells, without, sizes, of_form = [], [], [], defaultdict[Form, list[float]](list)
        with progress("needle in a haystack, texts", len(self.ordered) * self.trials * len(depths)) as advance:
            for length in self.ordered:
                trials = list(self.texts(length, vocabulary, file))
                sizes += [len(trial.answer) for trial in trials]
                rows = [(trial.row(depth), len(trial.answer)) for trial in trials for depth in depths]
                count, parts = max(1, tokens // length), []
                for first in range(0, len(rows), count):
                    part = rows[first : first + count]
                    with autocast(device, dtype):
                        parts.append(answers(model, part, vocabulary.num_ids, device))
                    advance(len(part))
                measured = torch.cat(parts, 1).view(2, len(trials), len(depths))
                for trial, accuracy in enumerate(measured[0, :, 1:].mean(1).tolist()):
                    of_form[self._form(trial)].append(accuracy)
                right, nats = measured.mean(1).tolist()
                without.append({"length": length, "accuracy": right[0], "log_probability": round(nats[0], 4)})
                cells += [
                    {"length": length, "depth": depth, "accuracy": accuracy, "gain": round(logp - nats[0], 4)}
                    for depth, accuracy, logp in zip(depths[1:], right[1:], nats[1:], strict=True)
                ]
        accuracy = float(np.mean([cell["accuracy"] for cell in cells]))
        return {
            "accuracy": round(accuracy, 4),
            "accuracy_interval": wilson(accuracy, self.trials * len(self.ordered)),
            "gain": round(float(np.mean([cell["gain"] for cell in cells])), 4),
            "trials": self.trials,
            "answer_tokens": round(float(np.mean(sizes)), 2),
            "asks": self._asked,
            "seed": self.seed,
            "cells": cells,
            "without": without,
            "forms": {form: round(float(np.mean(accuracies)), 4) for form, accuracies in of_form.items()},
        }


def divided(vocabulary: Vocabulary, beginning: str, last: str) -> tuple[list[int], list[int]]:
    """The ids of a sentence before its last word, and those of that word, as the complete sentence is tokenised."""
    sentence_ids, alone = vocabulary.ids(f"{beginning} {last}"), vocabulary.ids(beginning)
    size = next((i for i, (a, b) in enumerate(zip(sentence_ids, alone, strict=False)) if a != b), len(alone))
    return sentence_ids[:size], sentence_ids[size:]


@torch.no_grad()
def answers(model: LanguageModel, rows: Sequence[tuple[list[int], int]], num_ids: int, device: torch.device) -> Tensor:
    """For each answer, whether all tokens are the most probable ones, and their mean log-probability in nats.

    Args:
        rows: ids, all of the same number, and how many of the last ones are the answer.
        num_ids: ids from this one on are never chosen.

    Returns:
        (2, rows), float64 on the CPU.
    """
    ids = torch.tensor([row for row, _ in rows], device=device)
    most = max(size for _, size in rows)
    if isinstance(model, Decoder):  # logits of the answer alone: those of a long text can be more than all the rest
        logits = model.logits(model.hidden(ids[:, :-1])[:, -most:])
    else:
        logits = model(ids[:, :-1])[:, -most:]
    targets = ids[:, -most:]
    sizes = torch.tensor([size for _, size in rows], device=device)
    asked = torch.arange(most, device=device) >= most - sizes[:, None]
    logp = logits.float().log_softmax(-1)
    right = (logp[..., :num_ids].argmax(-1) == targets) | ~asked
    nats = (logp.gather(2, targets[..., None])[..., 0] * asked).sum(1) / sizes
    return torch.stack((right.all(1).double(), nats.double())).cpu()

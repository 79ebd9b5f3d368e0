"""Choose a layer and a rank for each compression method by some questions, and report on others, as README.md says.

python experiments/tensorllm/smollm2/search.py MODEL DATA fever fever_MACHINE.jsonl [METHOD ...]

DATA is the folder of the papers' questions, or for `arc_easy` that of arc_easy/test.jsonl, whose lines have the keys
query, choices and gold.
Each setting is a line of the file, and a search that was started continues after them. Several processes can share the
methods. A compression of layer l leaves the layers below as they are, so their outputs are computed once for each
question and stored.
"""

import copy
import json
import logging
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.compression import compress
from attnlab.compression.methods.base import Method
from attnlab.compression.methods.hybrid import Hybrid
from attnlab.compression.methods.laser import LASER
from attnlab.compression.methods.mlp_svd import MLPSVD
from attnlab.compression.methods.tensorllm import TensorLLM
from attnlab.compression.methods.trawl import TRAWL
from attnlab.data.questions import Question, Questions
from attnlab.tasks.reasoning.model import AskedModel
from attnlab.tasks.reasoning.score import Answer, Asked, ask, batches, contains, generated, quality

SHUFFLE = 1  # seed of the order of the questions
ASKED = {"fever": (1000, 200), "hotpotqa": (400, 100), "arc_easy": (1000, 200)}  # and how many choose
TO_ANSWER = 2  # settings of a method, those of the lowest loss, for which free text is generated
LAYERS = (17, 21, 25, 29)
ROWS = 32  # in a batch
STORE = Path("~/.cache/attnlab/decompositions").expanduser()

Setting = dict[str, Any]
Stored = list[tuple[list[int], dict[str, Tensor], dict[int, Tensor]]]  # rows, inputs, inputs of layers


@dataclass
class Benchmark:
    """Questions with choices of their own. Each is scored by its log-probability after the question."""

    choosing: int
    validation: list[Question] = field(default_factory=list)
    test: list[Question] = field(default_factory=list)

    def read(self, file: Path, limit: int) -> None:
        """The first of `answers` is the right one, because the order of the choices is not part of the prompt."""
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        questions = []
        for row in random.Random(SHUFFLE).sample(rows, limit):
            right = row["choices"].pop(row["gold"])
            questions.append(Question(text=row["query"], prompt=row["query"], answers=(right, *row["choices"])))
        self.validation, self.test = questions[: self.choosing], questions[self.choosing :]


Data = Questions | Benchmark


def settings() -> Iterator[tuple[str, Setting]]:
    """Every method with every setting, as README.md lists them; the lowest changed layer is the first of `layers`."""
    yield from (("mlp_svd", {"layers": None, "rank": rank}) for rank in (518, 403, 288))
    for layer in reversed(LAYERS):
        yield from (("laser", {"layers": [layer], "rho": rho}) for rho in (0.4, 0.1, 0.01))
        yield from (("laser_mlp", {"layers": [layer], "rho": rho}) for rho in (0.4, 0.1, 0.01))
        yield from (("tensorllm", {"layers": [layer], "rank": rank}) for rank in (48, 32, 16))
        yield from (("laser_tensorllm", {"layers": [layer], "rank": rank}) for rank in (48, 32, 16))
        yield from (("trawl", {"layers": [layer], "rank": rank}) for rank in (115, 58, 29))


def method_of(name: str, layers: list[int] | None, rank: int | None = None, rho: float | None = None) -> Method:
    """The method as `compress=NAME` with these settings builds it."""
    if name == "mlp_svd":
        return MLPSVD(mlp_rank=rank)
    if name == "tensorllm":
        return TensorLLM(rank=rank, layers=layers)
    if name == "trawl":
        return TRAWL(mode=5, rank=rank, layers=layers)
    if name == "laser_tensorllm":
        return Hybrid({"laser": LASER(matrices=["mlp"], rho=0.2), "tensorllm": TensorLLM(rank=rank)}, layers=layers)
    return LASER(matrices=["fc_in" if name == "laser" else "mlp"], rho=rho, layers=layers)


class compressed:
    """The model of `asked` with one setting, and the dense one again at the end; `errors` are those of its units."""

    def __init__(self, asked: Asked, name: str, setting: Setting) -> None:
        self.asked, self.name, self.setting = asked, name, setting

    def __enter__(self) -> "compressed":
        inner = self.asked.model.model
        self.dense = list(inner.layers)
        for i in self.setting["layers"] or range(len(self.dense)):
            inner.layers[i] = copy.deepcopy(self.dense[i])
        reports = compress(self.asked.model, method_of(self.name, **self.setting), STORE)
        self.errors = {key: value for report in reports for key, value in report.items() if "error" in key}
        return self

    def __exit__(self, *_: object) -> None:
        self.asked.model.model.layers = nn.ModuleList(self.dense)


def rows_of(asked: Asked, data: Data, questions: Sequence[Question]) -> list[tuple[list[int], int]]:
    """The ids that are read for each question, and how many at the end are the answer's: of a choice of a set none.

    A question of a benchmark has a row for each of its choices.
    """
    if isinstance(data, Benchmark):
        return [asked.continued(question.prompt, choice) for question in questions for choice in question.answers]
    pairs = [asked.continued(question.prompt, (data.kind.choices or question.answers)[0]) for question in questions]
    if data.kind.choices:
        assert all(count == 1 for _, count in pairs)
        return [(ids[:-1], 0) for ids, _ in pairs]
    return pairs


@torch.inference_mode()
def stored(asked: Asked, rows: Sequence[tuple[list[int], int]]) -> Stored:
    """The batches of the rows, and what the dense model gives to the compared layers and to the first one."""
    places = []
    for chosen in batches([ids for ids, _ in rows], ROWS, "dense"):
        inputs = asked.batch([rows[i][0] for i in chosen])
        states = asked.model.model(**inputs, use_cache=False, output_hidden_states=True).hidden_states
        places.append((chosen, inputs, {layer: states[layer] for layer in (0, *LAYERS)}))
    return places


@torch.inference_mode()
def read(asked: Asked, places: Stored, first: int) -> Iterator[tuple[int, Tensor]]:
    """The number of each row and its last hidden states (T, d), from the stored inputs of layer `first`."""
    inner = asked.model.model
    layers = inner.layers
    try:
        inner.layers = layers[first:]
        for chosen, inputs, states in places:
            rest = {key: value for key, value in inputs.items() if key != "input_ids"}
            hidden = inner(inputs_embeds=states[first], **rest, use_cache=False).last_hidden_state
            yield from zip(chosen, hidden, strict=True)
    finally:
        inner.layers = layers


def nats_of(asked: Asked, hidden: Tensor, ids: list[int], count: int) -> float:
    """Minus the log-probability of the last `count` ids, from the hidden states of all ids (T, d)."""
    logp = asked.model.lm_head(hidden[-count - 1 : -1]).float().log_softmax(-1)
    return -float(logp.gather(1, torch.tensor(ids[-count:])[:, None]).double().sum())


@torch.inference_mode()
def losses(
    asked: Asked, data: Data, questions: Sequence[Question], rows: Sequence[tuple[list[int], int]],
    places: Stored, first: int,
) -> list[Answer]:  # fmt: skip
    """The answers; of free text with the loss alone."""
    hidden = read(asked, places, first)
    if isinstance(data, Benchmark) or not data.kind.choices:
        nats = {i: nats_of(asked, states, *rows[i]) for i, states in hidden}
        if isinstance(data, Questions):
            return [Answer("", False, nats[i], count) for i, (_, count) in enumerate(rows)]
        return list(chosen(questions, [nats[i] for i in range(len(rows))], [count for _, count in rows]))
    choices = data.kind.choices
    ids = [asked.single(choice) for choice in choices]
    answers: dict[int, Answer] = {}
    for i, states in hidden:
        right = questions[i].answers[0]
        logp = asked.model.lm_head(states[-1:]).float().log_softmax(-1)[0, ids].cpu()
        guess = choices[int(logp.argmax())]
        answers[i] = Answer(guess, guess == right, -float(logp[choices.index(right)]), 1)
    return [answers[i] for i in range(len(questions))]


def chosen(questions: Sequence[Question], nats: Sequence[float], counts: Sequence[int]) -> Iterator[Answer]:
    """Of each question the choice with the highest log-probability per character, the harness's `acc_norm`."""
    start = 0
    for question in questions:
        scores = [nats[start + i] / len(choice) for i, choice in enumerate(question.answers)]
        best = min(range(len(scores)), key=scores.__getitem__)
        yield Answer(question.answers[best], best == 0, nats[start], counts[start])
        start += len(scores)


def answered(asked: Asked, data: Data, questions: Sequence[Question], answers: list[Answer]) -> list[Answer]:
    """The answers with generated text, where the set has no choices."""
    if isinstance(data, Benchmark) or data.kind.choices:
        return answers
    texts = generated(asked, data.kind, questions, 4 * ROWS)
    return [
        Answer(text, any(contains(text, right) for right in question.answers), answer.nats, answer.tokens)
        for text, question, answer in zip(texts, questions, answers, strict=True)
    ]


class Search:
    """One set of questions, asked in two disjoint parts; every result is a line of `file`."""

    def __init__(self, model: str, root: str, name: str, file: str, *methods: str) -> None:
        self.file, self.methods = Path(file), methods
        self.asked = AskedModel(model, "float32").load(1, Path("~/.cache/attnlab").expanduser(), torch.device("cpu"))
        self.asked.model.requires_grad_(False)
        limit, choosing = ASKED[name]
        self.data: Data = Benchmark(choosing)
        if name == "arc_easy":
            self.data.read(Path(root) / name / "test.jsonl", limit)
        else:
            self.data = Questions(root, "", name, limit=limit, shuffle=SHUFFLE, share=choosing / limit)
            self.data.read()
            self.data.setup(lambda text: len(self.asked.ids(text)))
        assert len(self.data.validation) == choosing

    def part(self, name: str) -> None:
        """Keep the rows and the stored states of one part, and ask the dense model."""
        self.name = name
        self.questions = self.data.validation if name == "choosing" else self.data.test
        self.rows = rows_of(self.asked, self.data, self.questions)
        self.places = stored(self.asked, self.rows)
        if not self.done("dense", {}, True):
            self.check()
        self.line("dense", {}, True)

    def check(self) -> None:
        """The losses from stored states are those of the tool, to what batches of other sizes change in bfloat16."""
        few = self.questions[:ROWS]
        rows = rows_of(self.asked, self.data, few)
        places = stored(self.asked, rows)
        ours = [losses(self.asked, self.data, few, rows, places, first) for first in (0, *LAYERS)]
        assert all(answers == ours[0] for answers in ours), "stored states give other losses"
        if isinstance(self.data, Benchmark):
            return
        numbers, tool = (quality(answers) for answers in (ours[0], ask(self.asked, self.data.kind, few, ROWS)))
        assert abs(numbers["loss"] - tool["loss"]) < 0.02, (numbers, tool)

    def done(self, method: str, setting: Setting, text: bool) -> dict[str, Any] | None:
        same = {"part": self.name, "method": method, "setting": setting, "answered": text}
        lines = self.file.read_text().splitlines() if self.file.exists() else []  # another process may have written it
        return next((line for line in map(json.loads, lines) if same.items() <= line.items()), None)

    def line(self, method: str, setting: Setting, text: bool) -> dict[str, Any]:
        """The result of a setting, read or computed. `text`: with the accuracy, for which free text is generated."""
        if line := self.done(method, setting, text):
            return line
        began = time.perf_counter()
        if method == "dense":
            answers, errors = losses(self.asked, self.data, self.questions, self.rows, self.places, LAYERS[-1]), {}
            answers = answered(self.asked, self.data, self.questions, answers)
        else:
            with compressed(self.asked, method, setting) as model:
                first = min(setting["layers"] or [0])
                answers = losses(self.asked, self.data, self.questions, self.rows, self.places, first)
                answers = answered(self.asked, self.data, self.questions, answers) if text else answers
                errors = model.errors
        line = {"part": self.name, "method": method, "setting": setting, "answered": text}
        line |= quality(answers) | {"errors": errors}
        line |= {"seconds": round(time.perf_counter() - began, 1)}
        if text:
            line["right"] = "".join(str(int(answer.right)) for answer in answers)
        else:
            line.pop("accuracy"), line.pop("accuracy_stderr")
        with open(self.file, "a") as out:
            out.write(json.dumps(line) + "\n")
        shown = {key: value for key, value in line.items() if key not in ("right", "errors")}
        print(json.dumps(shown), flush=True)
        return line

    def run(self) -> None:
        """The rule of README.md."""
        with torch.autocast("cpu", torch.bfloat16):
            self.part("choosing")
            free = isinstance(self.data, Questions) and not self.data.kind.choices
            tried: dict[str, list[dict[str, Any]]] = {}
            for method, setting in settings():
                if self.methods and method not in self.methods:
                    continue
                tried.setdefault(method, []).append(self.line(method, setting, not free))
            if free:
                for method, lines in tried.items():
                    best = sorted(lines, key=lambda line: line["loss"])[:TO_ANSWER]
                    tried[method] = [self.line(method, line["setting"], True) for line in best]
            chosen = {m: min(lines, key=lambda line: (-line["accuracy"], line["loss"])) for m, lines in tried.items()}
            self.part("reporting")
            for method, line in chosen.items():
                self.line(method, line["setting"], True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    Search(*sys.argv[1:]).run()

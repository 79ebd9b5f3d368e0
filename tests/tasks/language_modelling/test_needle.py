"""Needle in a haystack: texts, models that are known to remember or to forget, caches, and what is refused."""

import math
import re
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from attnlab.attention import MHA, Attention, MTLAWindow
from attnlab.config.check import check
from attnlab.data.samples.world import TEMPLATES
from attnlab.data.text.tokens import TokenFile
from attnlab.data.text.vocabulary import BytePairVocabulary, byte_tokenizer
from attnlab.decoding import Sampling
from attnlab.errors import ConfigError, DataError
from attnlab.models import Decoder, LanguageModel
from attnlab.run.loading import load
from attnlab.run.record import new
from attnlab.tasks.language_modelling.needle import FORMS, WORDS, Form, Needle, answers, divided
from attnlab.tasks.language_modelling.task import LanguageModellingTask

BYTES = BytePairVocabulary(byte_tokenizer().to_str(), 257, "after")
CPU = torch.device("cpu")


def hay(size: int = 4000, line: int = 0) -> TokenFile:
    """Letters without digits; with the mark between texts after every `line` of them."""
    ids = np.random.default_rng(0).integers(97, 123, size)
    if line:
        ids[line - 1 :: line] = BYTES.end
    return TokenFile(Path("hay"), ids, 257)


class Copies(LanguageModel):
    """Gives the token that followed the last eight ones before, if that was at most `sight` positions ago.

    Its logit is `LOGIT`, the others' 0; what it has not seen is uniform.
    """

    LOGIT = 6.0

    def __init__(self, sight: int) -> None:
        super().__init__()
        self.sight, self.max_length = sight, 10_000

    @property
    def attentions(self) -> list[Attention]:
        return []

    def forward(self, tokens: Tensor) -> Tensor:
        logits = torch.zeros(*tokens.shape, 257)
        for row, ids in enumerate(tokens.tolist()):
            for end in range(len(ids) - 12, len(ids)):  # the answer is among the last ones
                for start in range(max(0, end - self.sight), end - 8):
                    if ids[start : start + 8] == ids[end - 7 : end + 1]:
                        logits[row, end, ids[start + 8]] = self.LOGIT
        return logits

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        raise NotImplementedError

    def step(self, tokens: Tensor, caches: Any) -> Tensor:
        raise NotImplementedError

    def multiply_adds(self, context: int, prefix: int = 0) -> int:
        raise NotImplementedError


def test_a_text_has_its_length_and_its_fact_at_its_depth() -> None:
    needle = Needle(lengths=[200], trials=6)
    trials = list(needle.texts(200, BYTES, hay()))
    assert len({(tuple(trial.hay), tuple(trial.fact)) for trial in trials}) == 6
    for trial in trials:
        rows = {depth: trial.row(depth) for depth in (None, 0.0, 0.5, 1.0)}
        assert {len(row) for row in rows.values()} == {200}
        assert BYTES.text(trial.question + trial.answer + [ord(".")]) == BYTES.text(trial.fact)
        number = BYTES.text(trial.answer)
        assert len(number) == 6 and 10_000 <= int(number) < 100_000
        room, size = len(trial.hay) - len(trial.fact), len(trial.fact)
        for depth, start in ((0.0, 0), (0.5, round(room / 2)), (1.0, room)):
            row = rows[depth]
            assert row[start : start + size] == trial.fact
            rest = np.delete(np.array(row), np.s_[start : start + size])
            assert rest.tolist() == np.delete(np.array(rows[None]), np.s_[start : start + size]).tolist()
        assert BYTES.text(trial.fact) not in BYTES.text(rows[None])
    (word,) = Needle(lengths=[200], trials=1, asks="word").texts(200, BYTES, hay())
    assert BYTES.text(word.answer).strip() in WORDS and BYTES.text(word.fact).endswith(f"{BYTES.text(word.answer)}.")
    again = list(Needle(lengths=[64, 200], trials=3, depths=[0.1]).texts(200, BYTES, hay()))
    assert [trial.row(0.5) for trial in again] == [trial.row(0.5) for trial in trials[:3]]
    other = next(Needle(lengths=[200], seed=2).texts(200, BYTES, hay()))
    assert other.row(0.5) != trials[0].row(0.5)


@pytest.mark.parametrize(("keys", "hops"), [(4, 1), (2, 2), (3, 2)])
def test_the_answer_follows_from_one_of_several_facts(keys: int, hops: Literal[1, 2]) -> None:
    """By the name in the question, over the one that it is said to be the same as where there are two hops."""
    for trial in Needle(lengths=[300], trials=6, keys=keys, hops=hops).texts(300, BYTES, hay()):
        rows = [trial.row(depth) for depth in (0.0, 0.3, 0.5, 1.0)]
        assert {len(row) for row in (*rows, trial.row(None))} == {300}
        assert rows[0][: len(trial.fact)] == trial.fact
        assert BYTES.text(rows[-1]).endswith(BYTES.text(trial.fact + trial.question + trial.answer))
        for row in rows:
            numbers = dict(re.findall(r"([A-Z][a-z]+)(?: has)? is (\d{5})\.", BYTES.text(row)))
            same = dict(re.findall(r"([A-Z][a-z]+) has the same as ([A-Z][a-z]+)\.", BYTES.text(row)))
            (asked,) = re.findall(r" ([A-Z][a-z]+)(?: has)? is$", BYTES.text(trial.question))
            assert (len(numbers), len(same)) == (keys, keys if hops == 2 else 0)
            assert numbers[same[asked] if hops == 2 else asked] == BYTES.text(trial.answer).strip()
        assert BYTES.text(trial.answer) + "." not in BYTES.text(trial.row(None))


@pytest.mark.parametrize("form", [form for form in FORMS if form != "calibration"])
def test_held_out_forms_do_not_occur_in_the_texts_of_a_conversion(form: Form) -> None:
    beginnings = [template.split("{name}")[0] for template in TEMPLATES]
    for trial in Needle(lengths=[300], trials=8, keys=2, forms=[form]).texts(300, BYTES, hay()):
        text = BYTES.text(trial.row(0.5))
        assert text.count(BYTES.text(trial.answer).strip()) == 2, "the fact and the answer"
        assert not any(beginning in text for beginning in beginnings)
        assert BYTES.text(trial.fact) in text


def test_forms_take_turns_and_have_an_accuracy_each() -> None:
    needle = Needle(lengths=[200], depths=[1.0], trials=6, forms=["list", "reversed"])
    measured = needle.score(Copies(150), BYTES, hay(), tokens=600, device=CPU)
    assert measured["forms"] == {"list": 1.0, "reversed": 0.0}, "its model continues the last eight bytes"
    assert measured["accuracy"] == 0.5 and "list, reversed" in measured["asks"]


def test_a_fact_stands_at_a_line_s_end_where_one_is_near() -> None:
    (trial,) = Needle(lengths=[1000], trials=1).texts(1000, BYTES, hay(line=50))
    for depth in (0.25, 0.5, 0.75):
        start = trial.place(depth)
        assert trial.hay[start - 1] == BYTES.end
        assert abs(start - depth * (len(trial.hay) - len(trial.fact))) <= 25.5
    (far,) = Needle(lengths=[1000], trials=1).texts(1000, BYTES, hay(line=900))
    assert far.place(0.5) == round((len(far.hay) - len(far.fact)) / 2)
    assert trial.place(0.0) == 0 and trial.place(1.0) == len(trial.hay) - len(trial.fact)


def test_an_answer_begins_where_the_tokens_of_the_whole_sentence_differ() -> None:
    """Also where a tokenizer joins the end of the question with what follows."""

    class Joining:
        def ids(self, text: str) -> list[int]:
            return [ord(c) for c in text.replace("s 4", "§")]

    question, answer = divided(Joining(), " is", "42")  # type: ignore[arg-type]
    assert (question, answer) == ([ord(" "), ord("i")], [ord("§"), ord("2")])
    question, answer = divided(BYTES, " is", "42")
    assert (BYTES.text(question), BYTES.text(answer)) == (" is", " 42")


@pytest.mark.parametrize("tokens", [1, 600, 10_000])
def test_a_model_that_copies_from_nearby(tokens: int) -> None:
    """Recall is all or nothing, the gain that of its logit; in any batches."""
    needle = Needle(lengths=[300, 120], depths=[1.0, 0.0], trials=2)
    known = math.log(math.exp(Copies.LOGIT) / (math.exp(Copies.LOGIT) + 256))
    measured = needle.score(Copies(150), BYTES, hay(), tokens=tokens, device=CPU)
    right = {(cell["length"], cell["depth"]): (cell["accuracy"], cell["gain"]) for cell in measured["cells"]}
    gained = pytest.approx(known + math.log(257), abs=1e-4)
    assert right == {
        (120, 0.0): (1.0, gained),
        (120, 1.0): (1.0, gained),
        (300, 0.0): (0.0, 0.0),
        (300, 1.0): (1.0, gained),
    }
    assert (measured["accuracy"], measured["trials"], measured["answer_tokens"]) == (0.75, 2, 6.0)
    assert [(row["length"], row["accuracy"]) for row in measured["without"]] == [(120, 0.0), (300, 0.0)]
    assert measured["without"][0]["log_probability"] == pytest.approx(-math.log(257), abs=1e-4)


def small(attention: Any) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(257, 32, attention, num_layers=2, ffn_dim=48, max_length=128).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("merged", [False, True])
def test_the_caches_give_the_same_answer(merged: bool) -> None:
    """What one pass over the text scores is what decoding does: read the text, then step by step."""
    window: dict[str, Any] = {"latent_dim": 16, "rope_dim": 8, "stride": 2, "recent": 8, "first": 4}
    model = small(lambda _: MTLAWindow(32, 4, **window) if merged else MHA(32, 4, num_kv_heads=2))
    rows = []
    for trial in Needle(lengths=[100], trials=3).texts(100, BYTES, hay()):
        text = trial.row(0.3)[: -len(trial.answer)]
        drawn = Sampling(tokens=6, temperature=0)(model, torch.tensor([text]), num_ids=257)[0].tolist()
        rows += [([*text, *drawn], 6), ([*text, *drawn[:-1], (drawn[-1] + 1) % 257], 6), (trial.row(0.3), 6)]
    right, nats = answers(model, rows, 257, CPU)
    assert right.tolist() == [1.0, 0.0, 0.0] * 3
    for (ids, size), measured in zip(rows, nats.tolist(), strict=True):
        row, caches = torch.tensor([ids]), model.start(1, len(ids), dtype=torch.float64)
        logits = [model.step(row[:, :-size], caches)[:, -1]]
        logits += [model.step(row[:, i : i + 1], caches)[:, -1] for i in range(len(ids) - size, len(ids) - 1)]
        logp = torch.stack(logits, 1).log_softmax(-1).gather(2, row[:, -size:, None])
        assert measured == pytest.approx(float(logp.mean()), abs=1e-5)  # logits are compared in float32


def test_answers_of_several_lengths() -> None:
    """A row's own last tokens count, and no id beyond the tokenizer's is chosen."""
    model = small(lambda _: MHA(32, 4))
    ids = torch.randint(200, (2, 20)).tolist()
    together = answers(model, [(ids[0], 2), (ids[1], 5)], 257, CPU)
    alone = [answers(model, [(row, size)], 257, CPU) for row, size in ((ids[0], 2), (ids[1], 5))]
    assert torch.allclose(together, torch.cat(alone, 1))
    best = int(model(torch.tensor([ids[0][:-1]]))[0, -1].argmax())
    assert answers(model, [([*ids[0][:-1], best], 1)], 257, CPU)[0].item() == 1
    assert answers(model, [([*ids[0][:-1], best], 1)], best, CPU)[0].item() == 0


def test_what_is_too_short_is_named() -> None:
    with pytest.raises(ConfigError, match=r"task.score.needle.lengths=40: .* give longer ones"):
        list(Needle(lengths=[40]).texts(40, BYTES, hay()))
    with pytest.raises(DataError, match="the validation text has 100 tokens"):
        list(Needle(lengths=[400]).texts(400, BYTES, hay(100)))


@pytest.mark.parametrize(
    ("words", "message", "stage"),
    [
        (["task=wikitext2"], "a vocabulary of words has no random names", None),
        (["task=fineweb_edu"], "lengths=300: expected at most the model's 256 positions", "test"),
        (["task=fineweb_edu", "task.score.needle.hops=2"], "needle.keys=1: expected 2 or more", "test"),
        (["task=wikitext2", "convert=mtla"], "lengths=600: expected at most the model's 512 positions", None),
    ],
)
def test_what_cannot_be_asked_is_refused_before_data_is_read(
    words: list[str], message: str, stage: Literal["test"] | None
) -> None:
    length = 600 if "convert=mtla" in words else 300
    cfg = check([*words, f"task.score.needle.lengths=[80,{length}]", "data_root=/", "hardware=cpu"], load).jobs[0]
    with pytest.raises(ConfigError, match=message):
        LanguageModellingTask(cfg).prepare(new(cfg, "test"), stage)

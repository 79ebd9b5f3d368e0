"""Scoring: padding changes nothing, each defect of the released code moves the number as described, masked forms."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from attnlab.data.questions import Question, question_set
from attnlab.data.samples.world import write_world
from attnlab.errors import DataError
from attnlab.tasks.reasoning.model import sample_tokenizer
from attnlab.tasks.reasoning.score import Answer, Asked, ask, contains, log_probabilities, perplexity, quality
from tests.tasks.reasoning.conftest import random_model

KINDS = ("bert", "gpt2", "gpt_neox", "gptj", "llama", "qwen3", "roberta")
DECODERS = [kind for kind in KINDS if "bert" not in kind]
SETS = ("hotpotqa", "fever", "bios", "wikidata")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("cache"), 1)


@pytest.fixture(scope="module")
def words(place: Path) -> Any:
    return sample_tokenizer(place)


def tiny(kind: str, words: Any) -> Asked:
    return Asked(random_model(kind), words)


def questions(name: str, place: Path, count: int = 6) -> list[Question]:
    return question_set(name).read(place)[:count]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SETS)
def test_alone_and_in_a_padded_batch_are_the_same(kind: str, name: str, place: Path, words: Any) -> None:
    asked, items = tiny(kind, words), questions(name, place)
    alone, together = (ask(asked, question_set(name), items, size) for size in (1, 4))
    assert [answer.text for answer in alone] == [answer.text for answer in together]
    for a, b in zip(alone, together, strict=True):
        assert a.nats == pytest.approx(b.nats, rel=1e-4) and a.tokens == b.tokens
    assert 0 < quality(alone)["loss"] < 30


@pytest.mark.parametrize("kind", DECODERS)
def test_log_probabilities_are_those_of_the_definition(kind: str, words: Any) -> None:
    asked = tiny(kind, words)
    asked.model.double()
    rows = [([5, 6, 7, 8, 9], 2), ([10, 11], 1), ([12, 13, 14, 15], 3)]
    for (ids, count), value in zip(rows, log_probabilities(asked, rows, size=3), strict=True):
        logp = asked.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = sum(logp[i - 1, ids[i]].item() for i in range(len(ids) - count, len(ids)))
        assert float(value) == pytest.approx(expected, rel=1e-5)


def test_released_padding_without_mask_changes_the_loss_of_short_rows_alone(words: Any) -> None:
    asked = tiny("llama", words)
    rows = [([5, 6, 7, 8, 9, 10, 11], 2), ([12, 13, 14], 1)]
    right, released = (log_probabilities(asked, rows, 2, masked_padding=masked) for masked in (True, False))
    assert float(right[0]) == pytest.approx(float(released[0]), rel=1e-4)
    assert abs(float(right[1] - released[1])) > 1e-3
    unpadded = log_probabilities(asked, rows, 1, masked_padding=False)
    assert torch.allclose(unpadded, right, rtol=1e-4)


def test_compat_counts_the_prompt_and_answers_inside_words(place: Path, words: Any) -> None:
    asked, kind = tiny("llama", words), question_set("hotpotqa")
    text = "Do I know Anna Berg or Boris Holm?"
    items = [Question(text=text, prompt=kind.prompt(text), answers=(answer,)) for answer in ("no", "Boris Holm")]
    assert [answer.right for answer in ask(asked, kind, items, 2)] == [False, False]
    assert [answer.right for answer in ask(asked, kind, items, 2, compat=True)] == [True, True]


def test_whole_words() -> None:
    assert not contains("I know.", "no") and contains("I know.", "no", compat=True)
    assert contains(" No, thanks", "no") and contains("in NEW York.", "New York")
    assert contains("it is C++ here", "c++") and not contains("1984s", "1984")


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_compat_divides_masked_losses_by_one_token_too_many(kind: str, place: Path, words: Any) -> None:
    asked, items = tiny(kind, words), questions("wikidata", place)
    right, released = (ask(asked, question_set("wikidata"), items, 4, compat) for compat in (False, True))
    for a, b in zip(right, released, strict=True):
        assert b.tokens == a.tokens + 1 and a.nats == pytest.approx(b.nats)
    assert quality(released)["loss"] < quality(right)["loss"]


def test_a_mask_in_a_question_is_no_place_for_an_answer(place: Path, words: Any) -> None:
    """The masks that the prompt adds stand at the end."""
    asked, kind = tiny("roberta", words), question_set("hotpotqa")
    mask = words.mask_token
    text = f"What is {mask} here?"
    (answer,) = ask(asked, kind, [Question(text=text, prompt=kind.prompt(text), answers=("New York",))], 1)
    ids = asked.ids(kind.masked_prompt(text, mask, asked.last))
    with torch.no_grad():
        logits = asked.model(input_ids=torch.tensor([ids])).logits[0]
    places = [i for i, token in enumerate(ids) if token == words.mask_token_id][-kind.masks :]
    assert answer.text == words.decode(logits[places].argmax(-1))


def test_choices_of_several_tokens_are_sums(place: Path, words: Any) -> None:
    """The sums over tokens and the one pass for single tokens agree where both are possible."""
    asked, kind, items = tiny("llama", words), question_set("fever"), questions("fever", place)
    measured = ask(asked, kind, items, 3)
    pairs = [asked.continued(question.prompt, question.answers[0]) for question in items]
    assert all(count == 1 for _, count in pairs)
    sums = log_probabilities(asked, pairs, 3)
    assert [answer.nats for answer in measured] == pytest.approx([-float(value) for value in sums], rel=1e-4)


def test_mask_of_several_tokens_is_refused(place: Path, words: Any) -> None:
    asked = tiny("roberta", words)
    with pytest.raises(DataError, match="cuts 'unheard-of' into"):
        asked.single("unheard-of")


def test_generation_is_greedy_whatever_the_model_says(place: Path, words: Any) -> None:
    asked, items = tiny("llama", words), questions("wikidata", place)
    first = ask(asked, question_set("wikidata"), items, 4)
    asked.model.generation_config.do_sample, asked.model.generation_config.temperature = True, 5.0
    assert ask(asked, question_set("wikidata"), items, 4) == first


def test_perplexity_is_that_of_the_definition(words: Any) -> None:
    asked = tiny("gpt2", words)
    text = "Anna Berg was born in the town of Elgin. Boris Holm works for the firm Acme."
    ids = asked.ids(text, special=False)
    measured = perplexity(asked, text, batch_size=2, context=8)
    nats, count = 0.0, 0
    for i in range(0, len(ids), 8):
        window = torch.tensor([ids[i : i + 8]])
        logp = asked.model(window).logits[0].log_softmax(-1)
        nats -= sum(logp[j, window[0, j + 1]].item() for j in range(window.shape[1] - 1))
        count += window.shape[1] - 1
    assert measured["tokens"] == count
    assert measured["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-4)


def test_standard_errors() -> None:
    values = ((True, 2.0, 1), (True, 4.0, 2), (True, 1.0, 1), (False, 3.0, 1))
    measured = quality([Answer("", *row) for row in values])
    losses = torch.tensor([2.0, 2.0, 1.0, 3.0])
    assert measured["accuracy"] == 75 and measured["accuracy_stderr"] == pytest.approx(
        100 * math.sqrt(0.75 * 0.25 / 4), abs=1e-3
    )
    assert measured["loss"] == 2 and measured["loss_stderr"] == pytest.approx(float(losses.std()) / 2, abs=1e-5)
    with pytest.raises(DataError, match="NaN or infinite"):
        quality([Answer("", True, math.nan, 1)])

"""The adapter to lm-evaluation-harness: its numbers are the model's, whatever the batch."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnlab.attention import MHA
from attnlab.data.text.vocabulary import WordVocabulary
from attnlab.errors import DataError
from attnlab.models import T6
from attnlab.tasks.harness import TrainedRun
from attnlab.tasks.language_modelling.module import LanguageModelling
from attnlab.training.schedule import WarmupCosine

WORDS = ["<eos>", "a", "b", "c", "d", "e", "<unk>"]
TEXTS = [("a b", " c"), ("", "a b"), ("e d c b a", " a b c"), ("c", " d")]


@pytest.fixture(scope="module")
def module() -> LanguageModelling:
    torch.manual_seed(0)
    model = T6(len(WORDS), 16, lambda _: MHA(16, 2), 2, max_length=8, output_init="default")
    return LanguageModelling(
        model,
        WordVocabulary(WORDS, "<eos>", "<unk>", "after"),
        optimizer=torch.optim.SGD,
        schedule=partial(WarmupCosine, warmup_steps=1),
        identity={},
        seed=1,
    ).eval()


def requests(*arguments: Any) -> list[Any]:
    return [SimpleNamespace(args=args) for args in arguments]


@torch.no_grad()
def logp(module: LanguageModelling, ids: list[int]) -> torch.Tensor:
    """Of each id after the first."""
    rows = module.model(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
    return rows.gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1)


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_log_likelihoods_of_continuations(module: LanguageModelling, batch: int) -> None:
    run = TrainedRun(module, batch)
    for (context, continuation), (value, greedy) in zip(
        TEXTS, run.loglikelihood(requests(*TEXTS), disable_tqdm=True), strict=True
    ):
        ids = module.vocabulary.ids(f"{context} {continuation}")
        count = len(module.vocabulary.ids(continuation))
        whole = [0, *ids] if not context else ids
        assert value == pytest.approx(float(logp(module, whole)[-count:].sum()), abs=1e-5)
        best = module.model(torch.tensor([whole[:-1]]))[0].argmax(-1)[-count:]
        assert greedy == (best.tolist() == whole[-count:])


def test_a_greedy_continuation_is_known_as_one(module: LanguageModelling) -> None:
    ids = [1, 2]
    for _ in range(3):
        ids.append(int(module.model(torch.tensor([ids]))[0, -1].argmax()))
    assert TrainedRun(module, 2)._loglikelihood_tokens([(None, ids[:2], ids[2:])])[0][1]


def test_texts_longer_than_the_model(module: LanguageModelling) -> None:
    """Contexts lose their beginning; whole texts are predicted window by window, each token once."""
    run, long = TrainedRun(module, 2), [1, 2, 3, 4, 5] * 4
    (value, _), *_ = run._loglikelihood_tokens([(None, long[:-2], long[-2:])])
    assert value == pytest.approx(float(logp(module, long[-9:])[-2:].sum()), abs=1e-5)
    (total,) = run.loglikelihood_rolling(requests((" ".join(WORDS[i] for i in long),)))
    parts = [logp(module, [0, *long[:8]]), logp(module, long[7:16]), logp(module, long[11:20])[-4:]]
    assert total == pytest.approx(sum(float(part.sum()) for part in parts), abs=1e-4)
    with pytest.raises(DataError, match="a continuation of 9 words is longer than the model's context"):
        run._loglikelihood_tokens([(None, [1], [1] * 9)])


def test_generation_stops_where_it_is_told(module: LanguageModelling) -> None:
    run = TrainedRun(module, 1)
    (whole,) = run.generate_until(requests(("a b", {"until": [], "max_gen_toks": 5})))
    ids = [1, 2]
    for _ in range(5):
        ids.append(int(module.model(torch.tensor([ids]))[0, -1].argmax()))
        if ids[-1] == 0:
            break
    assert whole == module.vocabulary.text([i for i in ids[2:] if i])
    word = whole.split()[-1]
    (cut,) = run.generate_until(requests(("a b", {"until": [word], "max_gen_toks": 5})))
    assert cut == whole[: whole.index(word)]

"""Beam search against searches that try everything, or that know no cache."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab.attention import MHA, MLA, MTLA, TPA, Attention, SlidingWindow
from attnlab.decoding import BeamSearch, Sampling, beam, sampling
from attnlab.models import PrefixDecoder

PAD, EOS, VOCAB = 1, 2, 6
MECHANISMS: dict[str, Callable[[], Attention]] = {
    "mha": partial(MHA, 16, 2),
    "mqa": partial(MHA, 16, 2, 1),
    "mla": partial(MLA, 16, 2),
    "mtla2": partial(MTLA, 16, 2, stride=2),
    "mtla3": partial(MTLA, 16, 2, stride=3),
    "tpa": partial(TPA, 16, 2, q_rank=2),
    "window": partial(SlidingWindow, 16, 2, window=3),
}


def decoder(mechanism: str) -> PrefixDecoder:
    torch.manual_seed(3)
    model = PrefixDecoder(VOCAB, 16, lambda _: MECHANISMS[mechanism](), num_layers=2, ffn_dim=24, projector_dim=8)
    with torch.no_grad():
        model.unembedding.weight.mul_(4)  # opinions strong enough that hypotheses differ
    return model.double().eval()


def logp(model: PrefixDecoder, prefix: Tensor, texts: list[list[int]]) -> list[float]:
    """log p(text | prefix) of texts of one length, without any cache, <pad> excluded as in the search."""
    tokens = torch.tensor(texts)
    inputs = torch.cat([torch.full((len(texts), 1), EOS), tokens[:, :-1]], 1)
    with torch.no_grad():
        logits = model(inputs, prefix.expand(len(texts), -1, -1)).log_softmax(-1)
    score: list[float] = logits.gather(-1, tokens[..., None]).sum((1, 2)).tolist()
    return score


PENALTIES: dict[str, Callable[[int, float], float]] = {  # of a length with </s>, and its exponent
    "power": lambda length, exponent: length**exponent,
    "gnmt": lambda length, exponent: ((5 + length) / 6) ** exponent,
}


def exhaustive(
    model: PrefixDecoder, prefix: Tensor, longest: int, penalty: float, min_len: int, form: str = "power"
) -> tuple[float, list[int]]:
    words = [t for t in range(VOCAB) if t not in (PAD, EOS)]
    scored = []
    for n in range(min_len, longest + 1):
        texts = [[*text, EOS] for text in itertools.product(words, repeat=n)]
        scored += [
            (total / PENALTIES[form](n + 1, penalty), text)
            for total, text in zip(logp(model, prefix, texts), texts, strict=True)
        ]
    return max(scored)


def search(model: PrefixDecoder, prefixes: Tensor, lengths: Tensor, **settings: float | str | None) -> list:
    return BeamSearch(**settings)(model, prefixes, lengths, bos=EOS, eos=EOS, pad=PAD)  # type: ignore[arg-type]


@pytest.mark.parametrize(("form", "penalty"), [("power", 0.0), ("power", 1.0), ("gnmt", 0.6), ("gnmt", 2.0)])
@pytest.mark.parametrize("mechanism", ["mha", "mtla2"])
def test_a_beam_wide_enough_finds_the_best_of_all(mechanism: str, form: str, penalty: float) -> None:
    model = decoder(mechanism)
    torch.manual_seed(0)
    prefixes = torch.randn(2, 5, 16, dtype=torch.float64)
    settings: dict[str, Any] = {"length_penalty": penalty, "length_penalty_form": form, "max_len_b": 3, "min_len": 1}
    best = search(model, prefixes, torch.tensor([5, 3]), beam=70, **settings)
    for prefix, size, hypotheses in zip(prefixes, (5, 3), best, strict=True):
        score, text = exhaustive(model, prefix[:size], 3, penalty, 1, form)
        assert hypotheses[0].tokens == text
        assert hypotheses[0].score == pytest.approx(score, abs=1e-6)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_scores_are_those_without_a_cache_and_batches_change_nothing(mechanism: str) -> None:
    model = decoder(mechanism)
    torch.manual_seed(1)
    prefixes, lengths = torch.randn(4, 7, 16, dtype=torch.float64), torch.tensor([7, 4, 5, 2])
    settings = {"beam": 3, "length_penalty": 1.0, "max_len_b": 12, "min_len": 2}
    together = search(model, prefixes, lengths, **settings)
    for n, hypotheses in enumerate(together):
        alone = search(model, prefixes[n : n + 1, : lengths[n]], lengths[n : n + 1], **settings)[0]
        assert [h.tokens for h in hypotheses] == [h.tokens for h in alone]
        assert len(hypotheses) == 3
        assert [h.score for h in hypotheses] == sorted((h.score for h in hypotheses), reverse=True)
        for h in hypotheses:
            assert h.tokens.index(EOS) == len(h.tokens) - 1
            assert len(h.tokens) > 2
            complete = logp(model, prefixes[n, : lengths[n]], [h.tokens])[0] / len(h.tokens)
            assert h.score == pytest.approx(complete, abs=1e-5)


def test_looking_seldom_which_sentences_are_finished_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder("mtla2")
    prefixes = torch.randn(4, 7, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    lengths = torch.tensor([7, 4, 5, 2])
    results = []
    for steps in (1, 3, 50):
        monkeypatch.setitem(beam.WAIT, "cpu", steps)
        results.append(search(model, prefixes, lengths, beam=3, max_len_a=0.5, max_len_b=9, min_len=1))
    assert results[0] == results[1] == results[2]
    assert len({len(h.tokens) for hypotheses in results[0] for h in hypotheses}) > 2  # sentences end at different steps


def test_the_best_continuations_are_those_of_a_full_sort() -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (5, 32, 100):
        logp = torch.randn(3, 4, size, generator=generator, dtype=torch.float64)
        scores = torch.randn(3, 4, generator=generator, dtype=torch.float64)
        scores[1, 2] = float("-inf")
        best, rows, tokens = beam.best_continuations(logp, scores, 8)
        every = (logp + scores[..., None]).flatten(1)
        want, place = every.topk(8)
        assert torch.equal(best, want) and torch.equal(rows * size + tokens, place)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_beam_one_is_greedy(mechanism: str) -> None:
    model = decoder(mechanism)
    torch.manual_seed(2)
    prefixes = torch.randn(3, 6, 16, dtype=torch.float64)
    hypotheses = search(model, prefixes, torch.tensor([6, 6, 6]), beam=1, max_len_b=9, min_len=0)
    for prefix, (hypothesis,) in zip(prefixes, hypotheses, strict=True):
        tokens: list[int] = []
        while not tokens or tokens[-1] != EOS:
            logits = model(torch.tensor([[EOS, *tokens]]), prefix[None])[0, -1]
            logits[PAD] = -torch.inf
            tokens.append(EOS if len(tokens) == 9 else int(logits.argmax()))
        assert hypothesis.tokens == tokens


def test_length_limit_follows_the_source() -> None:
    prefixes = torch.randn(2, 6, 16, dtype=torch.float64)
    results = search(decoder("mha"), prefixes, torch.tensor([6, 2]), beam=2, max_len_a=0.5, max_len_b=1, min_len=99)
    assert [[len(h.tokens) for h in hypotheses] for hypotheses in results] == [[5, 5], [3, 3]]
    assert all(h.at_limit for hypotheses in results for h in hypotheses)
    free = search(decoder("mha"), prefixes, torch.tensor([6, 2]), beam=2, max_len_b=40)
    assert not any(h.at_limit for hypotheses in free for h in hypotheses if len(h.tokens) <= 40)
    with pytest.raises(ValueError, match="max_len_b=None"):
        search(decoder("mha"), prefixes, torch.tensor([6, 2]), max_len_b=None)


def test_only_some_tokens_may_begin() -> None:
    model = decoder("mtla2")
    prefixes = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    lengths = torch.tensor([5, 3, 4])
    for allowed in ([4], [3, 5]):
        results = BeamSearch(3, max_len_b=6)(model, prefixes, lengths, bos=EOS, eos=EOS, pad=PAD, first=allowed)
        assert all(h.tokens[0] in allowed for hypotheses in results for h in hypotheses)
        for prefix, size, hypotheses in zip(prefixes, lengths.tolist(), results, strict=True):
            best = hypotheses[0]
            among = logp_of_set(model, prefix[:size], allowed)  # what the first token is chosen among
            want = (logp(model, prefix[:size], [best.tokens])[0] - among) / len(best.tokens)
            assert best.score == pytest.approx(want, abs=1e-6)


def logp_of_set(model: PrefixDecoder, prefix: Tensor, tokens: list[int]) -> float:
    return float(torch.logsumexp(torch.tensor(logp(model, prefix, [[t] for t in tokens])), 0))


def test_temperature_divides_the_logits() -> None:
    model = decoder("mha")
    prefixes = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    hypotheses = search(model, prefixes, torch.tensor([5, 3]), beam=2, max_len_b=6, temperature=0.5)
    with torch.no_grad():
        model.unembedding.weight.mul_(2)
    again = search(model, prefixes, torch.tensor([5, 3]), beam=2, max_len_b=6)
    for plain, two in zip(hypotheses, again, strict=True):
        assert [h.tokens for h in plain] == [h.tokens for h in two]
        assert [h.score for h in plain] == pytest.approx([h.score for h in two], abs=1e-6)


def test_unknown_words_are_written_only_where_they_may_be() -> None:
    model = decoder("mha")
    torch.manual_seed(0)
    prefixes, lengths = torch.randn(3, 5, 16, dtype=torch.float64), torch.tensor([5, 3, 4])
    free = search(model, prefixes, lengths, beam=2, max_len_b=6)
    common = max(range(VOCAB), key=lambda t: sum(h.tokens.count(t) for best in free for h in best) * (t != EOS))
    assert any(common in hypothesis.tokens for hypotheses in free for hypothesis in hypotheses)
    allowed = BeamSearch(2, max_len_b=6)(model, prefixes, lengths, bos=EOS, eos=EOS, pad=PAD, unk=common)
    assert allowed == free
    barred = BeamSearch(2, max_len_b=6, unknown=False)(model, prefixes, lengths, bos=EOS, eos=EOS, pad=PAD, unk=common)
    assert all(best and all(common not in hypothesis.tokens for hypothesis in best) for best in barred)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampling_never_chooses_what_it_must_not(temperature: float) -> None:
    class Certain:
        """A model that always gives token 3 nearly all of the probability."""

        def start(self, *_: Any, **__: Any) -> list[Any]:
            return []

        def step(self, tokens: Tensor, caches: list[Any]) -> Tensor:
            return torch.nn.functional.one_hot(torch.full(tokens.shape, 3), VOCAB) * 1000.0

    prompt = torch.zeros(2, 1, dtype=torch.long)
    assert (Sampling(4, temperature)(Certain(), prompt) == 3).all()
    assert (Sampling(4, temperature)(Certain(), prompt, never=[3]) != 3).all()


def test_a_text_ends_with_its_rows_however_seldom_that_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting:
        """Row i says 3 until token 2 i, then 5, the end."""

        def start(self, *_: Any, **__: Any) -> list[Any]:
            return []

        def step(self, tokens: Tensor, caches: list[Any]) -> Tensor:
            calls.append(len(calls))
            text = torch.tensor([5 if len(calls) > 2 * row else 3 for row in range(len(tokens))])
            return torch.nn.functional.one_hot(text[:, None].expand(-1, tokens.shape[1]), VOCAB) * 1000.0

    for every, made in ((1, 5), (4, 8), (16, 16)):
        calls: list[int] = []
        monkeypatch.setitem(sampling.WAIT, "cpu", every)
        hypotheses = Sampling(20, 0.0)(Counting(), torch.zeros(3, 1, dtype=torch.long), end=5)
        assert hypotheses.tolist() == [[5] * 5, [3, 3, 5, 5, 5], [3, 3, 3, 3, 5]]
        assert len(calls) == made

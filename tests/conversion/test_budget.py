"""Distribution of a cache over layers: the optimum, the bytes of the settings, continued after an interruption."""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from attnlab.attention import MHA, MLA, Attention
from attnlab.conversion import Conversion, ToGQA, ToMLA, ToMTLA, ToTPA, layers, measured, texts
from attnlab.conversion.base import SINKS, attention_of
from attnlab.conversion.budget import Survey, distribute, near
from attnlab.conversion.layers import convert, refit
from attnlab.conversion.measured import Predictions, retrieved
from attnlab.conversion.split import Rotary
from attnlab.conversion.statistics import collect
from attnlab.errors import ConfigError, DataError
from attnlab.models import Decoder
from attnlab.run.cache import TENSORS
from tests.attention.mechanisms import error
from tests.conversion.models import exact, tokens

TEXTS = tokens(8, 12)


def converted(target: ToMLA, name: str = "llama") -> Decoder:
    result = copy.deepcopy(exact(name))
    convert(result, target, TEXTS)
    return result


def sizes(decoder: Decoder) -> list[tuple[int, int]]:
    return [(a.rope_dim, a.latent_dim) for a in decoder.attentions if isinstance(a, MLA)]


def test_the_distribution_is_the_best_of_all() -> None:
    """Against every distribution of the same sum, of tables that are not convex and of unlike lengths."""
    rng = torch.Generator().manual_seed(0)
    for _ in range(5):
        lost = [torch.rand(n, generator=rng, dtype=torch.float64) for n in (13, 9, 11)]
        totals, least = [6, 5, 6], [2, 1, 4]
        result = distribute(lost, totals, least)
        choices = [range(low, len(errors), 2) for low, errors in zip(least, lost, strict=True)]
        every = [pick for pick in itertools.product(*choices) if sum(pick) == sum(totals)]
        assert tuple(result) == min(every, key=lambda pick: sum(float(e[n]) for e, n in zip(lost, pick, strict=True)))


def test_the_first_position_does_not_decide_the_sizes_of_later_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """In trained models an early layer adds a vector there that is a thousand times larger than all others."""
    plain, planted = copy.deepcopy(exact("llama")), copy.deepcopy(exact("llama"))
    first = planted.blocks[0]
    mlp = first.mlp

    def sink(h: Tensor) -> Tensor:
        out = mlp(h).clone()
        out[:, 0, 0] += 1e3 * out.norm(dim=-1).amax(1)
        return out

    monkeypatch.setattr(first, "mlp", sink)
    for decoder in (plain, planted):
        convert(decoder, ToMLA(keep=0.5, layers="budget"), tokens(8, 48))
    (_, without), (_, beside) = (list(map(sum, sizes(decoder))) for decoder in (plain, planted))
    assert abs(beside - without) <= 4


def test_measured_sizes_fit_the_cache_and_go_where_predictions_change() -> None:
    """A layer that hardly changes predictions gets the smallest choice, a short window or merged latents.

    The other one gets the rest of the cache.
    """
    original, texts = copy.deepcopy(exact("llama")), tokens(16, 72)
    original.blocks[0].attention.out.weight.data.mul_(1e-4)
    for target, least in (
        (ToMLA(keep=0.5), 8 * (32 + SINKS)),
        (ToMTLA(keep=0.5), 4 * 44),
    ):
        result = copy.deepcopy(original)
        about = [layer.about for layer in convert(result, target, texts)]
        assert all(layer["divergence"] is None or layer["divergence"] > 0 for layer in about)
        assert about[1]["divergence"] is not None, "the layer whose size matters was measured"
        first, second = (attention.cache_elements(1, 72) for attention in result.attentions)
        room = 2 * attention_of(target.planned_for(original.attentions[0])).cache_elements(1, 72)
        assert first == least and 0.9 * room < first + second <= room


def test_retrieved_tokens_follow_the_same_ids_again() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 9]
    assert retrieved(torch.tensor([text]))[0].nonzero().flatten().tolist() == [13]


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "near"), [(torch.float64, 1e-6), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize(("name", "block"), [("llama", 0), ("smollm", 1), ("gpt2", 1)])
def test_a_divergence_is_that_of_the_predictions(
    monkeypatch: pytest.MonkeyPatch, name: str, block: int, dtype: torch.dtype, near: float
) -> None:
    """With equal weights of the positions, of which none is retrieved."""
    monkeypatch.setattr(measured, "ROWS", 5)
    decoder = copy.deepcopy(exact(name)).to(dtype)
    predictions = Predictions(copy.deepcopy(decoder), TEXTS)
    for _ in range(block):
        predictions.enter()
    changed = copy.deepcopy(decoder.blocks[block].attention)
    changed.out.weight.mul_(0.9)
    divergence = predictions.divergence(changed)
    before, decoder.blocks[block].attention = (logits(decoder), changed)
    lost = F.kl_div(logits(decoder), before, reduction="none", log_target=True).sum(-1).mean()
    assert divergence == pytest.approx(float(lost), rel=near) and lost > 1e-4


@torch.no_grad()
def test_retrieved_tokens_count_three_times_in_a_divergence() -> None:
    """Three times the mean at tokens that a text has after the same six before, and the mean at all others."""
    rows = tokens(8, 18, seed=5)
    rows[:3, 9:] = rows[:3, :9]
    decoder = copy.deepcopy(exact("llama"))
    predictions = Predictions(copy.deepcopy(decoder), rows)
    changed = copy.deepcopy(decoder.blocks[0].attention)
    changed.out.weight.mul_(0.8)
    divergence = predictions.divergence(changed)
    before, decoder.blocks[0].attention = (logits(decoder, rows), changed)
    lost = (before.exp() * (before - logits(decoder, rows))).sum(-1)
    again = torch.zeros(8, 18, dtype=torch.bool)
    again[:3, 14:17] = True  # from the sixth repeated token on, where a next token follows
    assert divergence == pytest.approx(float(3 * lost[again].mean() + lost[~again].mean()), rel=1e-6)


def logits(decoder: Decoder, rows: torch.Tensor = TEXTS) -> torch.Tensor:
    return (decoder.hidden(rows).double() @ decoder.vocabulary_matrix.double().mT).log_softmax(-1)


def test_the_cache_has_the_size_of_the_settings() -> None:
    """Layers differ, their sum does not; a layer with larger errors gets more."""
    for target in (
        ToMLA(keep=0.4, layers="budget"),
        ToMTLA(keep=0.4, layers="budget"),
        ToMLA(keep=0.4, rope_dim=4, layers="budget"),
    ):
        result = converted(target)
        original = exact("llama").attentions[0]
        assert isinstance(original, MHA)
        planned = target.planned(original)
        cached = [rope + rank for rope, rank in sizes(result)]
        assert sum(cached) == 2 * (planned["rope_dim"] + planned["latent_dim"])
        assert target.rope_dim is None or {rope for rope, _ in sizes(result)} == {4}
    attentions = [a for a in exact("llama").attentions if isinstance(a, MHA)]
    x = [exact("llama").embed(TEXTS, 0)]
    one = ToMLA(keep=0.4, layers="budget").survey(attentions[0], collect(attentions[0], x))
    more = Survey(one.rope_dims, one.errors, one.scores, 100.0)
    first, second = ToMLA(keep=0.4, layers="budget").plans(attentions, [more, one])
    assert first.total > second.total and first.total + second.total == 2 * 13


def test_a_survey_predicts_what_a_split_predicts() -> None:
    attention = exact("qwen3").attentions[0]
    assert isinstance(attention, MHA)
    target, result = ToMLA(keep=0.4, layers="budget"), collect(attention, [exact("qwen3").embed(TEXTS, 0)])
    survey = target.survey(attention, result)
    for row, rope in zip(survey.errors, survey.rope_dims.tolist(), strict=True):
        for rank in (1, 7, 20):
            want = target.of_size(attention, result, rope, rank).lost
            assert float(row[rope + rank]) == pytest.approx(want, rel=1e-9, abs=1e-15)
    assert survey.lost.isfinite().sum() == len(survey.lost) - 1  # no latent at all is no attention
    best = int(survey.rope_dims[survey.errors[:, 30].argmin()])
    assert best in near(survey, 30, range(0, 33, 2))


@pytest.mark.parametrize("rotary", ["score", "two_norm"])
def test_the_same_frequencies_in_all_layers(rotary: Rotary) -> None:
    """With the sum of sizes of equal layers."""
    result = converted(ToMLA(keep=0.5, layers="same", rotary=rotary))
    first, second = result.attentions
    assert isinstance(first, MLA) and isinstance(second, MLA)
    assert sizes(result)[0] == sizes(result)[1] and torch.equal(first.frequencies, second.frequencies)
    equal = converted(ToMLA(keep=0.5, layers="equal", rotary=rotary))
    assert sum(sum(one) for one in sizes(equal)) == sum(sum(one) for one in sizes(result))


def test_deepseek_with_equal_layers() -> None:
    from attnlab.export import deepseek

    result = converted(ToMLA(keep=0.5, layers="same", rope_dim=4), name="qwen2")
    exported = deepseek.convert(result).model
    with torch.no_grad():
        assert error(exported(TEXTS).logits, result(TEXTS)) < 1e-5
    last = result.blocks[1].attention
    assert isinstance(last, MLA)
    last.frequencies = 2 * last.frequencies
    assert "rotary frequencies in all layers" in str(deepseek.refusal(result))
    result.blocks[1].attention = MLA(32, 4, rope_dim=4, latent_dim=11, norm="none", rope_theta=None)
    assert "one latent_dim for all layers; convert with convert.layers=same" in str(deepseek.refusal(result))


def test_an_interrupted_conversion_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plans and a finished layer are read again, and a damaged one is converted again."""
    complete, again = converted(ToMLA(keep=0.4, layers="budget")), copy.deepcopy(exact("llama"))
    calls: list[int] = []

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:  # two surveys, two layers
            raise KeyboardInterrupt
        return collect(*arguments)

    monkeypatch.setattr(layers, "collect", counted)
    with pytest.raises(KeyboardInterrupt):
        convert(copy.deepcopy(again), ToMLA(keep=0.4, layers="budget"), TEXTS, tmp_path)
    convert(again, ToMLA(keep=0.4, layers="budget"), TEXTS, tmp_path)
    assert len(calls) == 4 + 1 and error(again(TEXTS), complete(TEXTS)) < 1e-12
    for file in tmp_path.rglob(TENSORS):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    calls[:] = [0] * 4
    repeated = copy.deepcopy(exact("llama"))
    convert(repeated, ToMLA(keep=0.4, layers="budget"), TEXTS, tmp_path)
    assert len(calls) == 4 + 2 and torch.equal(repeated(TEXTS), again(TEXTS))


def test_an_interrupted_measurement_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured is read again."""
    target, complete, again = ToMLA(keep=0.5), copy.deepcopy(exact("llama")), copy.deepcopy(exact("llama"))
    calls, measure = list[int](), Predictions.divergence

    def counted(predictions: Predictions, attention: Attention) -> float:
        calls.append(predictions.block)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measure(predictions, attention)

    convert(complete, target, TEXTS)
    monkeypatch.setattr(Predictions, "divergence", counted)
    with pytest.raises(KeyboardInterrupt):
        convert(copy.deepcopy(again), target, TEXTS, tmp_path)
    convert(again, target, TEXTS, tmp_path)
    together = len(calls) - 1  # one of them was interrupted
    calls[:] = [0] * 3
    convert(copy.deepcopy(exact("llama")), target, TEXTS)
    assert len(calls) - 3 == together and torch.equal(again(TEXTS), complete(TEXTS))


@pytest.mark.parametrize(
    ("target", "name", "message"),
    [
        (ToMLA(keep=0.01), "llama", "convert.keep=0.01: leaves a latent of 0"),
        (ToMTLA(keep=0.03), "llama", "convert.keep=0.03: leaves a latent of 1"),
        (ToMTLA(rope_dim=8, latent_dim=5), "llama", "convert.latent_dim=5: .*a multiple of 2"),
        (ToMLA(keep=0.25, rope_dim=8), "llama", "beside convert.rope_dim=8"),
        (ToMLA(keep=0.5, rope_dim=3), "llama", "convert.rope_dim=3: expected an even number up to 16"),
        (ToMLA(keep=0.9, latent_dim=2), "llama", "convert.latent_dim=2 leave rope_dim=27: expected an even number"),
        (ToMLA(keep=0.5, latent_dim=17), "llama", "convert.keep=0.5 leaves 16 numbers"),
        (ToMLA(keep=0.5, rope_dim=2), "gpt2", "has no rotary positions"),
        (ToMLA(latent_dim=40), "gpt2", "wider than the 32 of the inputs"),
        (ToMLA(keep=0.03, rotary="transmla"), "llama", "fits no cache of 1 numbers"),
        (ToMLA(keep=0.5, rope_dim=6, rotary="transmla"), "llama", "rope_dim must divide 8"),
        (ToMLA(keep=0.5, rope_dim=6, rotary="uniform"), "llama", "a multiple of 4"),
        (ToMLA(rope_dim=16, latent_dim=16), "llama", "no less than the 32"),
        (ToMTLA(), "mistral-window", "convert=mtla: sliding windows with merging .* a window of 5 positions"),
        (ToGQA(groups=2), "llama", "expected a divisor of the 2"),
        (ToTPA(rank=3), "llama", "2 heads, and no more ranks"),
        (ToTPA(rank=1), "qwen2", "has biases"),
        (ToTPA(rank=1), "qwen3", "norms its queries"),
    ],
)
def test_sizes_are_refused_from_the_settings_alone(target: Conversion, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        target.planned_for(exact(name).attentions[0])


def test_a_refitted_output_is_nearer_and_values_are_finite() -> None:
    """It is unchanged where there is no error."""
    attention = exact("llama").attentions[0]
    assert isinstance(attention, MHA)
    x = exact("llama").embed(TEXTS, 0).detach()
    mla = ToMLA(keep=0.25).convert(attention, collect(attention, [x]), lambda: [x]).attention
    before = (mla(x) - attention(x)).square().sum()
    refit(mla, [(x, attention(x))])
    assert (mla(x) - attention(x)).square().sum() < 0.99 * before
    biased = copy.deepcopy(attention)
    biased.out.bias = torch.nn.Parameter(torch.zeros(attention.d_model, dtype=torch.float64))
    refit(biased, [(x, attention(x))])
    assert error(biased.out.weight, attention.out.weight) < 1e-12
    damaged = copy.deepcopy(exact("llama"))
    torch.nn.init.constant_(damaged.attentions[1].out.weight, torch.nan)  # type: ignore[arg-type, union-attr]
    with pytest.raises(DataError, match="not finite in layer 1"):
        convert(damaged, ToMLA(keep=0.5), tokens(2, 8))


def test_a_refit_is_the_ridge_regression_of_the_errors() -> None:
    """By least squares with rows for the ridge, 1e-3 of the mean variance, on inputs and errors around their means."""
    attention = exact("llama").attentions[0]
    assert isinstance(attention, MHA)
    x = exact("llama").embed(TEXTS, 0).detach()
    mla = ToMLA(keep=0.25).convert(attention, collect(attention, [x]), lambda: [x]).attention
    out, inputs = mla.out, list[torch.Tensor]()
    assert isinstance(out, torch.nn.Linear) and out.bias is not None
    before, bias = out.weight.detach().clone(), out.bias.detach().clone()
    handle = out.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    with torch.no_grad():
        errors = (attention(x) - mla(x)).flatten(0, 1)
    handle.remove()
    heads = inputs[0].flatten(0, 1)
    z, e, count = heads - heads.mean(0), errors - errors.mean(0), len(heads)
    ridge = (1e-3 * z.square().mean() * count) ** 0.5 * torch.eye(z.shape[1], dtype=torch.float64)
    wanted = torch.linalg.lstsq(torch.cat((z, ridge)), torch.cat((e, e.new_zeros(len(ridge), e.shape[1])))).solution
    refit(mla, [(part, attention(part)) for part in x.split([5, 3])])
    torch.testing.assert_close(out.weight - before, wanted.mT, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(out.bias - bias, errors.mean(0) - heads.mean(0) @ wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "target",
    [pytest.param(ToMLA(keep=0.4, layers="budget"), marks=pytest.mark.slow), ToMTLA(keep=0.4, layers="budget")],
    ids=lambda target: target.name,
)
@torch.no_grad()
def test_neither_pieces_nor_known_outputs_change_a_conversion(
    target: Conversion, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    monkeypatch.setattr(layers, "BATCH", 2)
    for known, piece in ((True, 2), (True, 1), (False, 2)):
        monkeypatch.setattr(layers, "PIECE", piece)
        if not known:
            monkeypatch.setattr(texts, "output_of", lambda attention, x, number, known: attention(x))
        decoder = copy.deepcopy(exact("llama"))
        about = [layer.about["output_error"] for layer in convert(decoder, target, tokens(9, 12))]
        results.append((decoder(tokens(2, 12, seed=2)), torch.tensor(about)))
    for logits, errors in results[1:]:
        torch.testing.assert_close(logits, results[0][0], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(errors, results[0][1], rtol=1e-8, atol=1e-12)

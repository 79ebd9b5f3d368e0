"""CTC's prefix scores against sums over all alignments, and joint decoding against all texts."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from attnlab.decoding import BeamSearch
from attnlab.decoding.ctc import CTCPrefixes
from tests.decoding.test_beam import EOS, PAD, VOCAB, decoder, logp

BLANK = 0
WORDS = [t for t in range(VOCAB) if t not in (BLANK, PAD, EOS)]
LENGTHS = torch.tensor([5, 3])


def frames() -> Tensor:
    scores = torch.randn(2, 5, VOCAB, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return (2 * scores).log_softmax(-1)


def spellings(logp: Tensor) -> dict[tuple[int, ...], float]:
    """The probability of each text, summed over all its alignments with the frames (S, V)."""
    texts: dict[tuple[int, ...], float] = {}
    for labels in itertools.product(range(logp.shape[1]), repeat=len(logp)):
        text = tuple(label for label, _ in itertools.groupby(labels) if label != BLANK)
        probability = float(logp[range(len(logp)), labels].sum().exp())
        texts[text] = texts.get(text, 0.0) + probability
    return texts


def test_prefix_scores_are_sums_over_all_alignments() -> None:
    scored = frames()
    texts = [spellings(rows[:size]) for rows, size in zip(scored, LENGTHS.tolist(), strict=True)]
    beam = torch.tensor([[3, 4, 5, 3], [5, 3, 4, 4]])
    prefixes = CTCPrefixes(scored, LENGTHS, 4, blank=BLANK, eos=EOS)
    hypotheses: list[list[tuple[int, ...]]] = [[()] * 4 for _ in texts]
    for labels in (beam, beam, beam.roll(1, 1)):
        found = prefixes.next()
        for n, i, label in itertools.product(range(2), range(4), WORDS):
            text = (*hypotheses[n][i], label)
            want = sum(p for other, p in texts[n].items() if other[: len(text)] == text)
            assert float(found[n, i, label].exp()) == pytest.approx(want, rel=1e-12, abs=0)
        for n, i in itertools.product(range(2), range(4)):
            want = texts[n].get(hypotheses[n][i], 0.0)
            assert float(found[n, i, EOS].exp()) == pytest.approx(want, rel=1e-12, abs=0)
            hypotheses[n][i] = (*hypotheses[n][i], int(labels[n, i]))
        assert found[..., BLANK].exp().eq(0).all()
        prefixes.append(labels)


@pytest.mark.parametrize("weight", [0.3, 1.0])
def test_a_joint_beam_wide_enough_finds_the_best_of_all_texts(weight: float) -> None:
    model, scored = decoder("mtla2"), frames()
    memory = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    search = BeamSearch(40, max_len_b=3, length_penalty=0.0, ctc_weight=weight)
    best = search(model, memory, LENGTHS, bos=EOS, eos=EOS, pad=PAD, ctc=scored)
    for n, size in enumerate(LENGTHS.tolist()):
        ranked = []
        for count in (1, 2, 3):
            texts = [list(text) for text in itertools.product(WORDS, repeat=count)]
            by_decoder = torch.tensor(logp(model, memory[n, :size], [[*text, EOS] for text in texts]))
            rows = scored[n, :size, None].expand(-1, len(texts), -1)
            sizes = torch.full((len(texts),), size), torch.full((len(texts),), count)
            by_ctc = -F.ctc_loss(rows, torch.tensor(texts), *sizes, BLANK, reduction="none")
            totals = (1 - weight) * by_decoder + weight * by_ctc
            ranked += [(total, [*text, EOS]) for total, text in zip(totals.tolist(), texts, strict=True)]
        want = sorted((row for row in ranked if row[0] > float("-inf")), reverse=True)
        assert [h.tokens for h in best[n]][:5] == [text for _, text in want][:5]
        assert [h.score for h in best[n]][:5] == pytest.approx([score for score, _ in want][:5], abs=1e-5)


def test_joint_decoding_of_a_batch_is_that_of_each_utterance() -> None:
    model, generator = decoder("mha"), torch.Generator().manual_seed(6)
    lengths = torch.tensor([7, 4, 5, 2])
    memory = torch.randn(4, 7, 16, generator=generator, dtype=torch.float64)
    scored = torch.randn(4, 7, VOCAB, generator=generator, dtype=torch.float64).log_softmax(-1)
    for beam in (1, 3):
        search = BeamSearch(beam, max_len_b=9, ctc_weight=0.4)
        together = search(model, memory, lengths, bos=EOS, eos=EOS, pad=PAD, ctc=scored)
        for n, size in enumerate(lengths.tolist()):
            rows = slice(n, n + 1), slice(size)
            alone = search(model, memory[rows], lengths[n : n + 1], bos=EOS, eos=EOS, pad=PAD, ctc=scored[rows])[0]
            assert [h.tokens for h in together[n]] == [h.tokens for h in alone]
            assert [h.score for h in together[n]] == pytest.approx([h.score for h in alone], abs=1e-5)


def test_without_weight_ctc_changes_nothing_and_with_weight_it_is_needed() -> None:
    model, memory = decoder("mha"), torch.randn(2, 5, 16, dtype=torch.float64)
    ids: dict[str, Any] = {"bos": EOS, "eos": EOS, "pad": PAD}
    plain = BeamSearch(3, max_len_b=4)(model, memory, LENGTHS, **ids)
    assert BeamSearch(3, max_len_b=4, ctc_weight=0.0)(model, memory, LENGTHS, ctc=frames(), **ids) == plain
    with pytest.raises(ValueError, match="ctc_weight=0.3"):
        BeamSearch(3, max_len_b=4, ctc_weight=0.3)(model, memory, LENGTHS, **ids)


def test_a_hypothesis_that_ctc_cannot_write_stays_impossible() -> None:
    """Where few tokens are allowed, places of the beam are filled with such ones, also with the blank."""
    prefixes = CTCPrefixes(frames()[:1], LENGTHS[:1], 2, blank=BLANK, eos=EOS, weight=0.3)
    allowed = torch.zeros(1, 2, VOCAB, dtype=torch.float64)
    prefixes.mixed(allowed, torch.tensor([[2], [2]]))
    mixed = prefixes.mixed(allowed, torch.tensor([[4], [BLANK]]))
    assert mixed[0, 0].max() > float("-inf") and mixed[0, 1].eq(float("-inf")).all()

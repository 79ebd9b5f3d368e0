"""Prefix scores of connectionist temporal classification (CTC), which beam search adds to those of the decoder."""

import torch
from torch import Tensor
from torch.nn import functional as F

from attnlab.attention.base import length_mask

NEVER = float("-inf")


class CTCPrefixes:
    """Log-probability by CTC that the text of an utterance begins with a hypothesis (Watanabe et al. 2017).

    The state of a hypothesis is the log-probability that the first t frames spell it and end with its last label
    (`in_label`) or with the blank (`in_blank`), for t from 0 to S. The recurrences over t are computed as cumulative
    sums, in float64.

    Args:
        logp: log-probabilities of the labels of each frame, (N, S, V).
        lengths: frames of each utterance, (N,).
        beam: number of hypotheses per utterance, which are initially empty.
        blank, eos: ids; `eos` stands for the end of the text.
        weight: of CTC in :meth:`mixed`.
    """

    def __init__(self, logp: Tensor, lengths: Tensor, beam: int, *, blank: int, eos: int, weight: float = 1.0) -> None:
        self.blank, self.eos, self.weight = blank, eos, weight
        self.padding = ~length_mask(lengths, logp.shape[1]).unsqueeze(1)
        self.logp = logp.double().transpose(1, 2).masked_fill(self.padding, 0.0)  # (N, V, S)
        self.p = self.logp.exp().transpose(1, 2)
        self.lengths = lengths.view(-1, 1, 1).expand(-1, beam, -1)
        self.silence = summed(self.logp[:, [blank]])
        self.in_blank = self.silence.expand(-1, beam, -1)  # (N, beam, S + 1)
        self.in_label = torch.full_like(self.in_blank, NEVER)
        self.last = torch.full_like(self.lengths[..., 0], eos)
        self.score = torch.zeros_like(self.in_blank[..., 0])
        self.scores: Tensor | None = None  # of the hypotheses with each label appended, (N, beam, V)

    def next(self) -> Tensor:
        """Log-probabilities of the hypotheses with each label appended; at `eos`: as complete texts. (N, beam, V)"""
        spelled = torch.logaddexp(self.in_label, self.in_blank)
        before = self._before(spelled)
        most = before.amax(-1, keepdim=True).clamp(min=torch.finfo(before.dtype).min)
        scores = ((before - most).exp() @ self.p).log() + most
        repeated = (self._before(self.in_blank) + self._frames_of(self.last)).logsumexp(-1, keepdim=True)
        scores.scatter_(2, self.last.unsqueeze(-1), repeated)  # a blank separates two equal labels
        scores[..., self.blank] = NEVER
        scores[..., self.eos] = spelled.gather(2, self.lengths).squeeze(2)
        self.scores = scores
        return scores

    def append(self, labels: Tensor) -> None:
        """Append a label to each hypothesis, (N, beam), after :meth:`next`."""
        assert self.scores is not None
        repeats = (labels == self.last).unsqueeze(-1)
        before = self._before(self.in_blank.where(repeats, torch.logaddexp(self.in_label, self.in_blank)))
        held = summed(self._frames_of(labels))
        self.in_label = held + F.pad((before - held[..., :-1]).logcumsumexp(-1), (1, 0), value=NEVER)
        left = (self.in_label - self.silence).logcumsumexp(-1)[..., :-1]
        self.in_blank = self.silence + F.pad(left, (1, 0), value=NEVER)
        self.score, self.last = self.scores.gather(2, labels.unsqueeze(-1)).squeeze(2), labels

    def mixed(self, logp: Tensor, last: Tensor) -> Tensor:
        """Append `last` (N * beam, 1), except at the first call; mix the decoder's `logp` (N, beam, V) with CTC's.

        Tokens with -inf keep it.
        """
        if self.scores is not None:
            self.append(last.view_as(self.last))
        score = self.score.unsqueeze(-1)
        gains = (self.next() - score).masked_fill(score == NEVER, NEVER)  # not NaN, which would be best
        return logp.where(logp == NEVER, (1 - self.weight) * logp + self.weight * gains.to(logp.dtype))

    def reorder(self, rows: Tensor) -> None:
        """Continue the hypotheses with these numbers, (N * beam,), as :meth:`attnlab.attention.Cache.reorder`."""
        for name in ("in_blank", "in_label", "last", "scores"):
            value = getattr(self, name)
            setattr(self, name, value.flatten(0, 1)[rows].view_as(value))

    def select(self, utterances: Tensor) -> None:
        """Keep only these utterances, (n,)."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value[utterances])

    def _before(self, spelled: Tensor) -> Tensor:
        """(N, beam, S + 1) -> log-probabilities before each frame, (N, beam, S)."""
        return spelled[..., :-1].masked_fill(self.padding, NEVER)

    def _frames_of(self, labels: Tensor) -> Tensor:
        """Log-probabilities of labels (N, beam) in each frame, (N, beam, S)."""
        return self.logp.gather(1, labels.unsqueeze(-1).expand(-1, -1, self.logp.shape[-1]))


def summed(logp: Tensor) -> Tensor:
    """logp (..., S) -> its sums over the first 0 to S frames, (..., S + 1)."""
    return F.pad(logp.cumsum(-1), (1, 0))

"""Beam search, and greedy search as its width-1 case. It uses models only through `Decodable`."""

from dataclasses import dataclass
from typing import Annotated, Protocol

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from attnlab.attention import Cache
from attnlab.config.bounds import bounded


class Decodable(Protocol):
    """A model that continues text after a prefix, through caches."""

    def start(
        self,
        prefix: Tensor,
        prefix_lengths: Tensor | None,
        beam: int,
        capacity: int,
        *,
        dtype: torch.dtype | None = None,
    ) -> list[Cache]: ...

    def step(self, tokens: Tensor, caches: list[Cache]) -> Tensor: ...


@dataclass(frozen=True)
class Hypothesis:
    """Token ids, with </s> at the end unless the length limit was reached; `score` is log p / length^penalty.

    Args:
        tokens: the ids, without <s>.
        score: higher is better.
    """

    tokens: list[int]
    score: float


@bounded
@dataclass(frozen=True)
class BeamSearch:
    """The search of the MTLA recipes, which is fairseq's.

    A hypothesis's score is its log-probability over length^length_penalty, </s> counted. A sentence is finished when
    `beam` of its hypotheses have ended among its `beam` best candidates of a step; at the length limit all must end.

    Args:
        beam: hypotheses of a sentence; 1 is greedy search.
        length_penalty: exponent of the length in the score.
        max_len_a, max_len_b: at most max_len_a * S + max_len_b tokens before </s>, S the length of the prefix.
        min_len: at least so many tokens before </s>, if the limit allows.
        temperature: divides the logits.
        unknown: whether <unk> may be written; published scores allow it.

    ValueError: a value is out of its bounds.
    """

    beam: Annotated[int, Ge(1)] = 5
    length_penalty: float = 1.0
    max_len_a: Annotated[float, Ge(0)] = 0.0
    max_len_b: Annotated[int, Ge(0)] = 200
    min_len: Annotated[int, Ge(0)] = 1
    temperature: Annotated[float, Gt(0)] = 1.0
    unknown: bool = True

    @torch.inference_mode()
    def __call__(
        self,
        model: Decodable,
        prefix: Tensor,
        prefix_lengths: Tensor,
        *,
        bos: int,
        eos: int,
        pad: int,
        unk: int | None = None,
        dtype: torch.dtype | None = None,
        first: list[int] | None = None,
    ) -> list[list[Hypothesis]]:
        """For each sentence its finished hypotheses, best first, at most `beam`.

        Args:
            model: continues text after a prefix, through caches.
            prefix: (N, S, d), `prefix_lengths`: (N,).
            bos, eos, pad: ids; a text starts with `bos`, which is not part of a hypothesis.
            unk: the id of <unk>, which is written only with `unknown`; None: there is none.
            dtype: of the caches; None: that of the weights.
            first: the only tokens that a hypothesis may start with; None: any.
        """
        beam, device, total = self.beam, prefix.device, prefix.shape[0]
        limits = (self.max_len_a * prefix_lengths + self.max_len_b).long()
        longest = int(limits.max())
        caches = model.start(prefix, prefix_lengths, beam, longest + 1, dtype=dtype)
        active = torch.arange(total, device=device)  # which sentence each block of `beam` rows belongs to
        tokens = torch.full((total * beam, longest + 2), pad, device=device)
        tokens[:, 0] = bos
        scores = torch.full((total, beam), float("-inf"), device=device)
        scores[:, 0] = 0.0  # all rows start equal, so that one of them is enough
        done_scores = torch.full((total, beam), float("-inf"), device=device)
        done_tokens = torch.full((total, beam, longest + 1), pad, device=device)
        done_count = torch.zeros(total, dtype=torch.long, device=device)

        for step in range(longest + 1):
            logits = model.step(tokens[:, step : step + 1], caches)[:, -1].float() / self.temperature
            if step == 0 and first is not None:
                others = torch.ones_like(logits[0], dtype=torch.bool).index_fill(
                    0, torch.tensor(first, device=device), 0
                )
                logits = logits.masked_fill(others, float("-inf"))
            logp = logits.log_softmax(-1).view(len(active), beam, -1)
            vocab = logp.shape[-1]
            logp[..., pad] = float("-inf")
            if unk is not None and not self.unknown:
                logp[..., unk] = float("-inf")
            is_eos = torch.arange(vocab, device=device) == eos
            at_limit = (limits[active] <= step)[:, None, None]
            barred = torch.where(at_limit, ~is_eos, is_eos & (step < self.min_len))
            logp = logp.masked_fill(barred, float("-inf"))
            best, place = (scores[..., None] + logp).flatten(1).topk(min(2 * beam, beam * vocab))
            origin, token = place // vocab, place % vocab
            ended = (token == eos) & (best > float("-inf"))

            # Candidates that end count only among the `beam` best, as published.
            fresh = best[:, :beam].masked_fill(~ended[:, :beam], float("-inf")) / (step + 1) ** self.length_penalty
            rows = torch.arange(len(active), device=device)[:, None] * beam
            texts = torch.full((len(active), beam, longest + 1), pad, device=device)
            texts[..., :step] = tokens[rows + origin[:, :beam], 1 : step + 1]
            texts[..., step] = eos
            done_count[active] += ended[:, :beam].sum(1)
            merged, keep = torch.cat((done_scores[active], fresh), 1).topk(beam)
            done_scores[active] = merged
            texts = torch.cat((done_tokens[active], texts), 1)
            done_tokens[active] = texts.gather(1, keep[..., None].expand(-1, -1, texts.shape[-1]))

            # The `beam` best that continue.
            best = best.masked_fill(ended, float("-inf"))
            scores, chosen = best.topk(beam)
            source = (rows + origin.gather(1, chosen)).flatten()
            tokens = tokens[source]
            tokens[:, step + 1] = token.gather(1, chosen).flatten()
            going = (done_count[active] < beam) & (limits[active] > step)
            going &= scores[:, 0] > float("-inf")
            left = going.nonzero().squeeze(1)  # waits for the device: once per step, here
            if len(left) == 0:
                break
            if beam > 1:
                for cache in caches:
                    cache.reorder(source)
            if len(left) < len(active):
                for cache in caches:
                    cache.select(left)
                active, scores = active[left], scores[left]
                tokens = tokens.view(-1, beam, tokens.shape[1])[left].flatten(0, 1)

        return [
            [
                Hypothesis([t for t in text if t != pad], score)
                for text, score in zip(texts, values, strict=True)
                if score > float("-inf")
            ]
            for texts, values in zip(done_tokens.tolist(), done_scores.tolist(), strict=True)
        ]

"""Beam search, with greedy search as beam size 1, and the model calls of every decoding loop.

Models are accessed only through `Stepping` and `Decodable`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from attnlab.attention import Cache
from attnlab.config.bounds import Size, SizeOrZero
from attnlab.decoding.ctc import CTCPrefixes

WARM_UP = 2  # eager steps before the first capture, in which libraries allocate memory and choose kernels
LEAST = 8  # remaining steps for which a capture pays off
READS = 32  # positions by which the reads of a compiled step grow
Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]  # a bound method -> its compiled form
BLOCK = 32  # tokens per block of the vocabulary in `best_continuations`
WAIT = {"cuda": 8}  # steps between checks for finished sentences, by device; others: 1


class Stepping(Protocol):
    """A model that continues text through caches."""

    @property
    def step(self) -> Callable[[Tensor, list[Cache]], Tensor]:
        """Tokens (B, n) and caches -> logits (B, n, V). A wrapper may return the method of the wrapped model."""


class Steps:
    """Repeated calls of `model.step` with one token per row.

    On CUDA the step is captured in a graph after `WARM_UP` calls and replayed afterwards, which launches its many small
    kernels at once. On a CPU a compiler can fuse them. Both make the caches static (`Cache.make_static`). Steps run
    eagerly on other devices, and if a mechanism needs the length on the host.

    A compiled step is one graph for all lengths, numbers of rows and sizes of prefixes above one, and another one if
    prefixes differ in length. It reads the existing text positions, rounded up to a multiple of `READS`.

    Args:
        model: model in eval mode.
        caches: caches with as many rows as the tokens of each call.
        steps: maximum number of calls.
        graphs: whether steps may be captured.
        compiled: returns the compiled form of `model.step`, the same for every search, with symbolic sizes. None: steps
            are not compiled.
    """

    def __init__(
        self, model: Stepping, caches: list[Cache], steps: int, *, graphs: bool = True, compiled: Compiler | None = None
    ) -> None:
        self.model, self.caches, self.left, self.graphs, self.compiled = model, caches, steps, graphs, compiled
        self.calls = 0
        self._varied = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._tokens = self._logits = torch.empty(0)

    @property
    def captured(self) -> bool:
        """Whether steps are replayed from a graph."""
        return self._graph is not None

    def __call__(self, tokens: Tensor) -> Tensor:
        """Next tokens (B, 1) -> logits (B, 1, V), which the next call may overwrite."""
        self.left -= 1
        self.calls += 1
        if self._graph is not None:
            self._tokens.copy_(tokens)
            self._graph.replay()
            self._count()
            return self._logits
        if self.compiled is not None and tokens.device.type == "cpu" and self._can_be_static:
            return self._compiled(tokens, self.compiled)
        worth = self.graphs and tokens.is_cuda and self.calls > WARM_UP and self.left >= LEAST
        if not (worth and self._can_be_static):
            return self.model.step(tokens, self.caches)
        if not all(cache.is_static for cache in self.caches):
            self._make_static()
            return self._beside(tokens)
        return self._captured(tokens)

    def reset(self) -> None:
        """Discard the captured graph, after the rows or the buffers of the caches have changed."""
        self._graph, self._tokens, self._logits = None, torch.empty(0), torch.empty(0)
        self._varied = False

    @property
    def _can_be_static(self) -> bool:
        return all(cache.can_be_static for cache in self.caches)

    def _make_static(self) -> None:
        for cache in self.caches:
            if not cache.is_static:
                cache.make_static()

    def _count(self) -> None:
        """Increase the lengths of static caches, which a replayed or compiled step does not do."""
        for cache in self.caches:
            cache.length += cache.static_length is not None

    def _compiled(self, tokens: Tensor, compiled: Compiler) -> Tensor:
        self._make_static()
        for cache in self.caches:
            if cache.static_length is None:
                continue
            if cache.length >= cache.capacity:
                raise ValueError(f"the cache has room for {cache.capacity} positions and is full")
            if not self._varied or cache.length % READS == 0:
                cache.bound_reads(cache.length + READS - cache.length % READS)
                self._varied = False
        _let_vary([tokens] if self._varied else [tokens, *self.caches])
        self._varied = True
        lengths = [cache.length for cache in self.caches]
        logits: Tensor = compiled(self.model.step)(tokens, self.caches)
        for cache, length in zip(self.caches, lengths, strict=True):
            cache.length = length  # already increased if torch ran the step, or a part of it, without compiling it
        self._count()
        return logits

    def _beside(self, tokens: Tensor) -> Tensor:
        """The first static step, which uses other kernels, on a side stream, as CUDA requires before a capture."""
        side, current = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            logits = self.model.step(tokens, self.caches)
        current.wait_stream(side)
        return logits

    def _captured(self, tokens: Tensor) -> Tensor:
        """Capture a step and replay it."""
        lengths = [cache.length for cache in self.caches]
        self._tokens, graph = tokens.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._logits = self.model.step(self._tokens, self.caches)
        for cache, length in zip(self.caches, lengths, strict=True):
            cache.length = length  # capturing does not run the step
        self._graph, self.calls, self.left = graph, self.calls - 1, self.left + 1
        return self(tokens)


def _let_vary(things: list[Any]) -> None:
    """Mark the sizes of these tensors, and of tensors in caches, as dynamic for torch.compile."""
    for thing in things:
        if isinstance(thing, Cache):
            _let_vary(list(vars(thing).values()))
        elif isinstance(thing, dict):
            _let_vary(list(thing.values()))
        elif isinstance(thing, Tensor):
            for axis in range(thing.dim()):
                torch._dynamo.maybe_mark_dynamic(thing, axis)


# --- the search ---


class Decodable(Stepping, Protocol):
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


@dataclass(frozen=True)
class Hypothesis:
    """A finished text.

    Args:
        tokens: token ids without <s>, ending with </s>.
        score: log-probability divided by the length penalty; higher is better.
        at_limit: whether it has as many tokens as the limit of length allows, and may be cut.
    """

    tokens: list[int]
    score: float
    at_limit: bool = False


@dataclass(frozen=True)
class BeamSearch:
    """Beam search of the MTLA recipes, as in fairseq.

    The score of a hypothesis is its log-probability divided by :meth:`penalty` of its length, including </s>. A
    sentence is finished when `beam` of its hypotheses have ended among the `beam` best candidates of a step; at the
    length limit all must end. Candidates of a step have the same length, so that the penalty affects only the order of
    finished hypotheses, and not when the search ends.

    Args:
        beam: number of hypotheses per sentence; 1 is greedy search.
        length_penalty: exponent a of the length in the score.
        length_penalty_form: power: length^a, as in fairseq; gnmt: ((5 + length) / 6)^a (Wu et al., 2016, equation 14),
            to which the Transformer's a = 0.6 refers.
        max_len_a, max_len_b: at most max_len_a * S + max_len_b tokens before </s>, with S the length of the prefix. A
            task puts twice the longest training target in the place of max_len_b = None.
        min_len: minimum number of tokens before </s>, if the limit allows.
        temperature: divisor of the decoder's logits.
        unknown: whether <unk> may be generated; published scores allow it.
        ctc_weight: share w of CTC's prefix scores in the log-probability, (1 - w) log p_decoder + w log p_CTC (Watanabe
            et al. 2017, hybrid CTC/attention); 0: the decoder alone, 1: CTC alone.
    """

    beam: Size = 5
    length_penalty: float = 1.0
    length_penalty_form: Literal["power", "gnmt"] = "power"
    max_len_a: Annotated[float, Ge(0)] = 0.0
    max_len_b: SizeOrZero | None = 200
    min_len: SizeOrZero = 1
    temperature: Annotated[float, Gt(0)] = 1.0
    unknown: bool = True
    ctc_weight: Annotated[float, Ge(0), Le(1)] = 0.0

    def penalty(self, length: int) -> float:
        """Divisor of the log-probability of a hypothesis of `length` tokens, including </s>."""
        base = length if self.length_penalty_form == "power" else (5 + length) / 6
        return float(base**self.length_penalty)

    def limits(self, prefix_lengths: Tensor) -> Tensor:
        """The largest numbers of tokens before </s>, (N,) int64, for prefixes of these lengths, (N,)."""
        if self.max_len_b is None:
            raise ValueError("max_len_b=None: expected a number of tokens")
        return (self.max_len_a * prefix_lengths + self.max_len_b).long()

    def _scorers(self, ctc: Tensor | None, lengths: Tensor, eos: int) -> list[CTCPrefixes]:
        if not self.ctc_weight:
            return []
        if ctc is None:
            raise ValueError(f"ctc_weight={self.ctc_weight} needs the log-probabilities of a CTC head")
        return [CTCPrefixes(ctc, lengths, self.beam, blank=0, eos=eos, weight=self.ctc_weight)]

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
        ctc: Tensor | None = None,
        compiled: Compiler | None = None,
    ) -> list[list[Hypothesis]]:
        """Finished hypotheses of each sentence, best first, at most `beam`.

        Args:
            prefix: (N, S, d).
            prefix_lengths: (N,).
            bos, eos, pad: token ids; a text starts with `bos`, which is not part of a hypothesis.
            unk: id of <unk>, generated only with `unknown`; None: the vocabulary has no such token.
            dtype: dtype of the caches; None: that of the weights.
            first: allowed first tokens of a hypothesis; None: any.
            ctc: CTC's log-probabilities of the labels of each position of the prefix, (N, S, V), which `ctc_weight`
                needs; the labels are the decoder's tokens, and 0 is the blank.
            compiled: returns the compiled form of the model's step on a CPU, see `Steps`; None: steps are not compiled.
        """
        beam, device, total = self.beam, prefix.device, prefix.shape[0]
        limits = self.limits(prefix_lengths)
        shortest, longest = torch.stack(limits.aminmax()).tolist()
        caches = model.start(prefix, prefix_lengths, beam, longest + 1, dtype=dtype)
        active = torch.arange(total, device=device)  # sentence of each block of `beam` rows
        last = torch.full((total * beam, 1), bos, device=device)
        scores = torch.full((total, beam), float("-inf"), device=device)
        scores[:, 0] = 0.0  # all rows start equal: only the first one is continued
        history = History(total, beam, longest + 1, device)
        done = torch.full((total, beam), float("-inf"), device=device)
        done_at = torch.zeros(2, total, beam, dtype=torch.long, device=device)  # step and row of finished hypotheses
        done_count = torch.zeros(total, dtype=torch.long, device=device)
        never = [pad] if unk is None or self.unknown else [pad, unk]
        barred = torch.tensor(never, device=device)
        finished = torch.zeros(total, dtype=torch.bool, device=device)  # for each active sentence
        every = WAIT.get(device.type, 1)
        steps = Steps(model, caches, longest + 1, compiled=compiled)
        scorers = self._scorers(ctc, prefix_lengths, eos)
        states: list[Cache | CTCPrefixes] = [*caches, *scorers]

        for step in range(longest + 1):
            logits = steps(last)[:, -1].float()
            if self.temperature != 1.0:
                logits = logits / self.temperature
            if step == 0 and first is not None:
                allowed = torch.zeros_like(logits[0], dtype=torch.bool)
                allowed[torch.tensor(first, device=device)] = True
                logits = logits.masked_fill(~allowed, float("-inf"))
            logp = logits.log_softmax(-1).view(len(active), beam, -1)
            logp.index_fill_(-1, barred, float("-inf"))
            at_limit = (limits[active] <= step)[:, None]
            if step < self.min_len:
                logp[..., eos].masked_fill_(~at_limit, float("-inf"))
            if step >= shortest:  # a hypothesis must end at its limit
                others = torch.arange(logp.shape[-1], device=device) != eos
                logp.masked_fill_(at_limit[..., None] & others, float("-inf"))
            for scorer in scorers:
                logp = scorer.mixed(logp, last)
            best, origin, token = best_continuations(logp, scores, 2 * beam)
            ended = (token == eos) & (best > float("-inf")) & ~finished[:, None]

            # A finished candidate counts only if it is among the `beam` best, as published.
            fresh = best[:, :beam].masked_fill(~ended[:, :beam], float("-inf")) / self.penalty(step + 1)
            done_count[active] += ended[:, :beam].sum(1)
            merged, keep = torch.cat((done[active], fresh), 1).topk(beam)
            done[active] = merged
            new_at = torch.stack((torch.full_like(origin, step), origin))[..., :beam]
            done_at[:, active] = torch.cat((done_at[:, active], new_at), 2).gather(2, keep.expand(2, -1, -1))

            # The `beam` best unfinished candidates continue.
            scores, chosen = best.masked_fill(ended, float("-inf")).topk(beam)
            source, order = stay(origin.gather(1, chosen))
            scores, chosen = scores.gather(1, order), chosen.gather(1, order)
            last = token.gather(1, chosen).view(-1, 1)
            history.write(step, active, source, last.view_as(source))
            finished |= (done_count[active] >= beam) | at_limit[:, 0] | (scores.amax(1) == float("-inf"))
            left = None if (step + 1) % every else (~finished).nonzero().squeeze(1)  # synchronises
            if left is not None and len(left) == 0:
                break
            if beam > 1:
                rows = (torch.arange(len(active), device=device)[:, None] * beam + source).flatten()
                for state in states:
                    state.reorder(rows)
            if left is not None and len(left) <= (len(active) - 1) // (2 if steps.captured else 1):
                for state in states:
                    state.select(left)
                steps.reset()
                active, scores, finished = active[left], scores[left], finished[left]
                last = last.view(-1, beam)[left].view(-1, 1)
            if device.type == "cpu":  # on a GPU `reorder` moves whole rows, without waiting for their number
                for cache in caches:
                    cache.common = history.shared[active].flatten(0, 1)

        texts = history.texts(done_at[0], done_at[1])
        return [
            [
                Hypothesis([*text[:size], eos], score, size == limit)
                for text, size, score in zip(rows, sizes, values, strict=True)
                if score > float("-inf")
            ]
            for rows, sizes, values, limit in zip(
                texts.tolist(), done_at[0].tolist(), done.tolist(), limits.tolist(), strict=True
            )
        ]


class History:
    """Hypotheses as a tree: the tokens of each step, and the rows that they continue.

    `shared`, (N, beam, beam): number of first positions, with <s>, that two hypotheses of a sentence share; on a CPU.
    """

    def __init__(self, sentences: int, beam: int, steps: int, device: torch.device) -> None:
        self.parents, self.tokens = torch.zeros(2, steps, sentences, beam, dtype=torch.long, device=device)
        self.shared = torch.zeros(sentences, beam, beam, dtype=torch.long, device=device)
        self.steps = 0

    def write(self, step: int, sentences: Tensor, parents: Tensor, tokens: Tensor) -> None:
        """Store a step of the given sentences (A,): the continued rows and their new tokens, (A, beam)."""
        self.parents[step, sentences], self.tokens[step, sentences] = parents, tokens
        self.steps = step + 1
        if parents.is_cpu:
            one, other = parents.unsqueeze(2), parents.unsqueeze(1)
            shared = self.shared[sentences[:, None, None], one, other]
            self.shared[sentences] = torch.where(one == other, self.steps, shared)

    def texts(self, sizes: Tensor, rows: Tensor) -> Tensor:
        """Texts (N, k, steps) in `rows` (N, k), of which the first `sizes` (N, k) tokens are valid."""
        steps_of = [torch.empty_like(rows) for _ in range(self.steps)]
        for step in reversed(range(self.steps)):
            inside = step < sizes
            steps_of[step] = self.tokens[step].gather(1, rows)
            rows = torch.where(inside, self.parents[step].gather(1, rows), rows)
        return torch.stack(steps_of, -1)


def best_continuations(logp: Tensor, scores: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` best continuations of each sentence: their scores, rows and tokens, (A, count), best first.

    They lie in the `count` blocks of the vocabulary with the largest maxima, which are found first.

    Args:
        logp: log-probabilities of the next token, (A, beam, V).
        scores: scores of the rows, (A, beam), which are added.
        count: number of continuations; fewer are returned if there are no more.
    """
    size = logp.shape[-1]
    full = size - size % BLOCK
    blocks = logp[..., :full].unflatten(-1, (-1, BLOCK))
    values = torch.cat((blocks.amax(-1), logp[..., full:]), -1) + scores.unsqueeze(-1)
    per_row = values.shape[-1]
    best, place = values.flatten(1).topk(min(count, values[0].numel()))
    row, at = place // per_row, place % per_row
    tail = at - full // BLOCK  # index of a token after the last full block, which is its own block
    start = torch.where(tail < 0, at * BLOCK, full + tail)
    tokens = start.unsqueeze(-1) + torch.arange(BLOCK, device=logp.device)
    width = torch.where(tail < 0, BLOCK, 1).unsqueeze(-1)
    inside = tokens < start.unsqueeze(-1) + width
    tokens = tokens.clamp(max=size - 1)
    sentence = torch.arange(len(logp), device=logp.device)[:, None, None]
    values_of = logp[sentence, row.unsqueeze(-1), tokens] + scores.gather(1, row).unsqueeze(-1)
    values_of = values_of.masked_fill(~inside, float("-inf")).flatten(1)
    best, place = values_of.topk(min(count, scores.shape[1] * size, values_of.shape[1]))
    return best, row.gather(1, place // BLOCK), tokens.flatten(1).gather(1, place)


def stay(parents: Tensor) -> tuple[Tensor, Tensor]:
    """Order the continuations so that few cache rows are copied: one continuation of each row stays in its place.

    Args:
        parents: row that each continuation continues, (A, beam).

    Returns:
        For each place, the row that it continues and the index of its continuation, (A, beam) each.
    """
    numbers = torch.arange(parents.shape[1], device=parents.device).expand_as(parents)
    first = torch.full_like(parents, parents.shape[1]).scatter_reduce(1, parents, numbers, "amin")
    stays = first.gather(1, parents) == numbers
    free = (first < parents.shape[1]).long().argsort(dim=1, stable=True)  # rows without a continuation come first
    place = torch.where(stays, parents, free.gather(1, ((~stays).cumsum(1) - 1).clamp(min=0)))
    order = torch.empty_like(numbers).scatter(1, place, numbers)
    return parents.gather(1, order), order

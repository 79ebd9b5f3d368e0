"""Beam search, greedy search as its width-1 case, and the steps of every decoding loop.

Models are used only through `Stepping` and `Decodable`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from attnlab.attention import Cache
from attnlab.config.bounds import Size, SizeOrZero

WARM_UP = 2  # steps that run as they are before the first capture: libraries allocate and choose kernels in them
LEAST = 8  # steps that must follow: a capture takes as long as some of them
READS = 32  # positions by which the reads of a compiled step grow, which has no kernel that reads counts
Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]  # a bound method -> its compiled form
BLOCK = 32  # tokens of the vocabulary, of which the best is read first
WAIT = {"cuda": 8}  # steps between two looks which sentences are finished; elsewhere one


class Stepping(Protocol):
    """A model that continues text through caches."""

    @property
    def step(self) -> Callable[[Tensor, list[Cache]], Tensor]:
        """(B, n) tokens, caches -> logits (B, n, V). A model that wraps another may hand on the other's method."""


class Steps:
    """Calls `model.step` with one token of each row, again and again.

    On CUDA the step is captured in a graph after `WARM_UP` calls and replayed from then on: its dozens of small
    kernels are started at once. On a CPU a compiler fuses them, where there is one. Caches become static for both
    (`Cache.make_static`). Where a mechanism's steps need the length on the host, or on another device, each call runs
    as it is.

    A compiled step is one graph for all lengths, numbers of rows and sizes of prefixes from two on, and another one
    where prefixes differ in length. It reads the text positions that exist, rounded up to `READS`.

    Args:
        model: in eval mode.
        caches: of as many rows as the tokens that follow.
        steps: how many calls there will be at most.
        graphs: False: nothing is captured.
        compiled: gives the compiled form of `model.step`, the same one for every search; it must take sizes as
            variables. None: nothing is compiled.
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
        """Whether steps are replayed now."""
        return self._graph is not None

    def __call__(self, tokens: Tensor) -> Tensor:
        """The next tokens (B, 1) -> logits (B, 1, V), which the next call may overwrite."""
        self.left -= 1
        self.calls += 1
        if self._graph is not None:
            self._tokens.copy_(tokens)
            self._graph.replay()
            self._count()
            return self._logits
        if self.compiled is not None and tokens.device.type == "cpu" and self._can_be_static:
            return self._compiled(tokens, self.compiled)
        if not self._worth_it(tokens):
            return self.model.step(tokens, self.caches)
        if not all(cache.is_static for cache in self.caches):
            self._make_static()
            return self._beside(tokens)
        return self._captured(tokens)

    def reset(self) -> None:
        """The caches have other rows, or other buffers: what was captured is not valid any more."""
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
        """What a replayed or compiled step does not see."""
        for cache in self.caches:
            cache.length += cache.static_length is not None

    def _compiled(self, tokens: Tensor, compiled: Compiler) -> Tensor:
        self._make_static()
        for cache in self.caches:
            if cache.static_length is None:
                continue
            if cache.length >= cache.capacity:
                raise ValueError(f"the cache has room for {cache.capacity} positions, which are held already")
            if not self._varied or cache.length % READS == 0:
                cache.bound_reads(cache.length + READS - cache.length % READS)
                self._varied = False
        _let_vary([tokens] if self._varied else [tokens, *self.caches])
        self._varied = True
        lengths = [cache.length for cache in self.caches]
        logits: Tensor = compiled(self.model.step)(tokens, self.caches)
        for cache, length in zip(self.caches, lengths, strict=True):
            cache.length = length  # counted already where torch ran the step, or a part of it, without compiling it
        self._count()
        return logits

    def _worth_it(self, tokens: Tensor) -> bool:
        return self.graphs and tokens.is_cuda and self.calls > WARM_UP and self.left >= LEAST and self._can_be_static

    def _beside(self, tokens: Tensor) -> Tensor:
        """The first static step, which starts other kernels: on a side stream, as CUDA asks before a capture."""
        side, current = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            logits = self.model.step(tokens, self.caches)
        current.wait_stream(side)
        return logits

    def _captured(self, tokens: Tensor) -> Tensor:
        """Capture a step, and replay it."""
        lengths = [cache.length for cache in self.caches]
        self._tokens, graph = tokens.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._logits = self.model.step(self._tokens, self.caches)
        for cache, length in zip(self.caches, lengths, strict=True):
            cache.length = length  # capturing has run nothing
        self._graph, self.calls, self.left = graph, self.calls - 1, self.left + 1
        return self(tokens)


def _let_vary(things: list[Any]) -> None:
    """Sizes of these tensors, and of those that caches hold, are variables of what is compiled, not constants."""
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
    """Token ids, with </s> at the end unless the length limit was reached.

    Args:
        tokens: the ids, without <s>.
        score: log p over the length penalty of the search; higher is better.
    """

    tokens: list[int]
    score: float


@dataclass(frozen=True)
class BeamSearch:
    """The search of the MTLA recipes, which is fairseq's.

    A hypothesis's score is its log-probability over :meth:`penalty` of its length, </s> counted. A sentence is finished
    when `beam` of its hypotheses have ended among its `beam` best candidates of a step; at the length limit all must
    end. Which these are follows from log-probabilities of one length alone: the penalty orders what has ended, and
    no form of it moves the end of the search.

    Args:
        beam: hypotheses of a sentence; 1 is greedy search.
        length_penalty: a, exponent of the length in the score.
        length_penalty_form: power: length^a, as fairseq has it; gnmt: ((5 + length) / 6)^a (Wu et al., 2016, equation
            14), which the Transformer's a of 0.6 means.
        max_len_a, max_len_b: at most max_len_a * S + max_len_b tokens before </s>, S the length of the prefix.
        min_len: at least so many tokens before </s>, if the limit allows.
        temperature: divides the logits.
        unknown: whether <unk> may be written; published scores allow it.

    ValueError: a value is out of its bounds.
    """

    beam: Size = 5
    length_penalty: float = 1.0
    length_penalty_form: Literal["power", "gnmt"] = "power"
    max_len_a: Annotated[float, Ge(0)] = 0.0
    max_len_b: SizeOrZero = 200
    min_len: SizeOrZero = 1
    temperature: Annotated[float, Gt(0)] = 1.0
    unknown: bool = True

    def penalty(self, length: int) -> float:
        """What the log-probability of a hypothesis of `length` tokens, </s> counted, is divided by."""
        base = length if self.length_penalty_form == "power" else (5 + length) / 6
        return float(base**self.length_penalty)

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
        compiled: Compiler | None = None,
    ) -> list[list[Hypothesis]]:
        """For each sentence its finished hypotheses, best first, at most `beam`.

        Args:
            prefix: (N, S, d), `prefix_lengths`: (N,).
            bos, eos, pad: ids; a text starts with `bos`, which is not part of a hypothesis.
            unk: the id of <unk>, which is written only with `unknown`; None: there is none.
            dtype: of the caches; None: that of the weights.
            first: the only tokens that a hypothesis may start with; None: any.
            compiled: gives the compiled form of the model's step, for a CPU (`Steps`); None: nothing is compiled.
        """
        beam, device, total = self.beam, prefix.device, prefix.shape[0]
        limits = (self.max_len_a * prefix_lengths + self.max_len_b).long()
        shortest, longest = torch.stack(limits.aminmax()).tolist()
        caches = model.start(prefix, prefix_lengths, beam, longest + 1, dtype=dtype)
        active = torch.arange(total, device=device)  # which sentence each block of `beam` rows belongs to
        last = torch.full((total * beam, 1), bos, device=device)
        scores = torch.full((total, beam), float("-inf"), device=device)
        scores[:, 0] = 0.0  # all rows start equal, so that one of them is enough
        history = History(total, beam, longest + 1, device)
        done = torch.full((total, beam), float("-inf"), device=device)
        done_at = torch.zeros(2, total, beam, dtype=torch.long, device=device)  # step and row of what ended
        done_count = torch.zeros(total, dtype=torch.long, device=device)
        never = [pad] if unk is None or self.unknown else [pad, unk]
        barred = torch.tensor(never, device=device)
        finished = torch.zeros(total, dtype=torch.bool, device=device)  # of the active sentences
        every = WAIT.get(device.type, 1)
        steps = Steps(model, caches, longest + 1, compiled=compiled)

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
            if step >= shortest:  # at its limit a hypothesis must end
                others = torch.arange(logp.shape[-1], device=device) != eos
                logp.masked_fill_(at_limit[..., None] & others, float("-inf"))
            best, origin, token = best_continuations(logp, scores, 2 * beam)
            ended = (token == eos) & (best > float("-inf")) & ~finished[:, None]

            # Candidates that end count only among the `beam` best, as published.
            fresh = best[:, :beam].masked_fill(~ended[:, :beam], float("-inf")) / self.penalty(step + 1)
            done_count[active] += ended[:, :beam].sum(1)
            merged, keep = torch.cat((done[active], fresh), 1).topk(beam)
            done[active] = merged
            new_at = torch.stack((torch.full_like(origin, step), origin))[..., :beam]
            done_at[:, active] = torch.cat((done_at[:, active], new_at), 2).gather(2, keep.expand(2, -1, -1))

            # The `beam` best that continue.
            scores, chosen = best.masked_fill(ended, float("-inf")).topk(beam)
            source, order = stay(origin.gather(1, chosen))
            scores, chosen = scores.gather(1, order), chosen.gather(1, order)
            last = token.gather(1, chosen).view(-1, 1)
            history.write(step, active, source, last.view_as(source))
            finished |= (done_count[active] >= beam) | at_limit[:, 0] | (scores.amax(1) == float("-inf"))
            left = None if (step + 1) % every else (~finished).nonzero().squeeze(1)  # waits for the device
            if left is not None and len(left) == 0:
                break
            if beam > 1:
                rows = (torch.arange(len(active), device=device)[:, None] * beam + source).flatten()
                for cache in caches:
                    cache.reorder(rows)
            if left is not None and len(left) <= (len(active) - 1) // (2 if steps.captured else 1):
                for cache in caches:
                    cache.select(left)
                steps.reset()
                active, scores, finished = active[left], scores[left], finished[left]
                last = last.view(-1, beam)[left].view(-1, 1)

        texts = history.texts(done_at[0], done_at[1])
        return [
            [
                Hypothesis([*text[:size], eos], score)
                for text, size, score in zip(rows, sizes, values, strict=True)
                if score > float("-inf")
            ]
            for rows, sizes, values in zip(texts.tolist(), done_at[0].tolist(), done.tolist(), strict=True)
        ]


class History:
    """The hypotheses as a tree: of each of `steps` steps the tokens, and the rows that they continue."""

    def __init__(self, sentences: int, beam: int, steps: int, device: torch.device) -> None:
        self.parents, self.tokens = torch.zeros(2, steps, sentences, beam, dtype=torch.long, device=device)
        self.steps = 0

    def write(self, step: int, sentences: Tensor, parents: Tensor, tokens: Tensor) -> None:
        """Store a step of these sentences, (A,): the rows that were continued and their new tokens, (A, beam)."""
        self.parents[step, sentences], self.tokens[step, sentences] = parents, tokens
        self.steps = step + 1

    def texts(self, sizes: Tensor, rows: Tensor) -> Tensor:
        """The first `sizes` tokens, (N, k), of the texts in `rows`, (N, k): (N, k, steps); others are arbitrary."""
        steps_of = [torch.empty_like(rows) for _ in range(self.steps)]
        for step in reversed(range(self.steps)):
            inside = step < sizes
            steps_of[step] = self.tokens[step].gather(1, rows)
            rows = torch.where(inside, self.parents[step].gather(1, rows), rows)
        return torch.stack(steps_of, -1)


def best_continuations(logp: Tensor, scores: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` best of all continuations of a sentence's rows: their scores, rows and tokens, (A, count).

    The largest value of each BLOCK of the vocabulary is read first: the best are in the blocks with the best of these.

    Args:
        logp: log-probabilities of the next token, (A, beam, V).
        scores: of the rows, (A, beam), which are added.
        count: how many; fewer where there are no more continuations. The best come first.
    """
    size = logp.shape[-1]
    full = size - size % BLOCK
    blocks = logp[..., :full].unflatten(-1, (-1, BLOCK))
    values = torch.cat((blocks.amax(-1), logp[..., full:]), -1) + scores.unsqueeze(-1)
    per_row = values.shape[-1]
    best, place = values.flatten(1).topk(min(count, values[0].numel()))
    row, at = place // per_row, place % per_row
    tail = at - full // BLOCK  # of a token that is a block alone
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
    """Places for the rows' continuations, so that few rows of a cache are copied: one of each row takes its place.

    Args:
        parents: the rows that are continued, (A, beam).

    Returns:
        For each place the row that it continues, and the number of the continuation that takes it, (A, beam) both.
    """
    numbers = torch.arange(parents.shape[1], device=parents.device).expand_as(parents)
    first = torch.full_like(parents, parents.shape[1]).scatter_reduce(1, parents, numbers, "amin")
    stays = first.gather(1, parents) == numbers
    free = (first < parents.shape[1]).long().argsort(dim=1, stable=True)  # places without a continuation come first
    place = torch.where(stays, parents, free.gather(1, ((~stays).cumsum(1) - 1).clamp(min=0)))
    order = torch.empty_like(numbers).scatter(1, place, numbers)
    return parents.gather(1, order), order

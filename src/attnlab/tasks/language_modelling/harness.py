"""A trained language model as a model of lm-evaluation-harness.  Needs the extra `eval`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnlab.config.bounds import bounded
from attnlab.decoding import Sampling
from attnlab.errors import ConfigError, DataError
from attnlab.tasks.harness import Harness
from attnlab.tasks.language_modelling.module import LanguageModelling

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ConfigError(f"mode=evaluate needs lm-evaluation-harness: pip install 'attnlab[eval]' ({error})") from error


class TrainedRun(TemplateLM):
    """Log-likelihoods and greedy or sampled continuations for lm-evaluation-harness.

    A text longer than the model's context is cut at its beginning.

    Args:
        module: a trained language model with its vocabulary.
        batch_size: the number of texts in a batch.
        dtype: of autocast and caches; None: float32.
    """

    def __init__(self, module: LanguageModelling, batch_size: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.model, self.vocabulary, self.size, self.dtype = module.model, module.vocabulary, batch_size, dtype
        self._compiled = module.compiled_steps
        self._device = module.device

    @property
    def eot_token_id(self) -> int:
        return self.vocabulary.end

    @property
    def tokenizer_name(self) -> str:
        return self.vocabulary.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self.vocabulary.ids(string)

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """For each (text, context, continuation): log p(continuation | context) in nats, and whether it is greedy.

        Raises:
            DataError: a continuation is longer than the model's context.
        """
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1]) - len(requests[i][2]))
        for first in range(0, len(order), self.size):
            chosen = order[first : first + self.size]
            rows = [self._row(*requests[i][1:]) for i in chosen]
            longest = max(len(row) for row in rows) - 1
            tokens = torch.zeros(len(rows), longest, dtype=torch.long, device=self._device)
            for row, ids in zip(tokens, rows, strict=True):
                row[: len(ids) - 1] = torch.tensor(ids[:-1])
            logp = self._logp(tokens)
            for i, ids, row in zip(chosen, rows, logp, strict=True):
                target = torch.tensor(requests[i][2], device=self._device)
                last = row[len(ids) - 1 - len(target) : len(ids) - 1]
                greedy = bool((last[:, : self.vocabulary.num_ids].argmax(-1) == target).all())
                found[i] = float(last.gather(1, target[:, None]).sum()), greedy
                if requests[i][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], found[i])
        return found

    def _logp(self, tokens: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, self.dtype or torch.bfloat16, enabled=self.dtype is not None):
            return self.model(tokens).float().log_softmax(-1)

    def _row(self, context: list[int], continuation: list[int]) -> list[int]:
        if not context:
            context = [self.eot_token_id]
        if len(continuation) > self.model.longest:
            raise DataError(
                f"a continuation of {len(continuation)} {self.vocabulary.unit}s is longer than the model's context of "
                f"{self.model.longest}; choose another task in task.evaluation.tasks"
            )
        return (context + continuation)[-self.model.longest - 1 :]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log p of whole texts in nats.

        Windows are as long as the context; each token is predicted once, the first one after the end mark.
        """
        sums = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(self.tok_encode(text), self.eot_token_id, self.model.longest, 1)
            pairs = [(None, *make_disjoint_window(pair)) for pair in windows]
            sums.append(math.fsum(value for value, _ in self._loglikelihood_tokens(pairs)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), sums[-1])
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The continuation of each context, up to its first stop string."""
        found = []
        for context, settings in (request.args for request in requests):
            sampling = Sampling(
                tokens=min(settings.get("max_gen_toks", 256), self.model.longest - 1),
                temperature=settings.get("temperature", 1.0) if settings.get("do_sample") else 0.0,
                top_k=settings.get("top_k"),
                top_p=settings.get("top_p"),
            )
            until = settings.get("until") or []
            stops = [until] if isinstance(until, str) else list(until)
            ids = (self.tok_encode(context) or [self.eot_token_id])[-(self.model.longest - sampling.tokens) :]
            with torch.autocast(self._device.type, self.dtype or torch.bfloat16, enabled=self.dtype is not None):
                tokens = sampling(
                    self.model,
                    torch.tensor([ids], device=self._device),
                    num_ids=self.vocabulary.num_ids,
                    end=self.eot_token_id,
                    stop=self._contains(stops),
                    dtype=self.dtype,
                    compiled=self._compiled,
                )[0].tolist()
            text = self.vocabulary.text(
                tokens[: tokens.index(self.eot_token_id)] if self.eot_token_id in tokens else tokens
            )
            for stop in stops:
                text = text.split(stop)[0] if stop else text
            found.append(text)
            self.cache_hook.add_partial("generate_until", (context, settings), text)
        return found

    def _contains(self, stops: list[str]) -> Callable[[Tensor], bool]:
        """Whether the text of tokens (1, n) contains one of `stops`."""

        def contains(tokens: Tensor) -> bool:
            text = self.vocabulary.text(tokens[0].tolist())
            return any(stop and stop in text for stop in stops)

        return contains


@bounded
@dataclass(frozen=True)
class Evaluation(Harness):
    """Evaluates a trained run on tasks of lm-evaluation-harness."""

    def lm(self, module: LanguageModelling, dtype: torch.dtype | None) -> TrainedRun:
        return TrainedRun(module, self.batch_size, dtype)

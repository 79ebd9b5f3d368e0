"""Evaluating language models on tasks of lm-evaluation-harness.  Needs the extra `eval`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import chdir
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attnlab.torchvision_schemas  # noqa: F401  (before transformers)

import torch
from annotated_types import Ge, MinLen
from torch import Tensor

from attnlab.decoding import Sampling
from attnlab.errors import ConfigError, DataError
from attnlab.pretrained.hub import offline_if_unreachable
from attnlab.pretrained.weights import first_line
from attnlab.run.console import progress
from attnlab.run.device import autocast
from attnlab.tasks.language_modelling.continuations import log_likelihoods

try:
    from huggingface_hub.errors import OfflineModeIsEnabled as HFOfflineModeIsEnabled
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM, TemplateLM
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ConfigError(f"mode=evaluate needs lm-evaluation-harness: pip install 'attnlab[eval]' ({error})") from error

if TYPE_CHECKING:
    from attnlab.tasks.language_modelling.module import LanguageModelling

LIGHTEVAL = Path(__file__).parent / "lighteval"  # six tasks in the forms of SmolLM's tasks for lighteval
SEEDS = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")


@dataclass(frozen=True)
class Harness(ABC):
    """Evaluates a language model on tasks of lm-evaluation-harness.

    The harness downloads the data of its tasks.

    Args:
        num_fewshot: the number of solved examples before each question; a list: all tasks with each of these numbers.
        limit: the largest number of examples of a task, or of each part of a group of tasks; None: all.
        spread: whether `limit` takes examples evenly spread over a task; else its first ones, as the harness does.
            Tasks can be in an order: MMLU by subject, HellaSwag by source.
        mean: groups of tasks. The accuracy of a group is the mean of its tasks', and their mean is given too. It is
            acc_norm where a task has it, else acc. Its standard error takes the tasks as independent.
        folder: a directory with YAML files of tasks, in place of those of the harness; None: the harness's. Relative
            paths of data are below it. Tasks that it lacks may be those of `tasks/lighteval`, with data in it. Tasks
            can bring code, which is run (`!function`, templates of prompts), so only the command line may name it.
        batch_size: texts, each a question with one of its answers, that are scored together.

    Raises:
        ValueError: `folder` does not exist, `num_fewshot` has a number twice, or `mean` names another task.
    """

    tasks: Annotated[list[str], MinLen(1)]
    num_fewshot: Annotated[int, Ge(0)] | Annotated[list[Annotated[int, Ge(0)]], MinLen(1)] = 0
    limit: Annotated[int, Ge(1)] | None = None
    batch_size: Annotated[int, Ge(1)] = 16
    folder: str | None = None
    spread: bool = False
    mean: Annotated[list[Annotated[list[str], MinLen(1)]], MinLen(1)] | None = None

    def __post_init__(self) -> None:
        if self.folder is not None and not Path(self.folder).expanduser().is_dir():
            raise ValueError(f"folder={self.folder}: no such directory of task files")
        if len(set(self.shots)) < len(self.shots):
            raise ValueError(f"num_fewshot={self.shots}: expected each number once")
        averaged = [name for group in self.mean or () for name in group]
        if other := [name for name in averaged if name not in self.tasks or averaged.count(name) > 1]:
            raise ValueError(f"mean: expected names of tasks, {', '.join(self.tasks)}, each once; not {other[0]}")

    @property
    def shots(self) -> list[int]:
        """The numbers of solved examples, in order."""
        return [self.num_fewshot] if isinstance(self.num_fewshot, int) else list(self.num_fewshot)

    @abstractmethod
    def lm(self, module: Any, dtype: torch.dtype | None) -> LM:
        """The model as a class of the harness; `module` has the model and its vocabulary."""

    def __call__(
        self, module: Any, seed: int, dtype: torch.dtype | None = None
    ) -> dict[int, dict[str, dict[str, Any]]]:
        """Evaluate all tasks with each number of solved examples; `dtype` is that of autocast and caches.

        Returns:
            For each number of solved examples and each task its metrics with their standard errors, its version and its
            number of examples.

        Raises:
            ConfigError: a task is unknown.
            DataError: the model cannot score a text of the tasks, or their data is missing.
        """
        key = "task.evaluation.tasks"
        folder = None if self.folder is None else str(Path(self.folder).expanduser())
        manager = TaskManager(include_path=folder and [str(LIGHTEVAL), folder], include_defaults=folder is None)
        for name in self.tasks:
            if name not in manager.all_tasks:  # the harness would take the path of a file
                where = self.folder or "lm-evaluation-harness"
                other = "task.evaluation.folder= names a folder of others"
                raise ConfigError(f"{key}: {where} has no task {name}; {other}")
        with offline_if_unreachable() as offline:
            try:
                lm = self.lm(module, dtype)
                with chdir(folder or "."):  # paths of data in the files of tasks are relative to their folder
                    return {shots: self._scores(lm, manager, shots, seed) for shots in self.shots}
            except FileNotFoundError as error:
                raise DataError(
                    f"{key}={','.join(self.tasks)}: a file of their data is missing ({first_line(error)}); correct "
                    "dataset_path or data_files of the task's file"
                ) from error
            except (ConnectionError, HFOfflineModeIsEnabled) as error:
                if not offline:
                    raise
                raise DataError(
                    f"{key}={','.join(self.tasks)}: their data is not in the hub's cache, and the hub cannot be "
                    f"reached ({first_line(error)}); run it once with a network, or give task.evaluation.folder= with "
                    "tasks on local files"
                ) from error

    def _scores(self, lm: LM, manager: TaskManager, shots: int, seed: int) -> dict[str, dict[str, Any]]:
        arguments: dict[str, Any] = dict.fromkeys(SEEDS, seed) | {"num_fewshot": shots, "limit": self.limit}
        if self.spread and self.limit is not None:
            tasks, most = manager.load(list(self.tasks))["tasks"], self.limit
            samples = {name: spread(len(task.eval_docs), most) for name, task in tasks.items()}
            arguments |= {"limit": None, "samples": samples}
        results = simple_evaluate(lm, tasks=list(self.tasks), task_manager=manager, log_samples=False, **arguments)
        assert results is not None
        scores = {
            name: {key.removesuffix(",none"): value for key, value in metrics.items() if isinstance(value, int | float)}
            | {
                "version": results["versions"].get(name),
                "examples": results["n-samples"].get(name, {}).get("effective"),
            }
            for name, metrics in results["results"].items()
        }
        return scores if self.mean is None else scores | {"mean": mean_accuracy(scores, self.mean)}


def spread(size: int, most: int) -> list[int]:
    """Indices of at most `most` of `size` examples, evenly spread."""
    count = min(size, most)
    return [(2 * i + 1) * size // (2 * count) for i in range(count)]


def mean_accuracy(scores: dict[str, dict[str, Any]], groups: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Mean over groups of the mean accuracy of their tasks, its standard error, and the number of examples."""
    mean, variance = 0.0, 0.0
    for group in groups:
        for name in group:
            metric = "acc_norm" if "acc_norm" in scores[name] else "acc"
            if metric not in scores[name]:
                raise ConfigError(f"task.evaluation.mean: {name} has no accuracy, only {', '.join(scores[name])}")
            share = 1 / (len(groups) * len(group))
            mean += share * scores[name][metric]
            variance += (share * scores[name].get(f"{metric}_stderr", math.nan)) ** 2
    examples = [scores[name]["examples"] for group in groups for name in group]
    total = None if None in examples else sum(examples)  # the harness does not count those of a group of tasks
    return {"accuracy": mean, "accuracy_stderr": math.sqrt(variance), "examples": total}


class TrainedRun(TemplateLM):
    """Log-likelihoods and greedy or sampled continuations for lm-evaluation-harness.

    A pretrained model is given what its tokenizer gives, as by the harness's own class for models of transformers. A
    text longer than the model's context is cut at its beginning. `dtype` is that of autocast and caches.
    """

    def __init__(self, module: LanguageModelling, batch_size: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.module, self.model, self.vocabulary = module, module.model, module.vocabulary
        self.size, self.dtype = batch_size, dtype

    @property
    def eot_token_id(self) -> int:
        return self.vocabulary.end

    @property
    def prefix_token_id(self) -> int:
        return self.vocabulary.prefix

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        if add_special_tokens is None:  # a text that begins with that token gets no second one
            add_special_tokens = not string.startswith(self.vocabulary.beginning)
        return self.vocabulary.given(string, add_special_tokens)

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """For each (text, context, continuation): log p(continuation | context) in nats, and whether it is greedy."""
        results: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        texts, counts = [self._row(*ids) for _, *ids in requests], [len(ids) for *_, ids in requests]
        with autocast(self.module.device, self.dtype), progress("scoring continuations", len(requests)) as advance:
            for i, value, greedy in log_likelihoods(self.model, texts, counts, self.size, self.vocabulary.num_ids):
                results[i] = value, greedy
                if requests[i][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], results[i])
                advance(1)
        return results

    def _row(self, context: list[int], continuation: list[int]) -> list[int]:
        if not context:
            context = [self.prefix_token_id]
        if len(continuation) > self.model.longest:
            raise DataError(
                f"a continuation of {len(continuation)} {self.vocabulary.unit}s is longer than the model's context of "
                f"{self.model.longest}; choose another task in task.evaluation.tasks"
            )
        return (context + continuation)[-self.model.longest - 1 :]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log p of complete texts in nats.

        Windows are as long as the context; each token is predicted once, the first one after the end mark, or after the
        token that begins the texts of a pretrained model.
        """
        texts = [text for (text,) in (request.args for request in requests)]
        pairs, counts = [], list[int]()
        for text in texts:
            windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.model.longest, 1)
            pairs += [(None, *make_disjoint_window(pair)) for pair in windows]
            counts.append(len(pairs) - sum(counts))
        values = iter(self._loglikelihood_tokens(pairs))
        sums = [math.fsum(value for value, _ in islice(values, count)) for count in counts]
        for text, total in zip(texts, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The continuation of each context, up to its first stop string, or a token that ends a text."""
        self.vocabulary.warn_left_out()
        texts, ends = [], {self.eot_token_id, *self.vocabulary.stops}
        for context, asked in (request.args for request in requests):
            settings: Any = normalize_gen_kwargs(asked)
            sampling = Sampling(
                tokens=min(settings["max_gen_toks"], self.model.longest - 1),
                temperature=settings.get("temperature", 1.0) if settings["do_sample"] else 0.0,
                top_k=settings.get("top_k"),
                top_p=settings.get("top_p"),
            )
            stops = [stop for stop in settings["until"] if stop]
            ids = (self.tok_encode(context) or [self.prefix_token_id])[-(self.model.longest - sampling.tokens) :]

            def stopped(tokens: Tensor, stops: list[str] = stops) -> bool:
                text = self.vocabulary.continuation(tokens[0].tolist())
                return any(stop in text for stop in stops)

            with autocast(self.module.device, self.dtype):
                tokens = sampling(
                    self.model,
                    torch.tensor([ids], device=self.module.device),
                    num_ids=self.vocabulary.num_ids,
                    end=[*ends],
                    stop=stopped,
                    dtype=self.dtype,
                    compiled=self.module.compiled or None,
                )[0].tolist()
            text = self.vocabulary.continuation(list(takewhile(lambda id: id != self.eot_token_id, tokens)))
            for stop in stops:
                text = text.split(stop)[0]
            texts.append(text)
            self.cache_hook.add_partial("generate_until", (context, asked), text)
        return texts


@dataclass(frozen=True)
class Evaluation(Harness):
    """Evaluates a trained run on tasks of lm-evaluation-harness."""

    def lm(self, module: LanguageModelling, dtype: torch.dtype | None) -> TrainedRun:
        return TrainedRun(module, self.batch_size, dtype)


@dataclass(frozen=True)
class TransformersEvaluation(Harness):
    """Evaluates a decoder of transformers, dense or compressed, through the harness's class for it."""

    def lm(self, module: Any, dtype: torch.dtype | None) -> HFLM:
        """See :meth:`Harness.lm`; ConfigError: a masked language model gives no probability of a continuation."""
        model = module.model
        if not model.can_generate():
            raise ConfigError(f"lm-evaluation-harness scores decoders; {type(model).__name__} is not one")
        return HFLM(
            pretrained=model,
            tokenizer=module.tokenizer,
            batch_size=self.batch_size,
            mixed_precision_dtype=dtype,
            trust_remote_code=False,
        )

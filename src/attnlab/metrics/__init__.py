"""Metrics that score every item of a corpus exactly once, in corpus order, over all processes.

Each is a `torchmetrics.Metric` whose `compute()` returns named values for the record's `quality` section.  The first
value is the headline; `signature` says how it was computed.
"""

import inspect
from importlib import import_module
from pkgutil import iter_modules

import attnlab.torchvision_schemas  # noqa: F401  (before torchmetrics)

from attnlab.metrics.answers import Answers
from attnlab.metrics.base import TextMetric
from attnlab.metrics.bleu import BLEU
from attnlab.metrics.intent import IntentAccuracy
from attnlab.metrics.perplexity import Perplexity
from attnlab.metrics.predictions import Predictions
from attnlab.metrics.rouge import ROUGE
from attnlab.metrics.top import TopAccuracy
from attnlab.metrics.wer import WER

__all__ = [
    "BLEU",
    "ROUGE",
    "WER",
    "Answers",
    "IntentAccuracy",
    "Perplexity",
    "Predictions",
    "TopAccuracy",
    "text_metrics",
]


def text_metrics() -> dict[str, type[TextMetric]]:
    """The metrics of this folder that score texts, by their `name`: the values of `task.score`."""
    modules = [import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__)]
    classes = [metric for module in modules for _, metric in inspect.getmembers(module, inspect.isclass)]
    return {metric.name: metric for metric in classes if issubclass(metric, TextMetric) and "name" in vars(metric)}

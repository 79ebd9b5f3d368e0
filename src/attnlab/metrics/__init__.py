"""Metrics that score every item of a corpus exactly once, in corpus order, over all processes.

Each is a `torchmetrics.Metric` whose `compute()` returns named values for the record's `quality` section.  The first
value is the headline; `signature` says how it was computed.
"""

import inspect
from importlib import import_module
from pkgutil import iter_modules

from attnlab.metrics.base import TextMetric


def text_metrics() -> dict[str, type[TextMetric]]:
    """The metrics of this folder that score texts, by their `name`: the values of `task.score`."""
    modules = [import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__)]
    classes = [metric for module in modules for _, metric in inspect.getmembers(module, inspect.isclass)]
    return {metric.name: metric for metric in classes if issubclass(metric, TextMetric) and "name" in vars(metric)}

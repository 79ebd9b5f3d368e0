"""Metrics that score every item of a corpus exactly once, in corpus order, over all processes.

Each is a `torchmetrics.Metric` whose `compute()` returns named values for the record's `quality` section.  The first
value is the headline; `signature` says how it was computed.
"""

import attnlab.torchvision_schemas  # noqa: F401  (before torchmetrics)

from attnlab.metrics.bleu import BLEU
from attnlab.metrics.intent import IntentAccuracy
from attnlab.metrics.perplexity import Perplexity
from attnlab.metrics.predictions import Predictions
from attnlab.metrics.rouge import ROUGE
from attnlab.metrics.top import TopAccuracy
from attnlab.metrics.wer import WER

__all__ = ["BLEU", "ROUGE", "WER", "IntentAccuracy", "Perplexity", "Predictions", "TopAccuracy"]

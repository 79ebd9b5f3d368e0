"""Metrics that score every item of a corpus exactly once, in corpus order, over all processes.

Each is a `torchmetrics.Metric` whose `compute()` returns named values for the record's `quality` section.  The first
value is the headline; `signature` says how it was computed.
"""

"""Corpora, features, pieces, batches."""

import src.torchvision_schemas  # noqa: F401  (before lightning is imported)

from src.data.batch import Batch, Example, collate
from src.data.batching import FrameBatches
from src.data.features import FilterBank, SpecAugment
from src.data.speech_to_text import SpeechToTextData
from src.data.task_data import TaskData
from src.data.tokenizer import Tokenizer

__all__ = [
    "Batch",
    "Example",
    "FilterBank",
    "FrameBatches",
    "SpecAugment",
    "SpeechToTextData",
    "TaskData",
    "Tokenizer",
    "collate",
]

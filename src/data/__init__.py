"""Corpora, features, pieces, batches."""

import src.torchvision_schemas  # noqa: F401  (before lightning is imported)

from src.data.batch import Batch, Example, collate
from src.data.batching import FrameBatches
from src.data.corpora import BillionWords, FineWebEdu, PennTreebank, WikiText
from src.data.features import FilterBank, SpecAugment
from src.data.language_modelling import LanguageModellingData
from src.data.speech_to_text import SpeechToTextData
from src.data.task_data import TaskData
from src.data.tokenizer import Tokenizer
from src.data.vocabulary import BytePairs, Words

__all__ = [
    "Batch",
    "BillionWords",
    "BytePairs",
    "Example",
    "FilterBank",
    "FineWebEdu",
    "FrameBatches",
    "LanguageModellingData",
    "PennTreebank",
    "SpecAugment",
    "SpeechToTextData",
    "TaskData",
    "Tokenizer",
    "WikiText",
    "Words",
    "collate",
]

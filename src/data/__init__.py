"""Corpora, features, pieces, batches.  What Lightning trains on has modules of its own: it takes seconds to import."""

from src.data.ami import AMI, Kaldi
from src.data.an4 import AN4
from src.data.batch import Batch, Example, collate
from src.data.batching import FrameBatches
from src.data.corpora import BillionWords, FineWebEdu, PennTreebank, WikiText
from src.data.features import FilterBank, SpecAugment
from src.data.mustc import MustC
from src.data.parallel import Parallel
from src.data.source_text import SourceText
from src.data.spoken_language import SLURP, Picovoice
from src.data.stored import StoredFeatures
from src.data.summaries import SciTLDR, XSum
from src.data.tokenizer import Tokenizer
from src.data.vocabulary import BytePairs, Words

__all__ = [
    "AMI",
    "AN4",
    "Batch",
    "BillionWords",
    "BytePairs",
    "Example",
    "FilterBank",
    "FineWebEdu",
    "FrameBatches",
    "Kaldi",
    "MustC",
    "Parallel",
    "PennTreebank",
    "Picovoice",
    "SLURP",
    "SciTLDR",
    "SourceText",
    "SpecAugment",
    "StoredFeatures",
    "Tokenizer",
    "WikiText",
    "Words",
    "XSum",
    "collate",
]

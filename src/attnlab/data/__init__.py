"""Corpora, features, pieces.  No torch: a corpus is checked before it is loaded."""

from attnlab.data.speech.ami import AMI, Kaldi
from attnlab.data.speech.an4 import AN4
from attnlab.data.speech.features import FilterBank, SpecAugment
from attnlab.data.speech.mustc import MustC
from attnlab.data.speech.spoken_language import SLURP, Picovoice
from attnlab.data.speech.stored import StoredFeatures
from attnlab.data.table import Table
from attnlab.data.text.corpora import BillionWords, FineWebEdu, PennTreebank, TextFiles, WikiText, WikiTextRaw
from attnlab.data.text.pairs import Parallel, SciTLDR, XSum
from attnlab.data.text.tokenizer import SourceText, Tokenizer
from attnlab.data.text.vocabulary import BytePairs, PretrainedTokens, Words

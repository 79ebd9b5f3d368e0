"""Models: architecture only.  Initial values, precision and parallelism are the task's business."""

from .encoder import ConvSubsampler, SpeechEncoder
from .language_model import LanguageModel
from .prefix_decoder import PrefixDecoder, PrefixDecoderLayer
from .speech_to_text import SpeechToText
from .t6 import T6, T6Block

__all__ = [
    "ConvSubsampler",
    "LanguageModel",
    "PrefixDecoder",
    "PrefixDecoderLayer",
    "SpeechEncoder",
    "SpeechToText",
    "T6",
    "T6Block",
]

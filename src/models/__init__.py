"""Models: architecture only.  Initial values, precision and parallelism are the task's business."""

from .adaptive_softmax import AdaptiveSoftmax, TiedSoftmax
from .encoder import ConvSubsampler, SpeechEncoder
from .language_model import LanguageModel
from .prefix_decoder import PrefixDecoder, PrefixDecoderLayer
from .speech_to_text import SpeechToText
from .t6 import T6, T6Block
from .tensorized_transformer import PostNormBlock, TensorizedTransformer

__all__ = [
    "AdaptiveSoftmax",
    "PostNormBlock",
    "ConvSubsampler",
    "LanguageModel",
    "PrefixDecoder",
    "PrefixDecoderLayer",
    "SpeechEncoder",
    "SpeechToText",
    "TensorizedTransformer",
    "TiedSoftmax",
    "T6",
    "T6Block",
]

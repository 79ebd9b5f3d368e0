"""Models: architecture only.  Initial values, precision and parallelism are the task's business."""

from .adaptive_softmax import AdaptiveSoftmax, TiedSoftmax
from .conformer import ConformerEncoder
from .cross_decoder import CrossDecoder
from .encoder import ConvSubsampler, SpeechEncoder
from .language_model import LanguageModel
from .prefix_decoder import PrefixDecoder, PrefixDecoderLayer
from .speech_to_text import SpeechToText
from .t6 import T6, T6Block
from .tensorized_transformer import PostNormBlock, TensorizedTransformer
from .text_encoder import TextEncoder
from .text_to_text import EncoderDecoder, TextToText

__all__ = [
    "AdaptiveSoftmax",
    "ConformerEncoder",
    "ConvSubsampler",
    "CrossDecoder",
    "EncoderDecoder",
    "LanguageModel",
    "PostNormBlock",
    "PrefixDecoder",
    "PrefixDecoderLayer",
    "SpeechEncoder",
    "SpeechToText",
    "T6",
    "T6Block",
    "TensorizedTransformer",
    "TextEncoder",
    "TextToText",
    "TiedSoftmax",
]

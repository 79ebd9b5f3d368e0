"""Models: architecture only.  Initial values, precision and parallelism are the task's business."""

from .adaptive_softmax import AdaptiveSoftmax, TiedSoftmax
from .encoder import ConvSubsampler, SpeechEncoder
from .prefix_decoder import PrefixDecoder, PrefixDecoderLayer
from .speech_to_text import SpeechToText
from .tensorized_transformer import PostNormBlock, TensorizedTransformer

__all__ = [
    "AdaptiveSoftmax",
    "ConvSubsampler",
    "PostNormBlock",
    "PrefixDecoder",
    "PrefixDecoderLayer",
    "SpeechEncoder",
    "SpeechToText",
    "TensorizedTransformer",
    "TiedSoftmax",
]

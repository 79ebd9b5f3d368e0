"""Models: architecture only. Precision, parallelism and training are set up elsewhere."""

from attnlab.models.adaptive_softmax import AdaptiveSoftmax, TiedSoftmax
from attnlab.models.conformer import ConformerEncoder
from attnlab.models.cross_decoder import CrossDecoder
from attnlab.models.decoder import T6, Decoder, DecoderBlock, PostNormBlock
from attnlab.models.encoder import ConvSubsampler, LayerMix, SpeechEncoder
from attnlab.models.language_model import LanguageModel
from attnlab.models.prefix_decoder import PrefixDecoder, PrefixDecoderLayer
from attnlab.models.sequence import EncoderDecoder, SpeechToText, TextToText
from attnlab.models.tensorized_transformer import TensorizedTransformer
from attnlab.models.text_encoder import TextEncoder

__all__ = [
    "AdaptiveSoftmax",
    "ConformerEncoder",
    "ConvSubsampler",
    "CrossDecoder",
    "Decoder",
    "DecoderBlock",
    "EncoderDecoder",
    "LanguageModel",
    "LayerMix",
    "PostNormBlock",
    "PrefixDecoder",
    "PrefixDecoderLayer",
    "SpeechEncoder",
    "SpeechToText",
    "T6",
    "TensorizedTransformer",
    "TextEncoder",
    "TextToText",
    "TiedSoftmax",
]

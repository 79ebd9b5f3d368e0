"""Models: architecture only. Precision, parallelism and training are set up elsewhere."""

from attnlab.models.adaptive_softmax import AdaptiveSoftmax, TiedSoftmax
from attnlab.models.conformer import ConformerEncoder
from attnlab.models.cross_decoder import CrossDecoder
from attnlab.models.decoder import Decoder, DecoderBlock
from attnlab.models.encoder import ConvSubsampler, SpeechEncoder
from attnlab.models.language_model import LanguageModel
from attnlab.models.layer_mix import LayerMix
from attnlab.models.prefix_decoder import PrefixDecoder, PrefixDecoderLayer
from attnlab.models.speech_to_text import SpeechToText
from attnlab.models.t6 import T6, T6Block
from attnlab.models.tensorized_transformer import PostNormBlock, TensorizedTransformer
from attnlab.models.text_encoder import TextEncoder
from attnlab.models.text_to_text import EncoderDecoder, TextToText

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
    "T6Block",
    "TensorizedTransformer",
    "TextEncoder",
    "TextToText",
    "TiedSoftmax",
]

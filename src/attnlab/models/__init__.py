"""Models: architecture only. Precision, parallelism and training are set up elsewhere."""

from attnlab.models.conformer import ConformerEncoder
from attnlab.models.cross_decoder import CrossDecoder
from attnlab.models.decoder import T6, Decoder
from attnlab.models.encoder import SpeechEncoder
from attnlab.models.language_model import LanguageModel
from attnlab.models.prefix_decoder import PrefixDecoder
from attnlab.models.sequence import EncoderDecoder, SpeechToText, TextToText
from attnlab.models.tensorized_transformer import TensorizedTransformer
from attnlab.models.text_encoder import TextEncoder

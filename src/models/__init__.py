"""Models: architecture only.  Initial values, precision and parallelism are the task's business."""

from .encoder import ConvSubsampler, SpeechEncoder
from .prefix_decoder import PrefixDecoder, PrefixDecoderLayer
from .speech_to_text import SpeechToText

__all__ = ["ConvSubsampler", "PrefixDecoder", "PrefixDecoderLayer", "SpeechEncoder", "SpeechToText"]

"""Sample corpora: generators that write the layouts of real corpora."""

from src.data.samples.speech_translation import write_speech_translation

__all__ = ["write_speech_translation"]

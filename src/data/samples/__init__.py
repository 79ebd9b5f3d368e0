"""Sample corpora: generators that write the layouts of real corpora."""

from src.data.samples.articles import write_articles
from src.data.samples.commands import write_commands
from src.data.samples.meetings import write_meetings
from src.data.samples.speech_translation import write_speech_translation
from src.data.samples.translations import write_translations

__all__ = ["write_articles", "write_commands", "write_meetings", "write_speech_translation", "write_translations"]

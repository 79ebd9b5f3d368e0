"""Sample corpora: generators that write the layouts of real corpora."""

from attnlab.data.samples.articles import write_articles
from attnlab.data.samples.commands import write_commands
from attnlab.data.samples.meetings import write_meetings
from attnlab.data.samples.speech_translation import write_speech_translation
from attnlab.data.samples.translations import write_translations

__all__ = ["write_articles", "write_commands", "write_meetings", "write_speech_translation", "write_translations"]

"""mode=convert: load a pretrained decoder, score, convert, score and save it; nothing is trained."""

from attnlab.modes.compress import run

__all__ = ["run"]
READS_CORPUS = True  # the files of data_root are checked before a library is loaded

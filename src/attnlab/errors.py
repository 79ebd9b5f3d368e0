"""Errors that the user can correct: they are shown as one line, without a traceback."""

import difflib
import errno
import re
from collections.abc import Iterable

CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")  # with marks that reorder text


def printable(text: str, keep: str = "") -> str:
    """A text for a terminal, which may come from a file or be the name of one.

    Control characters, line breaks and half surrogates are escaped, as in a string of Python.

    Args:
        text: any.
        keep: characters that stay.
    """
    return CONTROL.sub(lambda one: one[0] if one[0] in keep else one[0].encode("unicode_escape").decode(), text)


class AttnlabError(Exception):
    """Base of the errors that are shown as one line.

    Attributes:
        exit_code: the exit code of the process.
    """

    exit_code = 1


class ConfigError(AttnlabError):
    """The command line or a configuration file is wrong; nothing was read or built."""

    exit_code = 2


class DataError(AttnlabError):
    """A corpus, checkpoint or other input file is missing, broken or does not fit."""


class WriteError(DataError, OSError):
    """A file or folder cannot be written. It has the `errno`, `strerror` and `filename` of an OSError."""

    def __str__(self) -> str:
        full = "; disk full" if self.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        return f"{self.filename}: cannot be written ({self.strerror}){full}"


class TrainingError(AttnlabError):
    """Training cannot continue: the loss or a gradient is not finite."""


class LockedError(AttnlabError):
    """Another process works in the run directory."""


def nearest(word: str, names: Iterable[str]) -> str:
    """The end of an error line: the close names, and the others where all are few; empty if there are none."""
    names = sorted(names)
    close = matches(word, names)
    others = [name for name in names if name not in close] if len(names) <= 12 else []
    hint = f"; nearest: {', '.join(close)}" if close else ""
    return f"{hint}; {'others' if close else 'there are'}: {', '.join(others)}" if others else hint


def matches(word: str, names: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """At most three names, the closest first, or those in the folder `word`; capitals do not matter.

    Args:
        cutoff: likeness from 0 to 1 that a name needs, as difflib measures it.
    """
    by_lower = {name.lower(): name for name in names}
    inside = [name for name in by_lower if name.startswith(f"{word.lower()}/")]
    return [by_lower[name] for name in inside or difflib.get_close_matches(word.lower(), by_lower, 3, cutoff)]

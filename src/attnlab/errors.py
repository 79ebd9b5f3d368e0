"""Errors that the user can correct: they are shown as one line, without a traceback."""

import errno


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

"""Errors that are the user's to mend: one clear line, no traceback."""


class AttnlabError(Exception):
    """Base of the errors that are shown as one line. `exit_code` is what the process ends with."""

    exit_code = 1


class ConfigError(AttnlabError):
    """The command line or a configuration file is wrong; nothing was read or built."""

    exit_code = 2


class DataError(AttnlabError):
    """A corpus, checkpoint or other input file is missing, broken or does not fit."""


class TrainingError(AttnlabError):
    """Training cannot go on: the loss or a gradient is not finite."""

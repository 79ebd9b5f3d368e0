"""Where log lines go on a terminal."""

import logging
import sys
from typing import Any, TextIO


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stderr` is at the moment: a progress bar puts its own stream there, and keeps lines apart."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:  # type: ignore[override]
        return sys.stderr

    def setStream(self, stream: TextIO) -> None:
        raise TypeError("this handler writes to sys.stderr")

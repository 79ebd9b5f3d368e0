"""`attnlab report`: the runs in a folder as one HTML page."""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from attnlab.errors import ConfigError, printable
from attnlab.report.page.gather import gather
from attnlab.run.console import StderrHandler
from attnlab.run.files import write_text
from attnlab.run.ledger import OUTPUTS

PAGE = Path("report.html")


class Parser(argparse.ArgumentParser):
    """A parser whose errors are those of the command line, in one line."""

    def error(self, message: str) -> NoReturn:
        """Raise the error. Others are those of `ArgumentParser`.

        Args:
            message: what is wrong.
        """
        raise ConfigError(f"report: {message}; see attnlab report --help")


def main(arguments: Sequence[str]) -> int:
    """Write the page that the words after `attnlab report` describe.

    Args:
        arguments: of the command line.

    Returns:
        The exit code: 0.

    Raises:
        ConfigError: the words are wrong, or the packages that make the page are missing.
        DataError: a folder does not exist, or the page cannot be written.
    """
    logging.basicConfig(level=logging.WARNING, format="warning: %(message)s", handlers=[StderrHandler()])
    parser = Parser("attnlab report", description="The runs in a folder as one HTML page, which needs no network.")
    parser.add_argument(
        "places", nargs="*", type=Path, metavar="FOLDER", help="folders with runs, or records (default: outputs)"
    )
    parser.add_argument("-o", "--out", type=Path, default=PAGE, metavar="FILE", help="the page (default: report.html)")
    options = parser.parse_args(arguments)
    try:
        from attnlab.report.page.render import render
    except ModuleNotFoundError as error:
        raise ConfigError(f"attnlab report needs Bokeh and itables: pip install 'attnlab[report]' ({error})") from error
    if options.out.is_dir():
        raise ConfigError(f"report: -o {options.out} is a folder; give a file, such as {options.out / PAGE}")
    places = options.places or [OUTPUTS]
    runs = gather(places)
    if not runs:
        print(f"no runs in {', '.join(map(str, places))}: the page says so", file=sys.stderr)
    write_text(options.out, render(runs, places))
    print(printable(str(options.out)))
    return 0

"""`attnlab report`: tables, figures and a page of runs from their records."""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from attnlab.errors import ConfigError, DataError, printable
from attnlab.report import runs
from attnlab.run.console import StderrHandler
from attnlab.run.files import write_text
from attnlab.run.ledger import OUTPUTS
from attnlab.run.store import collect

PAGE = Path("report.html")
HELP = {
    "page": "the runs in a folder as one HTML page, which needs no network (also without the word page)",
    "table": "tables of papers from their specifications; of a folder (experiments) all of them, and its benchmarks",
    "figure": "the same for figures",
    "bench": "records of mode=bench: a table, and ratios over the text length as a plot",
    "speed": "records of mode=bench: SPEED.md, with a line for each ratio",
    "compressed": "records of compressed or converted models: a table and plots",
    "needle": "records with a needle in a haystack: a table and heat maps",
    "runs": "list, compare and remove runs (also: attnlab runs)",
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are those of the command line, in one line."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError."""
        raise ConfigError(f"report: {message}; see attnlab report --help")


def parser() -> Parser:
    """The parser of the words after `attnlab report`."""
    commands = Parser("attnlab report", description="Tables, figures and a page of runs, from their records.")
    kinds = commands.add_subparsers(dest="kind", required=True, metavar="KIND")
    parsers = {name: kinds.add_parser(name, help=text, description=text) for name, text in HELP.items()}
    page = parsers["page"]
    page.add_argument("places", nargs="*", type=Path, metavar="FOLDER", help="folders or records (default: outputs)")
    page.add_argument("-o", "--out", type=Path, default=PAGE, metavar="FILE", help="the page (default: report.html)")
    for name in ("table", "figure"):
        parsers[name].add_argument(
            "specs", nargs="+", type=Path, metavar="SPEC", help="a specification, rendered beside it; or a folder"
        )
        text = "folders or files of records (default: the specification's folder, and runs in outputs on its corpus)"
        parsers[name].add_argument("--records", nargs="+", type=Path, metavar="PLACE", help=text)
    for name in ("bench", "speed", "compressed", "needle"):
        parsers[name].add_argument("places", nargs="+", type=Path, metavar="PLACE", help="folders or files of records")
        text = "where to write (default: beside the first record)"
        parsers[name].add_argument("--out", type=Path, metavar="FOLDER", help=text)
    return commands


def main(arguments: Sequence[str]) -> int:
    """Write the reports that the words after `attnlab report` name, and print the paths of their files.

    Returns:
        The exit code: 0.

    Raises:
        ConfigError: the words or a specification are wrong, or the packages that make the page are missing.
        DataError: a record or a folder cannot be used.
    """
    words = list(arguments)
    if words[:1] == ["runs"]:
        return runs.main(words[1:])
    if not words or words[0] not in {*HELP, "-h", "--help"}:
        words.insert(0, "page")
    logging.basicConfig(level=logging.WARNING, format="warning: %(message)s", handlers=[StderrHandler()])
    options = parser().parse_args(words)
    if options.kind == "page":
        paths = _page(options.places or [OUTPUTS], options.out)
    elif options.kind in ("table", "figure"):
        paths = _specified(options.kind, options.specs, options.records)
    else:
        paths = _of_records(options.kind, options.places, options.out)
    for path in paths:
        print(printable(str(path)))
    return 0


def _page(places: Sequence[Path], out: Path) -> list[Path]:
    try:
        from attnlab.report.page.gather import gather
        from attnlab.report.page.render import render
    except ModuleNotFoundError as error:
        raise ConfigError(f"attnlab report needs Bokeh and itables: pip install 'attnlab[report]' ({error})") from error
    if out.is_dir():
        raise ConfigError(f"report: -o {out} is a folder; give a file, such as {out / PAGE}")
    gathered = gather(places)
    if not gathered:
        print(f"no runs in {', '.join(map(str, places))}: the page says so", file=sys.stderr)
    write_text(out, render(gathered, places))
    return [out]


def _specified(kind: str, specs: Sequence[Path], places: Sequence[Path] | None) -> list[Path]:
    """Render specifications beside their files, and folders of them from the records committed there.

    Without `places` a specification is rendered from the records of its folder, and of outputs/ from those that read
    the corpus of the table: runs of a sample corpus do not change a committed file.
    """
    from attnlab.report import everything
    from attnlab.report.match import is_of
    from attnlab.report.render import write_table
    from attnlab.report.spec import read_spec

    folders = [path for path in specs if path.is_dir()]
    if folders and places:
        raise ConfigError(f"report {kind}: --records belongs to a specification; {folders[0]} is a folder")
    read = {path: read_spec(path) for path in specs if path not in folders}  # all are read before any is rendered
    paths = [file for path in folders for file in (everything.tables if kind == "table" else everything.figures)(path)]
    for path, spec in read.items():
        records = collect(places or [path.parent, *[OUTPUTS] * OUTPUTS.exists()])
        if not places:
            records = [saved for saved in records if not saved.path.is_relative_to(OUTPUTS) or is_of(saved, spec)]
        paths += write_table(spec, records, path.with_suffix(""))
    return paths


def _of_records(kind: str, places: Sequence[Path], out: Path | None) -> list[Path]:
    from attnlab.report import bench, compression, conversion, needle, reasoning, speed

    records = collect(places)
    if not records:
        raise DataError("no readable record among these records")
    report = {"bench": bench, "speed": speed, "needle": needle, "compressed": compression}[kind]
    if kind == "compressed":
        done = [saved for saved in records if saved.record["status"] == "finished"]
        report = next((module for module in (reasoning, conversion) if done and all(map(module.is_one, done))), report)
    paths: list[Path] = report.render(records, out or records[0].path.parent)
    return paths

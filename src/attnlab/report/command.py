"""`attnlab report`: tables, figures and a page of runs from their records."""

import argparse
import json
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

from attnlab.errors import ConfigError, DataError, printable
from attnlab.report import bench, claims, decoders, figure, needle, runs
from attnlab.report.match import is_of
from attnlab.report.render import write_table
from attnlab.report.spec import read_spec
from attnlab.report.table import finished
from attnlab.run.console import StderrHandler
from attnlab.run.files import write_text
from attnlab.run.record import RECORD, UNREADABLE
from attnlab.run.store import OUTPUTS, PACKED, SavedRecord, collect


def pack(records: Sequence[SavedRecord], directory: Path) -> list[Path]:
    """Add finished records with their curves to the file records.jsonl of an experiment, sorted by their paths.

    Learning rates are left out: the recipe has them. A record that is not below its folder gets the path
    RUN/record.json or NAME.json there. DataError: the folder is that of a run, or the file has a line that cannot be
    read, or another record of this path.
    """
    if (directory / RECORD).exists():
        raise DataError(f"{directory}: the folder of one run; name that of the experiment with --out")
    path = directory / PACKED
    old = collect([path]) if path.exists() else []
    if path.exists() and len(old) < len(path.read_bytes().splitlines()):
        raise DataError(f"{path}: a line cannot be read, and would be lost; repair or remove it")
    lines: dict[str, str] = {}
    for saved in [*old, *finished(records, lambda _: True, "to pack")]:
        place, root = saved.path.resolve(), directory.resolve()
        short = Path(*place.parts[-2 if place.name == RECORD else -1 :])
        file = (place.relative_to(root) if place.is_relative_to(root) else short).as_posix()
        curves = {name: curve for name, curve in figure.read_curves(saved).items() if not name.startswith("lr-")}
        record = {"file": file, **saved.record, **({"curves": curves} if curves else {})}
        line = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
        if lines.setdefault(file, line) != line:
            raise DataError(f"{saved.name}: {path} has another record {file}; rename the run directory")
    write_text(path, "".join(lines[file] + "\n" for file in sorted(lines)))
    return [path]


Report = Callable[[Sequence[SavedRecord], Path], list[Path]]
REPORTS: dict[str, Report] = {
    "bench": bench.render,
    "speed": bench.render_speeds,
    "compressed": decoders.render,
    "needle": needle.render,
    "records": pack,
}
HELP = {
    "page": "the runs in a folder as one HTML page, which needs no network (also without the word page)",
    "table": "tables of papers from their specifications; of a folder (experiments) all of them, and its benchmarks",
    "figure": "the same for figures",
    "bench": "records of mode=bench: a table, and ratios over the text length as a plot",
    "speed": "records of mode=bench: SPEED.md, with a line for each ratio",
    "compressed": "records of compressed or converted models: a table and plots",
    "needle": "records with a needle in a haystack: a table and heat maps",
    "records": "finished runs, with their curves, as lines of records.jsonl, which one commits beside a table",
    "runs": "list, compare and remove runs (also: attnlab runs)",
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors have one line, as all errors of the command line."""

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
    text, default = "the page (default: report.html)", Path("report.html")
    page.add_argument("-o", "--out", type=Path, default=default, metavar="FILE", help=text)
    for name in ("table", "figure"):
        text = "a specification, rendered beside it; or a folder"
        parsers[name].add_argument("specs", nargs="+", type=Path, metavar="SPEC", help=text)
        text = "folders or files of records (default: the specification's folder, and runs in outputs on its corpus)"
        parsers[name].add_argument("--records", nargs="+", type=Path, metavar="PLACE", help=text)
    for name in REPORTS:
        parsers[name].add_argument("places", nargs="+", type=Path, metavar="PLACE", help="folders or files of records")
        parsers[name].add_argument("--out", type=Path, metavar="FOLDER", help="default: beside the first record")
    return commands


def main(arguments: Sequence[str]) -> int:
    """Write the reports that the words after `attnlab report` name, print their paths and return the exit code, 0.

    ConfigError for wrong words, a wrong specification or missing packages; DataError for a record or a folder.
    """
    words = list(arguments)
    if words[:1] == ["runs"]:
        return runs.main(words[1:])
    if not words or words[0] not in {*HELP, "-h", "--help"}:
        words.insert(0, "page")
    logging.basicConfig(level=logging.WARNING, format="warning: %(message)s", handlers=[StderrHandler()])
    options = parser().parse_args(words)
    if options.kind == "page":
        try:
            from attnlab.report.page.render import gather, render
        except ModuleNotFoundError as error:
            extra = "pip install 'attnlab[report]'"
            raise ConfigError(f"attnlab report needs Bokeh and itables: {extra} ({error})") from error
        places, paths = options.places or [OUTPUTS], [options.out]
        write_text(options.out, render(gather(places), places))
    elif options.kind in ("table", "figure"):
        paths = _specified(options.kind, options.specs, options.records)
    else:
        paths = _of_records(options.kind, options.places, options.out)
    for path in paths:
        print(printable(str(path)))
    return 0


def _specified(kind: str, specs: Sequence[Path], places: Sequence[Path] | None) -> list[Path]:
    """Render specifications beside their files, and folders of specifications from the records committed there.

    Without `places` a specification is rendered from the records of its folder and from those in outputs/ that read
    the table's corpus, so that runs of a sample corpus change no committed file.
    """
    folders = [path for path in specs if path.is_dir()]
    if folders and places:
        raise ConfigError(f"report {kind}: --records belongs to a specification; {folders[0]} is a folder")
    pages = [path for path in specs if path.name == claims.FILE]
    read = {path: read_spec(path) for path in specs if path not in [*folders, *pages]}  # before anything is rendered
    paths = [path for folder in folders for path in everything(folder, kind)]
    paths += [page for path in pages for page in claims.render(path)]
    for path, spec in read.items():
        records = collect(places or [path.parent, *[OUTPUTS] * OUTPUTS.exists()])
        if not places:
            records = [saved for saved in records if not saved.path.is_relative_to(OUTPUTS) or is_of(saved, spec)]
        paths += write_table(spec, records, path.with_suffix(""))
    return paths


def _of_records(kind: str, places: Sequence[Path], out: Path | None) -> list[Path]:
    records = collect(places)
    if not records:
        raise DataError("no readable record among these records")
    return made(REPORTS[kind], records, out or records[0].path.parent)


def made(report: Report, records: Sequence[SavedRecord], directory: Path) -> list[Path]:
    """Write a report. DataError names damaged records: those whose report alone fails."""
    try:
        return report(records, directory)
    except UNREADABLE as error:
        files = []
        with TemporaryDirectory() as folder:
            for saved in records:
                try:
                    report([saved], Path(folder))
                except DataError:  # it leaves the record out
                    continue
                except UNREADABLE:
                    files.append(saved.name)
        message = f"{type(error).__name__}: {error}"
        raise DataError(f"{', '.join(files) or 'these records'}: damaged, not reported: {message}") from error


def everything(root: Path, kind: str) -> list[Path]:
    """Render every table with its plots and SPEED.md, or every figure, from the records committed in a folder.

    `root` has a folder for each paper; if it is relative, so are the names of records. ConfigError for a wrong
    specification, DataError without one.
    """
    records = collect([root])
    chosen = [path for path in specifications(root) if path.stem.startswith("figure") == (kind == "figure")]
    if not chosen:
        raise DataError(f"{root}: no specification (*/*.yaml); give the folder experiments of a checkout")
    paths = []
    for path, spec in [(path, read_spec(path)) for path in chosen]:  # all are read before one is rendered
        paths += write_table(spec, below(path.parent, records), path.with_suffix(""))
    if kind == "figure":
        return paths
    for folder, report in folders(root):
        paths += made(report, below(folder, records), folder)
    paths += claims.render(root / claims.FILE) if (root / claims.FILE).exists() else []
    return paths + made(bench.render_speeds, records, root)


def specifications(root: Path) -> list[Path]:
    """The specifications of tables and figures in a folder such as experiments/."""
    return sorted(root.glob("*/*.yaml"))


def below(folder: Path, records: Sequence[SavedRecord]) -> list[SavedRecord]:
    """The records in a folder and below it; the folder is relative if their paths are."""
    return [saved for saved in records if saved.path.is_relative_to(folder)]


def folders(root: Path) -> list[tuple[Path, Report]]:
    """Folders with a report of their own, and its function. Decoders, without committed records, have a runs.csv."""
    kinds: dict[str, Report] = {
        "bench/bench.csv": bench.render,
        "*/top1.csv": decoders.render,
        "needle/needle.csv": needle.render,
    }
    reports = [(path.parent, kind) for pattern, kind in kinds.items() for path in sorted(root.glob(f"*/{pattern}"))]
    again = sorted(root.glob("*/*/runs.csv"))
    return reports + [(path.parent, partial(decoders.render_again, path)) for path in again]

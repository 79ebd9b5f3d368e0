"""Tables and plots from records.

python -m attnlab.report experiments/mtla/table1.yaml [--records outputs]
python -m attnlab.report --everything experiments
python -m attnlab.report --figures experiments
python -m attnlab.report --bench RUN/record.json ... [--out FOLDER]
python -m attnlab.report --speed experiments --out experiments
python -m attnlab.report --compressed RUN ... [--out FOLDER]
python -m attnlab.report --needle RUN ... [--out FOLDER]
python -m attnlab.report --runs outputs
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from attnlab.callbacks.summary import label
from attnlab.config.compose import one_line
from attnlab.errors import AttnlabError, DataError, printable
from attnlab.run.console import Screen, StderrHandler
from attnlab.run.record import NOT_RUN
from attnlab.run.store import SavedRecord, collect

OUTPUTS = Path("outputs")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the tables and plots that the command line names.

    Args:
        arguments: of the command line; None: those of this process.

    Returns:
        The exit code: 0, 1 for records that cannot be used, 2 for a wrong command or specification.
    """
    parser = argparse.ArgumentParser("python -m attnlab.report", description="Tables and plots from records.")
    parser.add_argument(
        "specs", nargs="*", type=Path, metavar="SPEC", help="table specifications: rendered beside them"
    )
    parser.add_argument(
        "--records",
        nargs="+",
        type=Path,
        metavar="PLACE",
        help="folders or files (default: the specification's folder, and outputs)",
    )
    parser.add_argument(
        "--everything", type=Path, metavar="EXPERIMENTS", help="every table again, from the records committed there"
    )
    parser.add_argument("--figures", type=Path, metavar="EXPERIMENTS", help="the same for every figure")
    parser.add_argument("--bench", nargs="+", type=Path, metavar="PLACE", help="records of mode=bench: table and plot")
    parser.add_argument(
        "--speed", nargs="+", type=Path, metavar="PLACE", help="records of mode=bench: SPEED.md, a line for each ratio"
    )
    parser.add_argument(
        "--compressed",
        nargs="+",
        type=Path,
        metavar="PLACE",
        help="records of compressed or converted models: table and plots",
    )
    parser.add_argument(
        "--needle", nargs="+", type=Path, metavar="PLACE", help="records with a needle in a haystack: table, heat maps"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="--bench, --speed, --compressed, --needle: where to write (default: beside the first record)",
    )
    parser.add_argument("--runs", nargs="+", type=Path, metavar="PLACE", help="a line for each record")
    options = parser.parse_args(arguments)
    folders = options.bench, options.speed, options.compressed, options.needle
    if sum(map(bool, (options.specs, *folders, options.runs, options.everything, options.figures))) != 1:
        parser.error("give one of: SPEC ..., --everything, --figures, --bench, --speed, --compressed, --needle, --runs")
    if options.records and not options.specs or options.out and not any(folders):
        parser.error("--records belongs to SPEC, --out to --bench, --speed, --compressed and --needle")
    logging.basicConfig(level=logging.WARNING, format="warning: %(message)s", handlers=[StderrHandler()])
    try:
        if options.runs:
            overview(collect(options.runs))
        for path in written(options):
            print(printable(str(path)))
    except AttnlabError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return error.exit_code
    return 0


def tables(specs: Sequence[Path], places: Sequence[Path] | None) -> list[Path]:
    """Render specifications beside their files.

    Args:
        specs: table specifications, YAML.
        places: folders or files with records; None: the folder of each specification, and of outputs/, if it exists,
            what read the corpus of the table: runs of a sample corpus do not change a committed file.

    Returns:
        The paths of the files written.

    Raises:
        ConfigError: a specification is wrong.
        DataError: a record cannot be used.
    """
    from attnlab.report.match import is_of
    from attnlab.report.render import write_table
    from attnlab.report.spec import read_spec

    plans = {path: read_spec(path) for path in specs}
    files = []
    for path, spec in plans.items():
        found = collect(places or [path.parent, *([OUTPUTS] if OUTPUTS.exists() else [])])
        if not places:
            found = [one for one in found if not one.path.is_relative_to(OUTPUTS) or is_of(one, spec)]
        files += write_table(spec, found, path.with_suffix(""))
    return files


def written(options: argparse.Namespace) -> list[Path]:
    """Write the chosen report; the paths of its files.

    Args:
        options: the parsed command line.
    """
    if options.specs:
        return tables(options.specs, options.records)
    from attnlab.report import bench, compression, conversion, everything, needle, reasoning, speed

    if options.everything:
        return everything.tables(options.everything)
    if options.figures:
        return everything.figures(options.figures)
    reports = (
        (options.bench, bench),
        (options.speed, speed),
        (options.compressed, compression),
        (options.needle, needle),
    )
    for places, report in reports:
        if places:
            records = collect(places)
            if not records:
                raise DataError("no readable record among those given")
            if places is options.compressed:
                done = [one for one in records if one.record["status"] == "finished"]
                kinds = [kind for kind in (reasoning, conversion) if done and all(map(kind.is_one, done))]
                report, records = (kinds[0], done) if kinds else (report, records)
            return report.render(records, options.out or records[0].path.parent)
    return []


def overview(records: Sequence[SavedRecord]) -> None:
    """Print a line for each record, the oldest first.

    Args:
        records: as :func:`attnlab.run.store.collect` gives them.
    """
    console = Screen(width=None if sys.stdout.isatty() else 200, highlight=False, markup=False)
    headings = "status mode task mechanism scale corpus quality parameters cache tokens/s record"
    table = Table(*headings.split(), box=None, pad_edge=False)
    for found in records:
        record = found.record
        quality = next(
            (f"{label(k)} {v}" for k, v in record["quality"].items() if found.number(f"quality.{k}") is not None), ""
        )
        cells = [record["status"], record["mode"], record["task"], found.mechanism, record["scale"]]
        cells += [record["corpus"].split(" at ")[0], quality]
        for key, form in (
            ("parameters.total", ",.0f"),
            ("kv_cache.elements_per_token_per_layer", "g"),
            ("inference.tokens_per_second", ".1f"),
        ):
            value = found.number(key)
            cells.append(NOT_RUN if value is None else format(value, form))
        table.add_row(*cells, found.path.parent.as_posix())
    if records:
        console.print(table)


if __name__ == "__main__":
    sys.exit(main())

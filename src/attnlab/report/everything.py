"""Every table and figure under experiments/ again, from the records that are committed there and nothing else."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from attnlab.errors import DataError
from attnlab.report import bench, compression, conversion, needle, reasoning, speed
from attnlab.report.render import write_table
from attnlab.report.spec import read_spec
from attnlab.run.store import SavedRecord, collect

Report = Callable[[Sequence[SavedRecord], Path], list[Path]]
FIGURE = "figure"  # how the names of the specifications of figures begin


def specifications(root: Path) -> list[Path]:
    """The specifications of tables and figures.

    Args:
        root: experiments/, with a folder for each paper.
    """
    return sorted(root.glob("*/*.yaml"))


def folders(root: Path) -> list[tuple[Path, Report]]:
    """Folders of records that have a report of their own, with its function.

    Of a folder with runs.csv no record is committed: it is reported from that file, which has a line for each run.

    Args:
        root: experiments/.
    """
    found: list[tuple[Path, Report]] = [(path.parent, bench.render) for path in sorted(root.glob("*/bench/bench.csv"))]
    found += [(path.parent, compression.render) for path in sorted(root.glob("*/*/sweep.csv"))]
    found += [(path.parent, needle.render) for path in sorted(root.glob(f"*/{needle.FOLDER}/{needle.STEM}.csv"))]
    found = [(folder, report) for folder, report in found if not (folder / "runs.csv").is_file()]
    for name, report in (("conversions.csv", conversion), ("accuracy.csv", reasoning)):
        found += [(path.parent, _from_lines(report, path.parent)) for path in sorted(root.glob(f"*/*/{name}"))]
    return found


def _from_lines(report: ModuleType, folder: Path) -> Report:
    return lambda _, directory: report.write(report.read_runs(folder / "runs.csv"), directory)


def below(folder: Path, records: Sequence[SavedRecord]) -> list[SavedRecord]:
    """The records in a folder and those below it.

    Args:
        folder: relative as the records' paths are.
        records: of any place.
    """
    return [found for found in records if found.path.is_relative_to(folder)]


def tables(root: Path) -> list[Path]:
    """Write every table again, with the plots that belong to tables, and SPEED.md.

    Args:
        root: experiments/; a relative path keeps the names of records in the tables short.

    Returns:
        The paths of the files.

    Raises:
        ConfigError: a specification is wrong.
        DataError: there is no such folder, or no specification in it.
    """
    records = collect([root])
    written = _specified(root, records, figures=False)
    for folder, report in folders(root):
        written += report(below(folder, records), folder)
    return written + speed.render(records, root)


def figures(root: Path) -> list[Path]:
    """Write the files of every specification of a figure again, and the heat maps of needles in a haystack.

    Args:
        root: as for :func:`tables`.

    Returns:
        The paths of the files.

    Raises:
        ConfigError: a specification is wrong.
        DataError: there is no such folder, or no specification in it.
    """
    records = collect([root])
    written = _specified(root, records, figures=True)
    for folder in sorted(root.glob(f"*/{needle.FOLDER}")):
        if mine := [found for found in below(folder, records) if needle.is_one(found)]:
            written += needle.render(mine, folder)
    return written


def _specified(root: Path, records: Sequence[SavedRecord], figures: bool) -> list[Path]:
    paths = [path for path in specifications(root) if path.stem.startswith(FIGURE) == figures]
    if not paths:
        raise DataError(f"{root}: no specification (*/*.yaml); give the folder experiments of a checkout")
    specs = {path: read_spec(path) for path in paths}
    written: list[Path] = []
    for path, spec in specs.items():
        written += write_table(spec, below(path.parent, records), path.with_suffix(""))
    return written

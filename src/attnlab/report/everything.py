"""Every table and figure under experiments/ again, from the records that are committed there and nothing else."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from attnlab.errors import DataError
from attnlab.report import bench, compression, conversion, needle, reasoning, speed
from attnlab.report.render import write_table
from attnlab.report.spec import read_spec
from attnlab.run.store import SavedRecord, collect

Report = Callable[[Sequence[SavedRecord], Path], list[Path]]
FIGURE = "figure"  # how the names of the specifications of figures begin


def specifications(root: Path) -> list[Path]:
    """The specifications of tables and figures in experiments/, which has a folder for each paper."""
    return sorted(root.glob("*/*.yaml"))


def folders(root: Path) -> list[tuple[Path, Report]]:
    """Folders of records that have a report of their own, with its function.

    Of a folder with runs.csv no record is committed: it is reported from that file, which has a line for each run.
    """
    kinds = (("*/bench/bench.csv", bench), ("*/*/sweep.csv", compression), ("*/needle/needle.csv", needle))
    reports: list[tuple[Path, Report]] = [
        (path.parent, kind.render)
        for pattern, kind in kinds
        for path in sorted(root.glob(pattern))
        if not path.with_name("runs.csv").is_file()
    ]
    for name, again in (("conversions.csv", conversion.render_again), ("accuracy.csv", reasoning.render_again)):
        reports += [(path.parent, partial(_again, again, path.parent)) for path in sorted(root.glob(f"*/*/{name}"))]
    return reports


def _again(again: Callable[[Path, Path], list[Path]], folder: Path, _: Sequence[SavedRecord], to: Path) -> list[Path]:
    return again(folder, to)


def tables(root: Path) -> list[Path]:
    """Write every table again, with the plots that belong to tables, and SPEED.md; return their paths.

    Args:
        root: experiments/; a relative path keeps the names of records in the tables short.

    Raises:
        ConfigError: a specification is wrong.
        DataError: there is no such folder, or no specification in it.
    """
    records = collect([root])
    paths = _specified(root, records, figures=False)
    for folder, report in folders(root):
        paths += report(below(folder, records), folder)
    return paths + speed.render(records, root)


def figures(root: Path) -> list[Path]:
    """Write every figure again, and the heat maps of needles in a haystack. Arguments and errors: :func:`tables`."""
    records = collect([root])
    paths = _specified(root, records, figures=True)
    for folder in sorted(root.glob(f"*/{needle.FOLDER}")):
        if haystacks := [saved for saved in below(folder, records) if needle.is_one(saved)]:
            paths += needle.render(haystacks, folder)
    return paths


def below(folder: Path, records: Sequence[SavedRecord]) -> list[SavedRecord]:
    """The records in a folder and those below it; the folder is relative as their paths are."""
    return [saved for saved in records if saved.path.is_relative_to(folder)]


def _specified(root: Path, records: Sequence[SavedRecord], figures: bool) -> list[Path]:
    paths = [path for path in specifications(root) if path.stem.startswith(FIGURE) == figures]
    if not paths:
        raise DataError(f"{root}: no specification (*/*.yaml); give the folder experiments of a checkout")
    specs = {path: read_spec(path) for path in paths}  # all are read before any is rendered
    return [
        file for path, spec in specs.items()
        for file in write_table(spec, below(path.parent, records), path.with_suffix(""))
    ]  # fmt: skip

"""What the page shows of each run, read from its record, curves and predictions."""

import csv
import logging
import math
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

from attnlab.callbacks.summary import LONGEST, spread
from attnlab.config.build import leaves
from attnlab.errors import DataError
from attnlab.report import sweep
from attnlab.report.figure import read_curves
from attnlab.run.directory import holder_of
from attnlab.run.ledger import BROKEN
from attnlab.run.record import RECORD, SECTIONS, UNREADABLE
from attnlab.run.store import SavedRecord, printable, read, record_files

log = logging.getLogger(__name__)

SAMPLES = 4  # predictions of a run
POINTS = 100  # of a curve
LARGEST = 3.4e38  # about what float32 holds
LOSSES = ("loss", "val_loss")
MEASURED = ("quality", "parameters", "kv_cache", "inference", "training")


class Sample(NamedTuple):
    """A line of predictions.tsv, shortened; the hypothesis in parts, each with whether it differs."""

    source: str
    reference: str
    hypothesis: list[tuple[str, bool]]


@dataclass(frozen=True)
class Shown:
    """A run on the page.

    Args:
        name: its directory; of a record that lies elsewhere its file.
        record: of the present schema; empty where it is broken.
        status: as in the record; "interrupted" where the run's process is gone; "broken" where the file is no record.
        error: why the run failed or was interrupted, or what is wrong with the file; empty: nothing.
        metric, quality: the first number of the quality and its name; empty: nothing was scored.
        numbers: of :data:`attnlab.report.sweep.NUMBERS`; those that were not measured are left out.
        curves: (update, value) pairs of the training and the validation loss, at most POINTS each.
        notes: which files of the run could not be read, and why.
    """

    name: str
    record: Mapping[str, Any]
    status: str
    error: str = ""
    mechanism: str = ""
    metric: str = ""
    quality: float | None = None
    numbers: dict[str, float] = field(default_factory=dict)
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        """Mechanism, rank and seed."""
        words = [f"{key} {value}" for key in ("rank", "seed") if (value := self.record.get(key)) is not None]
        return ", ".join([self.mechanism, *words])

    @property
    def corpus(self) -> str:
        """What was read, without its place; with its vocabulary, on which a perplexity depends."""
        corpus = str(self.record.get("corpus", ""))
        _, _, vocabulary = corpus.rpartition("; vocabulary ")
        name = re.split(r" at |: ", corpus, maxsplit=1)[0]
        if vocabulary.isdigit():
            return f"{name}, vocabulary {vocabulary}"
        return "sample corpus" if name == "sample" else name

    @property
    def tags(self) -> str:
        """The user's words."""
        tags = self.record.get("tags")
        return ", ".join(map(str, tags)) if isinstance(tags, list) else ""

    @property
    def measured(self) -> list[tuple[str, str]]:
        """Name and value of each number of the record."""
        pairs = [pair for name in MEASURED for pair in leaves(self.record.get(name, {}), name)]
        numbers = [(name, value) for name, value in pairs if isinstance(value, int | float)]
        numbers = [pair for pair in numbers if not isinstance(pair[1], bool) and abs(pair[1]) < sys.float_info.max]
        return [(name.replace("_", " "), f"{value:,.12g}") for name, value in numbers]

    @property
    def environment(self) -> str:
        """A line for each fact of the machine and the software."""
        known = self.record.get("environment", {})
        return "\n".join(f"{name}: {known[name]}" for name in SECTIONS["environment"].split() if name in known)


def gather(places: Iterable[Path]) -> list[Shown]:
    """Every run in these folders and files, the newest first.

    What lies below a folder with a record.json belongs to its run; elsewhere every JSON file that is a record counts,
    as in experiments/.

    Raises:
        DataError: a place does not exist.
    """
    runs: list[Shown] = []
    for file in dict.fromkeys(file for place in places for file, _ in record_files(place)):
        expected, run, problem = file.name == RECORD, None, "not a record"
        name = printable(str(file.parent if expected else file))
        try:
            saved = read(file)
            run = saved and _shown(saved, name, expected)
        except DataError as error:
            problem = str(error).removeprefix(f"{file}: ")
        except UNREADABLE as error:  # of a kind that nothing checks
            problem = f"a damaged record: {type(error).__name__}: {error}"
        if run:
            runs.append(run)
        elif expected:
            runs.append(Shown(name, {}, BROKEN, problem.removeprefix("skipped, ")))
        elif problem != "not a record":
            log.warning("%s: %s", file, problem)
    return sorted(runs, key=lambda run: str(run.record.get("started", "")), reverse=True)


def differing(hypothesis: str, reference: str) -> list[tuple[str, bool]]:
    """The words of a hypothesis in parts, each with whether it differs."""
    words, wanted = hypothesis.split(), reference.split()
    steps = SequenceMatcher(None, wanted, words, autojunk=False).get_opcodes()
    return [(" ".join(words[a:b]), kind != "equal") for kind, _, _, a, b in steps if b > a]


def thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most POINTS of a curve's points, evenly spread, the first and the last among them."""
    last = len(points) - 1
    return list(points) if last < POINTS else [points[round(i * last / (POINTS - 1))] for i in range(POINTS)]


def _shown(saved: SavedRecord, name: str, in_its_directory: bool) -> Shown:
    """`in_its_directory`: the record has curves and predictions beside it."""
    record, directory = saved.record, saved.path.parent
    status, error = record["status"], " ".join(str(record.get("error") or "").split())
    if status == "running" and holder_of(directory) is None:
        status, error = "interrupted", "its process is gone"
    metric = sweep.metric(saved) or ""
    numbers = {column: value for column, (key, _) in sweep.NUMBERS.items() if (value := saved.number(key)) is not None}
    run = Shown(name, record, status, error, sweep.mechanism(saved), metric, saved.number(f"quality.{metric}"), numbers)
    for what, read_file in (("the curves", _read_losses), ("predictions.tsv", _read_samples)):
        try:
            if in_its_directory:
                read_file(run, directory)
        except (OSError, csv.Error, *UNREADABLE) as problem:
            run.notes.append(f"{what} cannot be read: {type(problem).__name__}: {problem}")
    return run


def _read_losses(run: Shown, directory: Path) -> None:
    """NaN, a gap in the line, stands for a value that float32 cannot hold."""
    logged = read_curves(directory)
    for key in LOSSES:
        points = [(step, value if abs(value) < LARGEST else math.nan) for step, value in thinned(logged.get(key, []))]
        if any(math.isfinite(value) for _, value in points):
            run.curves[key] = points
        elif points:
            run.notes.append(f"{key} has no finite value that can be drawn")


def _read_samples(run: Shown, directory: Path) -> None:
    for row in spread(directory / "predictions.tsv", SAMPLES):
        keys = ("source", "reference", "hypothesis")
        source, reference, hypothesis = (textwrap.shorten(row[key], LONGEST, placeholder=" …") for key in keys)
        run.samples.append(Sample(source, reference, differing(hypothesis, reference)))

"""The page: a table of runs, plots, predictions and commands in one HTML file that needs no network.

The table is DataTables (of the package itables), the plots are Bokeh's; their scripts stand in the file. Everything
that comes from records and predictions is escaped by Jinja, and the page's policy (Content-Security-Policy) lets a
browser run no other script and load nothing.
"""

import base64
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from bokeh.resources import Resources
from itables.utils import read_package_file
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from attnlab.callbacks.summary import label
from attnlab.report import sweep
from attnlab.report.page import plots
from attnlab.report.page.gather import LOSSES, POINTS, SAMPLES, Sample, Shown
from attnlab.run.record import NOT_RUN, commit
from attnlab.run.store import printable

FIRST = {"plot-cache": sweep.SIZES[1], "plot-speed": sweep.SPEED}  # plot: what it shows where runs have it
Lines = list[tuple[int, list[tuple[str, bool]]]]


@dataclass(frozen=True)
class Column:
    """A column of the table.

    Args:
        name: its heading.
        filter: "list": the values to choose from; "search": a text or a bound.
        kind: classes of its cells: "number" or "text", and "extra" where a phone has no room for it.
    """

    name: str
    filter: str = "list"
    kind: str = "text"


@dataclass(frozen=True)
class Cell:
    """What a row has in a column.

    Args:
        text: as shown.
        order: what a column of numbers is sorted by, empty where there is no number; None: a column of texts.
    """

    text: str
    order: float | Literal[""] | None = None


@dataclass(frozen=True)
class Group:
    """Runs whose qualities can be compared.

    Args:
        name: task, metric and corpus.
        metric: for the axis.
        runs: their positions on the page.
        measures: what at least one of them has, of :data:`attnlab.report.sweep.NUMBERS`.
    """

    name: str
    metric: str
    runs: list[int]
    measures: list[str]


def render(runs: Sequence[Shown], places: Sequence[Path]) -> str:
    """The page as HTML; without runs it says so in one line. `places`: the folders and files that were read."""
    shown_places = printable(", ".join(map(str, places)))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {}  # Bokeh's JSON defines an object where it first stands: never sorted
    template = environment.from_string(_text("page.html"))
    if not runs:
        return template.render(runs=[], places=shown_places, css=_text("page.css"), allowed="'none'")
    comparable = [group for group in groups(runs) if group.measures]
    measures = [name for name in sweep.NUMBERS if any(name in run.numbers for run in runs)]
    losses = [name for name in LOSSES if any(run.curves.get(name) for run in runs)]
    figures = [plots.points(runs, comparable[0].measures[0], name) for name in FIRST] if comparable else []
    figures += [plots.curves(runs, name, name) for name in losses]
    colours = plots.colours(runs)
    head, rows = table(runs, measures)
    bokeh, script = "\n".join(Resources(mode="inline", components=["bokeh"]).js_raw), _text("page.js")
    texts = {"bokeh": _inside(bokeh), "script": _inside(script)}
    return template.render(
        runs=runs,
        places=shown_places,
        counts=", ".join(f"{count} {status}" for status, count in Counter(run.status for run in runs).most_common()),
        made=f"Made on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC by attnlab at commit {commit()[:12]}.",
        groups=comparable,
        plots=FIRST.items(),
        measures=measures,
        columns=head,
        cells=[list(zip(head, row, strict=True)) for row in rows],
        colours=colours,
        legend={name: [i for i, run in enumerate(runs) if run.mechanism == name] for name in colours},
        losses=losses,
        points=POINTS,
        samples=samples(runs),
        count=SAMPLES,
        data={"figures": figures, "groups": [vars(group) for group in comparable], "measures": measures},
        datatables=_inside(read_package_file("html", "dt_bundle.js")),
        library_css=_inside(read_package_file("html", "dt_bundle.css")),
        css=_text("page.css"),
        allowed=" ".join(["blob:", *map(_digest, texts.values())]),  # DataTables is a module of its own
        **texts,
    )


def groups(runs: Sequence[Shown]) -> list[Group]:
    """The scored runs by task, metric and corpus: those with a cache first, then the largest group."""
    comparable: dict[tuple[str, str, str], list[int]] = {}
    for i, run in enumerate(runs):
        if run.quality is not None:
            comparable.setdefault((str(run.record["task"]), run.metric, run.corpus), []).append(i)
    every = [
        Group(
            f"{task} · {label(metric)} · {corpus} ({len(same)})",
            label(metric),
            same,
            [name for name in sweep.NUMBERS if any(name in runs[i].numbers for i in same)],
        )
        for (task, metric, corpus), same in comparable.items()
    ]
    return sorted(every, key=lambda group: (sweep.SIZES[1] not in group.measures, -len(group.runs)))


def table(runs: Sequence[Shown], measures: Sequence[str]) -> tuple[list[Column], list[list[Cell]]]:
    """The table's columns, among them those of NUMBERS in `measures`, and a row for each run."""
    columns = [Column("Mechanism"), Column("Task"), Column("Quality", "search", "number"), Column("Metric")]
    columns += [Column(name, "search", "number" if name in FIRST.values() else "number extra") for name in measures]
    columns += [Column("Rank", "list", "number extra"), Column("Seed", "list", "number extra")]
    columns += [Column(name, "list", "text extra") for name in ("Corpus", "Scale", "Mode", "Tags")]
    columns += [Column("Status"), Column("Started (UTC)", "search", "text extra")]
    return columns, [_row(run, measures) for run in runs]


def samples(runs: Sequence[Shown]) -> list[tuple[Sample, Lines]]:
    """The predictions, those of the same source and reference together.

    Returns:
        Of each source its first sample, and for each run its position and the parts of its hypothesis.
    """
    sources: dict[tuple[Any, ...], tuple[Sample, Lines]] = {}
    for i, run in enumerate(runs):
        for sample in run.samples:
            key = run.record["task"], run.corpus, sample.source, sample.reference
            sources.setdefault(key, (sample, []))[1].append((i, sample.hypothesis))
    return list(sources.values())


def _row(run: Shown, measures: Sequence[str]) -> list[Cell]:
    record = run.record

    def text(key: str) -> Cell:
        value = record.get(key)
        return Cell("" if value is None else str(value))

    def integer(key: str) -> Cell:
        value = record.get(key)
        return Cell("" if value is None else str(value), value if isinstance(value, int) else "")

    quality = Cell(NOT_RUN, "") if run.quality is None else Cell(f"{run.quality:g}", run.quality)
    numbers = [Cell(sweep.cell(run.numbers.get(name), name), run.numbers.get(name, "")) for name in measures]
    start = [Cell(run.mechanism or run.name), text("task"), quality, Cell(label(run.metric))]
    rest = [Cell(run.corpus), text("scale"), text("mode"), Cell(run.tags), Cell(run.status), Cell(run.started)]
    return [*start, *numbers, integer("rank"), integer("seed"), *rest]


def _text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _inside(code: str) -> str:
    """A library's text, which must not end the element that it stands in."""
    return Markup(code.replace("</script", "<\\/script").replace("</style", "<\\/style"))


def _digest(code: str) -> str:
    """What the page's policy calls a script: browsers run those that it names."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'"

"""The page: a table of runs, plots, predictions and commands in one HTML file that needs no network.

The table is DataTables from the package itables, the plots are Bokeh's. Their scripts are part of the file. Jinja
escapes all texts of records and predictions. The page's Content-Security-Policy allows no other script and no request.
A plot has the data of every run; the page's script sets its filter.
"""

import base64
import csv
import hashlib
import logging
import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from bokeh.core.types import ID
from bokeh.embed import json_item
from bokeh.models import CDSView, ColumnDataSource, HoverTool, IndexFilter, NumeralTickFormatter
from bokeh.plotting import figure
from bokeh.resources import Resources
from itables.utils import read_package_file
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from attnlab.callbacks.summary import LONGEST, interval, label, spread
from attnlab.config.build import leaves
from attnlab.errors import printable
from attnlab.report import sweep
from attnlab.report.figure import COLOURS, read_curves
from attnlab.report.runs import LOWER
from attnlab.run.record import NOT_RUN, PUBLISHED, RECORD, UNREADABLE, commit, corpus_of
from attnlab.run.store import SavedRecord, collect, finite

log = logging.getLogger(__name__)

SAMPLES = 4  # predictions of a run
POINTS = 100  # of a curve
MOST_SETTINGS = 3  # in the name of a mechanism
LOSSES = {"loss": "training loss", "val_loss": "validation loss"}
MEASURED = ("quality", "parameters", "kv_cache", "inference", "training")
UPDATES, UNEQUAL = "Updates", " ≠"  # the mark of runs whose updates are not those of the others of their group
FIRST = {"plot-cache": sweep.SIZES[1], "plot-speed": sweep.SPEED}  # plot: what it shows where runs have it
GRAY = "#808690"  # texts and lines, legible on white and on black
MARKS = ("circle", "square", "diamond", "triangle", "inverted_triangle", "plus")  # the next one after all colours
SHAPES = "●■◆▲▼✚"  # as texts
DASHES = ("solid", "dashed", "dotted", "dotdash", "dashdot", "1 8")
TOOLS = "box_zoom,wheel_zoom,reset,save"
ABOUT = [("run", "@run"), ("task", "@task, @corpus"), ("in", "@name")]
Lines = list[tuple[int, str]]


class Sample(NamedTuple):
    """A line of predictions.tsv, shortened."""

    source: str
    reference: str
    hypothesis: str


class Shown:
    """A run on the page, with its first score and the measured :data:`attnlab.report.sweep.NUMBERS`.

    Its name is that of its directory, or of its file if that is not a record.json. Curves are at most POINTS pairs of
    update and loss. Curves and predictions are read beside a record.json.
    """

    def __init__(self, saved: SavedRecord) -> None:
        directory, is_run = saved.path.parent, saved.path.name == RECORD
        self.record, self.name = saved.record, printable(str(directory if is_run else saved.path))
        self.status, self.error = saved.state()
        self.mechanism, self.settings = saved.label, saved.settings
        self.quality: float | None
        self.metric, self.quality = saved.score or ("", None)
        self.score = label(self.metric) + " (lower is better)" * self.metric.startswith(LOWER)
        _, _, vocabulary = corpus_of(self.record).rpartition("; vocabulary ")  # a perplexity depends on it
        self.corpus = f"{saved.corpus}, vocabulary {vocabulary}" if vocabulary.isdigit() else saved.corpus
        self.parts = str(self.record["quality"].get("held_out", "")).removeprefix(PUBLISHED)
        self.interval = interval(self.record["quality"], f"{self.metric}_interval")
        self.numbers = {name: n for name, (key, _) in sweep.NUMBERS.items() if (n := saved.number(key)) is not None}
        logged = read_curves(saved)
        self.curves = {
            key: [(step, value if math.isfinite(value) else math.nan) for step, value in thinned(logged[key])]
            for key in LOSSES
            if sum(math.isfinite(value) for _, value in logged.get(key, ())) > 1  # a single point is not a line
        }
        self.samples = [
            Sample(*(textwrap.shorten(row[key], LONGEST, placeholder=" …") for key in Sample._fields))
            for row in (spread(directory / "predictions.tsv", SAMPLES) if is_run else ())
        ]

    @property
    def title(self) -> str:
        """Mechanism, with the settings that tell it from others, and seed."""
        seed = self.record.get("seed")
        return self.mechanism if seed is None else f"{self.mechanism}, seed {seed}"

    @property
    def measured(self) -> list[tuple[str, str]]:
        """The name and value of each number of the record."""
        pairs = [pair for name in MEASURED for pair in leaves(self.record.get(name, {}), name)]
        return [(name.replace("_", " "), f"{value:,.12g}") for name, value in pairs if finite(value) is not None]


def gather(places: Iterable[Path]) -> list[Shown]:
    """The runs in these folders and files; DataError for a missing place.

    Runs with a score come first, unfinished ones last, and of each the newest first. A run with unreadable files is
    named in a warning and left out.
    """
    runs = []
    for saved in reversed(collect(places)):
        try:
            runs.append(Shown(saved))
        except (OSError, csv.Error, *UNREADABLE) as error:
            log.warning("%s: left out: %s: %s", saved.name, type(error).__name__, error)
    name_apart(runs)
    return sorted(runs, key=lambda run: (run.status not in ("finished", "running"), run.quality is None))


def name_apart(runs: Sequence[Shown]) -> None:
    """Add to the names of mechanisms the settings in which runs of one task, corpus and name differ."""
    same: dict[tuple[str, str, str], list[Shown]] = {}
    for run in runs:
        same.setdefault((str(run.record["task"]), run.corpus, run.mechanism), []).append(run)
    for alike in same.values():
        keys = dict.fromkeys(key for run in alike for key in run.settings)
        differ = [key for key in keys if len({run.settings.get(key) for run in alike}) > 1][:MOST_SETTINGS]
        for run in alike:
            words = [f"{key.rpartition('.')[2]}={run.settings[key]}" for key in differ if key in run.settings]
            run.mechanism = " ".join([run.mechanism, *words])


def thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most POINTS of a curve's points, evenly spread, with the first and the last."""
    chosen = np.linspace(0, len(points) - 1, min(POINTS, len(points))).round().astype(int)
    return [points[i] for i in chosen]


class Column(NamedTuple):
    """A column of the table: the text of each run, and for a number the value by which it is sorted ("" if unknown).

    Cells of class text are filtered by a list of values, cells of class number by a bound. A phone hides "extra".
    """

    name: str
    cells: Sequence[tuple[str, Any]]
    kind: str = "text extra"


class Group(NamedTuple):
    """Runs on the page with comparable qualities; `measures`: those of NUMBERS that at least one of them has."""

    name: str
    metric: str
    runs: list[int]
    measures: list[str]


def render(runs: Sequence[Shown], places: Sequence[Path]) -> str:
    """The page as HTML, or a line that says that there are no runs. `places`: the folders and files that were read."""
    shown_places = printable(", ".join(map(str, places)))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {}  # not sorted: Bokeh's JSON defines an object at its first use
    template = environment.from_string(_text("page.html"))
    if not runs:
        return template.render(runs=[], places=shown_places, css=_text("page.css"), allowed="'none'")
    comparable = [group for group in groups(runs) if group.measures]
    measures = [name for name in sweep.NUMBERS if any(name in run.numbers for run in runs)]
    losses = [name for name in LOSSES if any(run.curves.get(name) for run in runs)]
    figures = [points(runs, comparable[0].measures[0], name) for name in FIRST] if comparable else []
    figures += [curves(runs, name) for name in losses]
    tasks: dict[str, list[int]] = {}  # whose losses can be compared
    for i, run in enumerate(runs):
        if run.curves:
            tasks.setdefault(f"{run.record['task']} · {run.corpus}", []).append(i)
    colour, columns = colours(runs), _columns(runs, measures)
    bokeh = "\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)
    texts = {"bokeh": _inside(bokeh), "script": _inside(_text("page.js"))}
    return template.render(
        runs=runs,
        places=shown_places,
        counts=", ".join(f"{count} {status}" for status, count in Counter(run.status for run in runs).most_common()),
        made=f"Made on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC by attnlab at commit {commit()[:12]}.",
        groups=comparable,
        plots=FIRST.items(),
        measures=measures,
        columns=columns,
        unequal=any(UNEQUAL in text for column in columns for text, _ in column.cells),
        colours=colour,
        marks={name: SHAPES[i // len(COLOURS) % len(SHAPES)] for i, name in enumerate(colour)},
        tasks=tasks,
        legend={name: [i for i, run in enumerate(runs) if run.mechanism == name] for name in colour},
        losses=losses,
        points=POINTS,
        samples=samples(runs),
        count=SAMPLES,
        data={
            "figures": figures,
            "groups": [group._asdict() for group in comparable],
            "measures": measures,
            "tasks": [{"runs": numbers} for numbers in tasks.values()],
        },  # fmt: skip
        datatables=_inside(read_package_file("html", "dt_bundle.js")),
        library_css=_inside(read_package_file("html", "dt_bundle.css")),
        css=_text("page.css"),
        allowed=" ".join(["blob:", *map(_digest, texts.values())]),  # DataTables is a module of its own
        **texts,
    )


def groups(runs: Sequence[Shown]) -> list[Group]:
    """The scored runs by task, metric and corpus: groups with a cache first, then by size."""
    comparable: dict[tuple[str, str, str], list[int]] = {}
    for i, run in enumerate(runs):
        if run.quality is not None:
            comparable.setdefault((str(run.record["task"]), label(run.metric), run.corpus), []).append(i)
    measured = [[n for n in sweep.NUMBERS if any(n in runs[i].numbers for i in same)] for same in comparable.values()]
    every = [
        Group(f"{task} · {metric} · {corpus} ({len(same)})", runs[same[0]].score, same, measures)
        for ((task, metric, corpus), same), measures in zip(comparable.items(), measured, strict=True)
    ]
    return sorted(every, key=lambda group: (sweep.SIZES[1] not in group.measures, -len(group.runs)))


def samples(runs: Sequence[Shown]) -> list[tuple[Sample, Lines]]:
    """The first sample of each source and reference, with the number and hypothesis of each run that has it."""
    sources: dict[tuple[Any, ...], tuple[Sample, Lines]] = {}
    for i, run in enumerate(runs):
        for sample in run.samples:
            key = run.record["task"], run.corpus, sample.source, sample.reference
            sources.setdefault(key, (sample, []))[1].append((i, sample.hypothesis))
    return list(sources.values())


def _columns(runs: Sequence[Shown], measures: Sequence[str]) -> list[Column]:
    def texts(key: str) -> list[tuple[str, None]]:
        return [("" if (value := run.record[key]) is None else str(value), None) for run in runs]

    quality = [
        (f"{run.quality:g}{run.interval}", run.quality) if run.quality is not None else (NOT_RUN, "") for run in runs
    ]
    measured = {
        name: [(sweep.cell(number := run.numbers.get(name), name), "" if number is None else number) for run in runs]
        for name in measures
    }
    for group in groups(runs):
        if UPDATES in measured and len({runs[i].numbers.get(UPDATES) for i in group.runs}) > 1:
            for i in group.runs:
                text, value = measured[UPDATES][i]
                measured[UPDATES][i] = f"{text}{UNEQUAL}", value
    columns = [
        Column("Mechanism", [(run.mechanism, None) for run in runs], kind="text"),
        Column("Quality", quality, "number"),
        Column("Metric", [(run.score, None) for run in runs], kind="text"),
        Column("Task", texts("task"), kind="text"),
        Column("Corpus", [(run.corpus, None) for run in runs]),
        Column("Seed", texts("seed"), kind="number extra"),
        *(Column(name, cells, "number" if name in (*FIRST.values(), UPDATES) else "number extra")
          for name, cells in measured.items()),
        Column("Status", [(run.status, None) for run in runs], kind="text"),
        Column("Scale", texts("scale")),
        Column("Mode", texts("mode")),
        Column("Tags", [(", ".join(map(str, run.record.get("tags") or ())), None) for run in runs]),
        Column("Started (UTC)", [(run.record["started"][:16].replace("T", " "), None) for run in runs]),
    ]  # fmt: skip
    return sorted(columns, key=lambda column: column not in columns[:2] and len({text for text, _ in column.cells}) < 2)


def colours(runs: Sequence[Shown]) -> dict[str, str]:
    """A colour for each mechanism, those of scored runs first. After eight they repeat with the next mark and dash."""
    names = dict.fromkeys(run.mechanism for run in runs)
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}


def points(runs: Sequence[Shown], first: str, target: str) -> dict[str, Any]:
    """The quality of the runs over another number, at first `first`, as Bokeh's JSON for the element `target`."""
    columns: dict[str, Any] = _about(runs)
    columns["score"] = ["" if run.quality is None else f"{run.quality:g} {label(run.metric)}" for run in runs]
    columns["quality"] = np.array([np.nan if run.quality is None else run.quality for run in runs])
    columns |= {name: np.array([run.numbers.get(name, np.nan) for run in runs]) for name in sweep.NUMBERS}
    plot, view = _figure([("quality", "@score")]), _view(len(runs))
    plot.scatter(first, "quality", source=ColumnDataSource(columns), view=view, name="marks", size=11, color="colour",
                 marker="mark", alpha=0.8, line_color="white")  # fmt: skip
    plot.xaxis.formatter = NumeralTickFormatter(format="0,0.[00]a")
    return dict(json_item(plot, ID(target)))


def curves(runs: Sequence[Shown], loss: str) -> dict[str, Any]:
    """A line for each run that logged a loss, as Bokeh's JSON."""
    numbers = [i for i, run in enumerate(runs) if run.curves.get(loss)]
    columns: dict[str, Any] = {key: [values[i] for i in numbers] for key, values in _about(runs).items()}
    lines = [np.array(runs[i].curves[loss]) for i in numbers]
    columns |= {"xs": [line[:, 0] for line in lines], "ys": [line[:, 1] for line in lines]}
    title = LOSSES[loss]
    plot = _figure([("update", "$snap_x{0,0}"), (title, "$snap_y{0.[0000]}")], line_policy="nearest")
    source, view = ColumnDataSource(columns), _view(len(numbers))
    plot.multi_line(
        "xs", "ys", source=source, view=view, name="marks", color="colour", line_dash="dash", line_width=2, alpha=0.85
    )
    plot.xaxis.axis_label, plot.yaxis.axis_label = "update", title
    return dict(json_item(plot, ID(loss)))


def _about(runs: Sequence[Shown]) -> dict[str, list[Any]]:
    colour = colours(runs)
    rounds = {name: i // len(COLOURS) % len(MARKS) for i, name in enumerate(colour)}
    return {
        "number": list(range(len(runs))),
        "run": [run.title for run in runs],
        "task": [str(run.record["task"]) for run in runs],
        "corpus": [run.corpus for run in runs],
        "name": [Path(run.name).name for run in runs],
        "colour": [colour[run.mechanism] for run in runs],
        "mark": [MARKS[rounds[run.mechanism]] for run in runs],
        "dash": [DASHES[rounds[run.mechanism]] for run in runs],
    }


def _view(count: int) -> CDSView:
    """A filter that shows all at first: Bokeh warns on the console about a plot that starts without a range."""
    return CDSView(filter=IndexFilter(indices=list(range(count)), name="shown"))


def _figure(beside_the_mouse: list[tuple[str, str]], **hover: Any) -> figure:
    plot = figure(height=320, sizing_mode="stretch_width", tools=TOOLS, active_drag=None, active_scroll=None)
    plot.add_tools(HoverTool(tooltips=[*ABOUT, *beside_the_mouse], **hover))
    plot.toolbar.logo, plot.toolbar.autohide = None, True
    plot.background_fill_alpha = plot.border_fill_alpha = 0
    plot.outline_line_color = None
    plot.grid.grid_line_color, plot.grid.grid_line_alpha = GRAY, 0.25
    for axis in (plot.xaxis, plot.yaxis):
        axis.axis_line_color = axis.major_tick_line_color = GRAY
        axis.axis_label_text_color = axis.major_label_text_color = GRAY
        axis.axis_label_text_font_style, axis.axis_label_text_font_size = "normal", "13px"
        axis.minor_tick_line_color = None
    return plot


def _text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _inside(code: str) -> str:
    """A library's text in a form that cannot end its element."""
    return Markup(code.replace("</script", "<\\/script").replace("</style", "<\\/style"))


def _digest(code: str) -> str:
    """The name of a script in the page's policy: browsers run only scripts that it names."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'"

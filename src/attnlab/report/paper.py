"""A paper's table: the published numbers beside those of our records.

A record stands for a row if it is finished, has the row's task, mechanism, knobs and scale, and read the row's corpus.
The embedded sample corpus, or any other, never stands for a paper's: such records are left out, and counted below the
table.  Of each seed the newest record counts; records of exactly the row's configuration come before all others, which
are marked with what they differ in.
"""

import io
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from attnlab.config.build import NOT_HASHED, leaves
from attnlab.config.check import compose
from attnlab.errors import ConfigError
from attnlab.report.grid import Grid
from attnlab.runs.record import NOT_RUN
from attnlab.runs.store import Found

# Where and how often a recipe runs; a record's environment, seed and protocol say it.
FREE = {*NOT_HASHED, "seed", "hardware", "bench", "num_workers"}
PROTOCOL = (
    "inference.protocol",
    "inference.batch",
    "inference.beam",
    "inference.dtype",
    "environment.device",
    "environment.threads",
    "corpus",
)


SIZES = {"parameters": "Parameters", "cache": "Cache per token and layer"}


@dataclass(frozen=True)
class Column:
    """`value`: a record's dotted key.  `ratio`: the same, the baseline's by the row's.  `against`: the row's less the
    baseline's.  `computed`: a number of the row."""

    key: str
    label: str
    value: str = ""
    ratio: str = ""
    against: str = ""
    computed: bool = False
    digits: int = 2
    note: str = ""


@dataclass(frozen=True)
class Row:
    """`command`: the row's overrides on the command line; empty for a number that the paper quotes from elsewhere.

    `computed`: what the configuration alone gives, as `facts` do; tests hold both to mode=describe.
    """

    label: str
    published: Mapping[str, str]
    command: str = ""
    note: str = ""
    parameters: int = 0
    cache: float = 0  # elements per token and layer
    facts: Mapping[str, str] = field(default_factory=dict)
    computed: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Plot:
    """A point for each row: two of a record's numbers, by their dotted keys."""

    x: str
    y: str
    x_label: str
    y_label: str


@dataclass(frozen=True)
class Spec:
    """experiments/<paper>/<table>.yaml.  `corpus`: how its name begins, and least and most training segments.

    `facts`: headings of columns that say what a row is, by the key in its `facts`.
    """

    title: str
    source: str
    corpus: Mapping[str, Any]
    baseline: str
    command: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    before: str = ""
    facts: Mapping[str, str] = field(default_factory=lambda: dict(SIZES))
    notes: Mapping[str, str] = field(default_factory=dict)
    plot: Plot | None = None

    def published(self, column: Column) -> bool:
        """Whether any row has a published number for a column; a comparison of our own has none."""
        return any(column.key in row.published for row in self.rows)


def read_spec(path: Path) -> Spec:
    """ConfigError: the file is missing, or not such a specification."""
    try:
        plain = yaml.safe_load(path.read_text(encoding="utf-8"))
        parts = {"columns": [Column(**c) for c in plain["columns"]], "rows": [Row(**r) for r in plain["rows"]]}
        parts |= {"plot": Plot(**plain["plot"])} if "plot" in plain else {}
        spec = Spec(**{**plain, **parts})
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, TypeError, KeyError, ValueError) as error:
        raise ConfigError(f"{path}: not the specification of a table: {' '.join(str(error).split())}") from error
    if spec.baseline not in [row.label for row in spec.rows]:
        raise ConfigError(f"{path}: baseline {spec.baseline!r} is no row's label")
    if unknown := ({c.note for c in spec.columns} | {r.note for r in spec.rows}) - {"", *spec.notes}:
        raise ConfigError(f"{path}: note {sorted(unknown)[0]!r} is not among its notes")
    return spec


def paper_table(spec: Spec, records: Sequence[Found]) -> Grid:
    marks = {name: f"[{'abcdefghijkl'[i]}]" for i, name in enumerate(spec.notes)}
    grid = Grid(spec.title, ["Model", *spec.facts.values()])
    for column in spec.columns:
        mark = f" {marks[column.note]}" if column.note else ""
        both = spec.published(column)
        grid.headers += [f"{column.label}{mark}, published", f"{column.label}, ours"] if both else [column.label + mark]
    grid.notes = [f"Published: {spec.source}." if any(map(spec.published, spec.columns)) else f"{spec.source}."]
    grid.notes += [f"{marks[name]} {text.strip()}" for name, text in spec.notes.items()]

    scored, usable = _scored(records, spec)
    chosen = {row.label: _choose(row, usable, spec) for row in spec.rows if row.command}
    names = {f.path: f"R{i}" for i, f in enumerate((f for fs in chosen.values() for f, _ in fs), 1)}
    baseline = [found for found, _ in chosen[spec.baseline]]
    for row in spec.rows:
        mine = [found for found, _ in chosen.get(row.label, [])]
        cells = [f"{row.label} {marks[row.note]}" if row.note else row.label]
        sizes = {
            "parameters": f"{row.parameters:,}" if row.parameters else "–",
            "cache": f"{row.cache:g}" if row.cache else "–",
        }
        cells += [str({**sizes, **row.facts}.get(key, "–")) for key in spec.facts]
        for column in spec.columns:
            if spec.published(column):
                cells.append(row.published.get(column.key, "–"))
            cells.append(_ours(column, row, mine, baseline, names) if row.command else "–")
        grid.rows.append(cells)
    grid.notes += [_describe(names[f.path], row, f, wrong) for row, fs in chosen.items() for f, wrong in fs]
    grid.notes += _left_out(scored, usable, spec)
    missing = [row for row in spec.rows if row.command and not chosen[row.label]]
    if missing and spec.before:
        grid.notes.append(f"{NOT_RUN}: first, for every row, `{spec.before}`")
    grid.notes += [f"{NOT_RUN}: {row.label}: `{spec.command.format(row=row.command)}`" for row in missing]
    return grid


def scatter(spec: Spec, records: Sequence[Found]) -> bytes | None:
    """PNG of the specification's plot: a point for each row, the mean of its seeds; None where there is none."""
    from matplotlib.figure import Figure

    if spec.plot is None:
        return None
    _, usable = _scored(records, spec)
    points = []
    for row in spec.rows:
        mine = [found for found, _ in _choose(row, usable, spec)] if row.command else []
        pairs = [(found.number(spec.plot.x), found.number(spec.plot.y)) for found in mine]
        known = [(x, y) for x, y in pairs if x is not None and y is not None]
        if known:
            points.append((row.label, mean(x for x, _ in known), mean(y for _, y in known)))
    if not points:
        return None
    figure = Figure(figsize=(5.5, 4.0), layout="constrained")
    axes = figure.subplots()
    for label, x, y in points:
        axes.plot(x, y, "o")
        axes.annotate(label, (x, y), textcoords="offset points", xytext=(6, 4), fontsize=8)
    axes.set(xlabel=spec.plot.x_label, ylabel=spec.plot.y_label, xlim=(0, None))
    axes.margins(0.15)
    axes.grid(alpha=0.3)
    file = io.BytesIO()
    figure.savefig(file, dpi=150, format="png")
    return file.getvalue()


def _scored(records: Sequence[Found], spec: Spec) -> tuple[list[Found], list[Found]]:
    """Finished records with a score; those among them that read the specification's corpus."""
    scored = [f for f in records if f.record["status"] == "finished" and f.record["mode"] in ("train", "test")]
    return scored, [found for found in scored if _is_corpus(found.record["corpus"], spec.corpus)]


def _is_corpus(text: str, wanted: Mapping[str, Any]) -> bool:
    size = re.search(r"\btrain (\d+)", text)
    least, most = wanted["train"]
    return text.startswith(wanted["name"]) and size is not None and least <= int(size[1]) <= most


def _choose(row: Row, records: Sequence[Found], spec: Spec) -> list[tuple[Found, list[str]]]:
    """The newest record of each seed with what it differs in; only exact ones, if there are any."""
    if not records:
        return []
    cfg = compose(*shlex.split(row.command))
    keys = {name: cfg.choices[name] for name in ("task", "attention", "compress", "scale")}
    keys |= {"stride": cfg.stride, "rank": cfg.rank}
    quality = next(column.value for column in spec.columns if column.value.startswith("quality."))
    found = [
        (f, differences(f, cfg, "task.encoder_checkpoint" in spec.command))
        for f in records
        if all(f.record.get(key) == value for key, value in keys.items()) and f.number(quality) is not None
    ]
    exact = [pair for pair in found if not pair[1]]
    return list({pair[0].record["seed"]: pair for pair in exact or found}.values())


def differences(found: Found, cfg: DictConfig, pretrained: bool) -> list[str]:
    """In what a run was not the row whose configuration is `cfg`; one text each."""
    try:
        own = OmegaConf.load(found.path.with_name("config.yaml"))
        mine = dict(leaves(OmegaConf.to_container(own, resolve=True)))
    except (OSError, yaml.YAMLError, OmegaConfBaseException):
        return ["no config.yaml that could be read stands beside it: its recipe is unknown"]
    theirs = dict(leaves(OmegaConf.to_container(cfg, resolve=True)))
    wrong = [
        f"{key}={mine.get(key, 'unset')} instead of {theirs.get(key, 'unset')}"
        for key in sorted(mine.keys() | theirs.keys())
        if not FREE & set(key.split(".")) and mine.get(key, "unset") != theirs.get(key, "unset")
    ]
    if found.record["mode"] == "test":
        wrong.append("scored with mode=test: how the checkpoint was trained is not in this record")
    elif pretrained and mine.get("task.encoder_checkpoint") is None:
        wrong.append("the encoder did not start from recognition")
    return wrong


def _ours(column: Column, row: Row, mine: Sequence[Found], baseline: Sequence[Found], names: Mapping[Path, str]) -> str:
    if column.computed:
        return f"{row.computed[column.key]:.{column.digits}f}" if column.key in row.computed else "–"
    if column.against:
        ours, theirs = ([v for f in found if (v := f.number(column.against)) is not None] for found in (mine, baseline))
        return f"{mean(ours) - mean(theirs):+.{column.digits}f}" if ours and theirs else NOT_RUN
    if column.ratio:
        return _ratio(column, mine, baseline, names)
    values = [value for found in mine if (value := found.number(column.value)) is not None]
    if not values:
        return NOT_RUN
    middle, least, most = (f"{value:.{column.digits}f}" for value in (mean(values), min(values), max(values)))
    return middle if len(values) == 1 else f"{middle} ({least}–{most}, {len(values)} seeds)"


def _ratio(column: Column, mine: Sequence[Found], baseline: Sequence[Found], names: Mapping[Path, str]) -> str:
    """Of the newest two records that were measured in the same way."""
    pairs = [
        (theirs.number(column.ratio), own.number(column.ratio), own, theirs)
        for own in sorted(mine, key=lambda f: f.record["started"], reverse=True)
        for theirs in sorted(baseline, key=lambda f: f.record["started"], reverse=True)
        if protocol(own) == protocol(theirs)
    ]
    for above, below, own, theirs in pairs:
        if above is not None and below:
            return f"{above / below:.{column.digits}f} ({names[theirs.path]}/{names[own.path]})"
    return "protocols differ" if mine and baseline and not pairs else NOT_RUN


def protocol(found: Found) -> list[Any]:
    """What two records must share before their times or memory are compared."""
    plain = dict(leaves(found.record)) | {"corpus": _corpus(found)}
    return [plain.get(key) for key in PROTOCOL]


def _describe(name: str, row: str, found: Found, wrong: Sequence[str]) -> str:
    record, environment = found.record, found.record["environment"]
    about = f"seed {record['seed']}; {_corpus(found)}; {environment['device']}; git {environment['git']}"
    differs = f"; NOT the row's recipe: {', '.join(wrong)}" if wrong else ""
    return f"{name} {row}: `{found.name}`; {about}; {record['inference']['protocol']}{differs}"


def _corpus(found: Found) -> str:
    """What was read, without where it lies."""
    return re.sub(r" at .*(?=: train )", "", found.record["corpus"])


def _left_out(scored: Sequence[Found], usable: Sequence[Found], spec: Spec) -> list[str]:
    others = [found for found in scored if found not in usable]
    sample = sum(found.record["corpus"] == "sample" for found in others)
    counts = {"the embedded sample corpus": sample, f"data other than {spec.corpus['name']}": len(others) - sample}
    return [f"Left out: {count} scored record(s) of {what}." for what, count in counts.items() if count]

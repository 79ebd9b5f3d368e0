"""A paper's table: the published numbers beside those of our records."""

from collections.abc import Mapping, Sequence
from functools import partial
from math import exp
from pathlib import Path
from statistics import mean

from omegaconf import OmegaConf

from attnlab.report import compression, context, curves, figure, points
from attnlab.report.grid import Grid, facts
from attnlab.report.match import choose, composed, protocol, scored, statistics
from attnlab.report.significance import has_predictions, standard_error, sure
from attnlab.report.spec import Column, Plot, Row, Spec
from attnlab.run.record import NOT_RUN
from attnlab.run.store import SavedRecord


def write_table(spec: Spec, records: Sequence[SavedRecord], stem: Path) -> list[Path]:
    """Write the table as Markdown, LaTeX and CSV, and its plots and curves if it has such and any point.

    With the files of :func:`pictures`.

    Args:
        spec: the table.
        records: every record there is, the oldest first.
        stem: the path of the files without suffix.
    """
    if spec.picture == "context":
        paths = context.table(spec, records).write(stem, "md", "tex", "csv")
        data = context.data(spec, records)
        known = any(row[2] != NOT_RUN for row in data.rows)
        return paths + (figure.write(stem.with_name(f"{stem.name}_points"), data, context.draw) if known else [])
    paths = table(spec, records).write(stem, "md", "tex", "csv")
    for plot in spec.plots:
        drawn = plot_points(spec, plot, records)
        if drawn.rows:
            paths += figure.write(stem.with_name(f"{stem.name}_{plot.name}"), drawn, partial(points.scatter, plot=plot))
    return paths + pictures(spec, records, stem)


def pictures(spec: Spec, records: Sequence[SavedRecord], stem: Path) -> list[Path]:
    """Write the figure of the rows' curves, or that of one row's ranks or fusion matrices, with its data as CSV.

    Only runs of a row's own recipe are drawn. Where there is none, nothing is written.

    Args:
        spec: the table.
        records: every record there is, the oldest first.
        stem: the path of the table's files without suffix.

    Returns:
        The paths of the files.
    """
    if not spec.curves and not spec.picture:
        return []
    _, usable = scored(records, spec)
    exact = [(row, found) for row in spec.rows for found, wrong in choose(row, usable, spec) if not wrong]
    if spec.curves:
        runs = [(row.label, int(found.record["seed"]), found.path.parent) for row, found in exact]
        data = curves.together(spec.title, runs, spec.curves)
        return figure.write(stem.with_name(f"{stem.name}_curves"), data, curves.draw_together) if data.rows else []
    if not exact:
        return []
    found, place = exact[0][1], stem.with_name(f"{stem.name}_{spec.picture}")
    folder = found.path.parent / compression.COMPRESSED
    if spec.picture == "ranks":
        data = compression.head_ranks(found)
        return figure.write(place, data, compression.ranks_plot) if data.rows else []
    if not folder.is_dir():
        return []
    data = compression.fusions(found, folder)
    return figure.write(place, data, compression.fusion_plot) if data.rows else []


def table(spec: Spec, records: Sequence[SavedRecord]) -> Grid:
    """The table of a specification, filled from the records that stand for its rows.

    Args:
        spec: the table.
        records: every record there is, the oldest first.
    """
    marks = {name: f"[{'abcdefghijkl'[i]}]" for i, name in enumerate(spec.notes)}
    grid = Grid(spec.title, ["Model", *spec.facts.values()])
    for column in spec.columns:
        mark = f" {marks[column.note]}" if column.note else ""
        both = spec.published(column)
        grid.headers += [f"{column.label}{mark}, published", f"{column.label}, ours"] if both else [column.label + mark]
    grid.notes = [f"Published: {spec.source}." if any(map(spec.published, spec.columns)) else f"{spec.source}."]
    grid.notes += [f"{marks[name]} {text.strip()}" for name, text in spec.notes.items()]

    every, usable = scored(records, spec)
    chosen = {row.label: choose(row, usable, spec) for row in spec.rows if row.command}
    names = {f.path: f"R{i}" for i, f in enumerate((f for fs in chosen.values() for f, _ in fs), 1)}
    for row in spec.rows:
        mine, baseline = _runs(row.label, chosen), _exact(row.baseline or spec.baseline, chosen)
        cells = [f"{row.label} {marks[row.note]}" if row.note else row.label]
        sizes = {
            "parameters": f"{row.parameters:,}" if row.parameters else "–",
            "cache": f"{row.cache:g}" if row.cache else "–",
        }
        cells += [str({**sizes, **row.facts}.get(key, "–")) for key in spec.facts]
        for column in spec.columns:
            if spec.published(column):
                cells.append(row.published.get(column.key, "–"))
            if column.statistic:
                found = statistics(row, records)
                size = found.get(column.statistic)
                cells.append(("–" if found else NOT_RUN) if size is None else f"{size:,.{column.digits}f}")
            else:
                cells.append(_ours(column, row, spec, mine, baseline, names) if row.command else "–")
        grid.rows.append(cells)
    grid.list_records(
        [{"Record": "", "Row": row} | facts(names[f.path], f) for row, fs in chosen.items() for f, _ in fs]
    )
    for row, fs in chosen.items():
        grid.notes += [f"{names[f.path]} {row}: NOT the row's recipe: {', '.join(why)}" for f, why in fs if why]
    if any(" ± " in cell for row in grid.rows for cell in row[1:]):
        grid.notes.append("±: standard error over the items of the test set, of one seed.")
    for row in spec.rows:
        if row.label != (label := row.baseline or spec.baseline):
            grid.notes += _surely(_exact(label, chosen), _runs(row.label, chosen), names)
    grid.notes += _left_out(every, usable, spec) if spec.corpus else []
    measured = any(column.measured for column in spec.columns)
    missing = [row for row in spec.rows if measured and row.command and not chosen[row.label]]
    missing = [row for row in missing if not row.split or not statistics(row, records)]
    if missing and spec.before:
        grid.notes.append(f"{NOT_RUN}: first, for every row, `{spec.before}`")
    commands = dict.fromkeys(spec.row_command(row) for row in missing)
    for command in commands:  # several rows of a table may need the same run
        labels = ", ".join(row.label for row in missing if spec.row_command(row) == command)
        grid.notes.append(f"{NOT_RUN}: {labels}: `{command}`")
    if missing and spec.after:
        grid.notes.append(f"{NOT_RUN}: then, with the run directory of each row, `{spec.after}`")
    return grid


def _runs(label: str, chosen: Mapping[str, Sequence[tuple[SavedRecord, list[str]]]]) -> list[SavedRecord]:
    """The records that stand for a row."""
    return [found for found, _ in chosen.get(label, [])]


def _exact(label: str, chosen: Mapping[str, Sequence[tuple[SavedRecord, list[str]]]]) -> list[SavedRecord]:
    """The records of a row's own recipe. Only these are a baseline: a marked record's drop would show no mark."""
    return [found for found, wrong in chosen.get(label, []) if not wrong]


def plot_points(spec: Spec, plot: Plot, records: Sequence[SavedRecord]) -> Grid:
    """The data of a plot: a point for each row and seed that has both numbers.

    Args:
        spec: the table.
        plot: one of its plots.
        records: every record there is, the oldest first.
    """
    grid = Grid(spec.title, points.HEADERS)
    _, usable = scored(records, spec)
    for row in spec.rows:
        for found, _ in choose(row, usable, spec):
            x, y = found.number(plot.x), found.number(plot.y)
            if x is not None and y is not None:
                grid.rows.append([row.label, str(found.record["seed"]), repr(x), repr(y)])
    return grid


def _ours(
    column: Column,
    row: Row,
    spec: Spec,
    mine: Sequence[SavedRecord],
    baseline: Sequence[SavedRecord],
    names: Mapping[Path, str],
) -> str:
    if column.computed:
        known = column.key in row.computed
        return f"{row.computed[column.key]:,.{column.digits}f}{column.unit}" if known else "–"
    if column.setting or column.key in row.settings:
        return _setting(row.settings.get(column.key, column.setting), row, spec)
    if not column.measured:
        return "–"
    if column.against:
        ours, theirs = ([v for f in found if (v := f.number(column.against)) is not None] for found in (mine, baseline))
        return f"{mean(ours) - mean(theirs):+.{column.digits}f}" if ours and theirs else NOT_RUN
    if column.ratio:
        return _ratio(column, mine, baseline, names)
    values = [value for found in mine if (value := _value(column, found)) is not None]
    if not values:
        return NOT_RUN
    middle, least, most = (f"{value:.{column.digits}f}" for value in (mean(values), min(values), max(values)))
    if len(values) > 1:
        spread = f"{len(values)} seeds" if least == most else f"{least}–{most}, {len(values)} seeds"
        return f"{middle} ({spread})"
    error = _error(column, mine)
    return middle if error is None else f"{middle} ± {error:.{column.digits}f}"


def _value(column: Column, found: SavedRecord) -> float | None:
    """The number of one record; of a mean only where the record has all of them."""
    values = [found.number(key) for key in column.mean or [column.value]]
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return (exp(mean(known)) if column.exp else mean(known)) * column.factor


def _error(column: Column, mine: Sequence[SavedRecord]) -> float | None:
    """The standard error over the items of the test set, of a share of one record."""
    errors = [standard_error(found, column.value) for found in mine if column.value and not column.exp]
    known = [error * column.factor for error in errors if error is not None]
    return known[0] if len(known) == 1 else None


def _surely(baseline: Sequence[SavedRecord], mine: Sequence[SavedRecord], names: Mapping[Path, str]) -> list[str]:
    """How sure the differences of a row to the baseline are, of those seeds of which both have predictions."""
    pairs = [
        (one, two)
        for one in baseline
        for two in mine
        if one.record["seed"] == two.record["seed"] and has_predictions(one) and has_predictions(two)
    ]
    return [f"{names[two.path]} against {names[one.path]}: {said}" for one, two in pairs for said in sure(one, two)]


def _setting(key: str, row: Row, spec: Spec) -> str:
    """A value of the row's configuration; a class by its name, a key that there is not as a dash."""
    value = OmegaConf.select(composed(*spec.overrides(row)), key) if key else None
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:g}"
    return value.rpartition(".")[2] if isinstance(value, str) else str(value)


def _ratio(
    column: Column, mine: Sequence[SavedRecord], baseline: Sequence[SavedRecord], names: Mapping[Path, str]
) -> str:
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


def _left_out(every: Sequence[SavedRecord], usable: Sequence[SavedRecord], spec: Spec) -> list[str]:
    others = [found for found in every if found not in usable]
    sample = sum(found.record["corpus"] == "sample" for found in others)
    name = spec.corpus["name"]
    other = f"data other than {name}" if name else "other data"
    counts = {"the embedded sample corpus": sample, other: len(others) - sample}
    return [f"Left out: {count} scored record(s) of {what}." for what, count in counts.items() if count]

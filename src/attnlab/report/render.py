"""A paper's table: the published numbers beside those of our records."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from math import exp
from pathlib import Path
from statistics import mean

import pandas as pd
from omegaconf import OmegaConf

from attnlab.report import compression, context, curves, figure
from attnlab.report.grid import Grid, facts
from attnlab.report.match import choose, composed, protocol, scored, statistics
from attnlab.report.significance import has_predictions, standard_error, sure
from attnlab.report.spec import Column, Plot, Row, Spec
from attnlab.run.record import NOT_RUN
from attnlab.run.store import SavedRecord


def write_table(spec: Spec, records: Sequence[SavedRecord], stem: Path) -> list[Path]:
    """Write the table as Markdown, LaTeX and CSV, and its plots, curves and pictures if they have anything to show.

    Args:
        records: the oldest first.
        stem: the path of the files without suffix.
    """
    if spec.picture == "context":
        data = context.data(spec, records)
        data = data if (data["ms"] != NOT_RUN).any() else data.iloc[:0]
        draw = partial(context.draw, title=spec.title)
        paths = context.table(spec, records).write(stem, "md", "tex", "csv")
        return paths + figure.write(stem.with_name(f"{stem.name}_points"), data, draw)
    paths = table(spec, records).write(stem, "md", "tex", "csv")
    usable = scored(records, spec)[1] if spec.plots or spec.curves or spec.picture else []
    chosen = [(row, *pair) for row in spec.rows for pair in choose(row, usable, spec)]
    for plot in spec.plots:
        draw = partial(figure.scatter, plot=plot, title=spec.title)
        points = plot_points(plot, [(row.label, saved) for row, saved, _ in chosen])
        paths += figure.write(stem.with_name(f"{stem.name}_{plot.name}"), points, draw)
    exact = [(row, saved) for row, saved, wrong in chosen if not wrong]  # only these have curves and pictures
    if spec.curves:
        runs = [(row.label, int(saved.record["seed"]), saved.path.parent) for row, saved in exact]
        data, draw = curves.together(runs, spec.curves), partial(curves.draw_together, title=spec.title)
        paths += figure.write(stem.with_name(f"{stem.name}_curves"), data, draw)
    elif spec.picture and exact:
        paths += compression.pictures(exact[0][1], {spec.picture: stem.with_name(f"{stem.name}_{spec.picture}")})
    return paths


def plot_points(plot: Plot, records: Sequence[tuple[str, SavedRecord]]) -> pd.DataFrame:
    """The data of a plot: a point for each labelled record that has both numbers."""
    rows = [(label, saved.record["seed"], saved.number(plot.x), saved.number(plot.y)) for label, saved in records]
    return pd.DataFrame(rows, columns=figure.POINTS, dtype=object).dropna()


def table(spec: Spec, records: Sequence[SavedRecord]) -> Grid:
    """The table of a specification, filled from the records that stand for its rows; the oldest first."""
    marks = {name: f"[{'abcdefghijkl'[i]}]" for i, name in enumerate(spec.notes)}
    grid = Grid(spec.title, ["Model", *spec.facts.values()])
    for column in spec.columns:
        mark = f" {marks[column.note]}" if column.note else ""
        both = spec.published(column)
        grid.headers += [f"{column.label}{mark}, published", f"{column.label}, ours"] if both else [column.label + mark]
    grid.notes = [f"Published: {spec.source}." if any(map(spec.published, spec.columns)) else f"{spec.source}."]
    grid.notes += [f"{marks[name]} {text.strip()}" for name, text in spec.notes.items()]
    every, usable = scored(records, spec)
    filled = Filled(spec, records, {row.label: choose(row, usable, spec) for row in spec.rows if row.command})
    for row in spec.rows:
        cells = [f"{row.label} {marks[row.note]}" if row.note else row.label]
        sizes = {"parameters": f"{row.parameters:,}" if row.parameters else "–"}
        sizes |= {"cache": f"{row.cache:g}" if row.cache else "–"}
        cells += [str({**sizes, **row.facts}.get(key, "–")) for key in spec.facts]
        for column in spec.columns:
            if spec.published(column):
                cells.append(row.published.get(column.key, "–"))
            cells.append(filled.cell(column, row))
        grid.rows.append(cells)
    grid.list_records(filled.facts())
    grid.notes += filled.notes(errors=any(" ± " in cell for row in grid.rows for cell in row[1:]))
    grid.notes += _left_out(every, usable, spec) if spec.corpus else []
    grid.notes += filled.commands()
    return grid


class Filled:
    """Our numbers of a table.

    Args:
        records: of any task, the oldest first.
        chosen: by the label of a row the records that stand for it, each with what its recipe differs in.
    """

    def __init__(
        self, spec: Spec, records: Sequence[SavedRecord], chosen: Mapping[str, Sequence[tuple[SavedRecord, list[str]]]]
    ) -> None:
        self.spec, self.records, self.chosen = spec, records, chosen
        paths = (saved.path for pairs in chosen.values() for saved, _ in pairs)
        self.names = {path: f"R{i}" for i, path in enumerate(paths, 1)}

    def of(self, row: Row) -> list[SavedRecord]:
        """The records that stand for a row."""
        return [saved for saved, _ in self.chosen.get(row.label, [])]

    def baseline(self, row: Row) -> list[SavedRecord]:
        """The records of the recipe of a row's baseline: a difference to one of another recipe would have no mark."""
        return [saved for saved, wrong in self.chosen.get(row.baseline or self.spec.baseline, []) if not wrong]

    def cell(self, column: Column, row: Row) -> str:
        """Our number of a row."""
        if column.statistic:
            sizes = statistics(row, self.records)
            size = sizes.get(column.statistic)
            return ("–" if sizes else NOT_RUN) if size is None else f"{size:,.{column.digits}f}"
        if column.computed:
            is_known = row.command and column.key in row.computed
            return f"{row.computed[column.key]:,.{column.digits}f}{column.unit}" if is_known else "–"
        if row.command and (column.setting or column.key in row.settings):
            return _setting(row.settings.get(column.key, column.setting), row, self.spec)
        if not row.command or not column.measured:
            return "–"
        if column.ratio:
            return self._ratio(column, row)
        if column.against:
            ours, others = (_numbers(column.against, records) for records in (self.of(row), self.baseline(row)))
            return f"{mean(ours) - mean(others):+.{column.digits}f}" if ours and others else NOT_RUN
        values = [value for saved in self.of(row) if (value := _value(column, saved)) is not None]
        if not values:
            return NOT_RUN
        middle, least, most = (f"{value:.{column.digits}f}" for value in (mean(values), min(values), max(values)))
        if len(values) > 1:
            spread = f"{len(values)} seeds" if least == most else f"{least}–{most}, {len(values)} seeds"
            return f"{middle} ({spread})"
        errors = [standard_error(saved, column.value) for saved in self.of(row) if column.value and not column.exp]
        known = [error * column.factor for error in errors if error is not None]
        return f"{middle} ± {known[0]:.{column.digits}f}" if len(known) == 1 else middle

    def _ratio(self, column: Column, row: Row) -> str:
        """The baseline's number divided by the row's, of the newest two records that were measured in the same way."""
        records, baseline = (
            sorted(of_row, key=lambda saved: saved.record["started"], reverse=True)
            for of_row in (self.of(row), self.baseline(row))
        )
        pairs = [(base, saved) for saved in records for base in baseline if protocol(base) == protocol(saved)]
        for base, saved in pairs:
            above, below = base.number(column.ratio), saved.number(column.ratio)
            if above is not None and below:
                return f"{above / below:.{column.digits}f} ({self.names[base.path]}/{self.names[saved.path]})"
        return "protocols differ" if records and baseline and not pairs else NOT_RUN

    def facts(self) -> list[dict[str, str]]:
        """The facts of each record in the table."""
        pairs = [(label, saved) for label, chosen in self.chosen.items() for saved, _ in chosen]
        return [{"Record": "", "Row": label} | facts(self.names[saved.path], saved) for label, saved in pairs]

    def notes(self, errors: bool) -> list[str]:
        """Which records are not of the row's recipe, and how sure the differences to the baselines are.

        Args:
            errors: whether the table has standard errors.
        """
        lines = [
            f"{self.names[saved.path]} {label}: NOT the row's recipe: {', '.join(wrong)}"
            for label, chosen in self.chosen.items()
            for saved, wrong in chosen
            if wrong
        ]
        lines += ["±: standard error over the items of the test set, of one seed."] * errors
        for row in self.spec.rows:
            if row.label == (row.baseline or self.spec.baseline):
                continue
            for base, saved in product(self.baseline(row), self.of(row)):
                if base.record["seed"] == saved.record["seed"] and has_predictions(base) and has_predictions(saved):
                    about = f"{self.names[saved.path]} against {self.names[base.path]}"
                    lines += [f"{about}: {line}" for line in sure(base, saved)]
        return lines

    def commands(self) -> list[str]:
        """The commands of the rows that have no record. Several rows may need the same run."""
        spec = self.spec
        measured = any(column.measured for column in spec.columns)
        missing = [row for row in spec.rows if measured and row.command and not self.chosen[row.label]]
        missing = [row for row in missing if not row.split or not statistics(row, self.records)]
        labels: dict[str, list[str]] = {}
        for row in missing:
            labels.setdefault(spec.row_command(row), []).append(row.label)
        lines = [f"first, for every row, `{spec.before}`"] * bool(missing and spec.before)
        lines += [f"{', '.join(names)}: `{command}`" for command, names in labels.items()]
        lines += [f"then, with the run directory of each row, `{spec.after}`"] * bool(missing and spec.after)
        return [f"{NOT_RUN}: {line}" for line in lines]


def _numbers(key: str, records: Sequence[SavedRecord]) -> list[float]:
    return [value for saved in records if (value := saved.number(key)) is not None]


def _value(column: Column, saved: SavedRecord) -> float | None:
    """The number of one record; of a mean only where the record has all of them."""
    keys = column.mean or [column.value]
    values = [value for key in keys for value in _numbers(key, [saved])]
    if len(values) < len(keys):
        return None
    return (exp(mean(values)) if column.exp else mean(values)) * column.factor


def _setting(key: str, row: Row, spec: Spec) -> str:
    """A value of the row's configuration, a class by its name. Missing keys are shown as –."""
    value = OmegaConf.select(composed(*spec.overrides(row)), key) if key else None
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:g}"
    return value.rpartition(".")[2] if isinstance(value, str) else str(value)


def _left_out(every: Sequence[SavedRecord], usable: Sequence[SavedRecord], spec: Spec) -> list[str]:
    others = [saved for saved in every if saved not in usable]
    sample = sum(saved.record["corpus"] == "sample" for saved in others)
    name = spec.corpus["name"]
    other = f"data other than {name}" if name else "other data"
    counts = {"the embedded sample corpus": sample, other: len(others) - sample}
    return [f"Left out: {count} scored record(s) of {what}." for what, count in counts.items() if count]

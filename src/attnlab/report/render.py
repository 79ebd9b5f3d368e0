"""A paper's table: the published numbers beside those of our records."""

from collections.abc import Sequence
from functools import partial
from math import exp, isnan
from pathlib import Path
from statistics import mean

import pandas as pd
from omegaconf import OmegaConf

from attnlab.report import bench, compression, figure
from attnlab.report.match import choose, composed, protocol, scored, statistics
from attnlab.report.significance import OverSeeds, holm, over_seeds, standard_error
from attnlab.report.spec import Column, Row, Spec
from attnlab.report.table import Grid, facts
from attnlab.run.record import EMBEDDED, NOT_RUN, corpus_of
from attnlab.run.store import SavedRecord

P, WELCH = "p (by Holm)", "Welch's p (by Holm)"  # headers of the tests of a paired column


def write_table(spec: Spec, records: Sequence[SavedRecord], stem: Path) -> list[Path]:
    """Write the table as Markdown, LaTeX and CSV, and its plots, curves and pictures that have data."""
    if spec.picture == "context":
        data = bench.over_the_context(spec, records)
        data = data if (data["ms"] != NOT_RUN).any() else data.iloc[:0]
        paths = bench.context_table(spec, records).write(stem, "md", "tex", "csv")
        draw = partial(bench.context_plot, title=spec.title)
        return paths + figure.write(stem.with_name(f"{stem.name}_points"), data, draw)
    paths = table(spec, records).write(stem, "md", "tex", "csv")
    if not (spec.plots or spec.curves or spec.picture):
        return paths
    usable = scored(records, spec)[1]
    chosen = [(row, saved) for row in spec.rows for saved in choose(row, usable, spec)]
    for plot in spec.plots:
        points = [(row.label, f.record["seed"], f.number(plot.x), f.number(plot.y)) for row, f in chosen]
        data = pd.DataFrame(points, columns=figure.POINTS, dtype=object).dropna()
        draw = partial(figure.scatter, plot=plot, title=spec.title)
        paths += figure.write(stem.with_name(f"{stem.name}_{plot.name}"), data, draw)
    if spec.curves:
        runs = [(row.label, saved) for row, saved in chosen]
        draw = partial(figure.draw_together, title=spec.title)
        paths += figure.write(stem.with_name(f"{stem.name}_curves"), figure.together(runs, spec.curves), draw)
    elif spec.picture and chosen:
        paths += compression.picture(chosen[0][1], spec.picture, stem.with_name(f"{stem.name}_{spec.picture}"))
    return paths


def table(spec: Spec, records: Sequence[SavedRecord]) -> Grid:
    """The table of a specification, filled from the records that stand for its rows; `records`: the oldest first."""
    marks = {name: f"[{'abcdefghijkl'[i]}]" for i, name in enumerate(spec.notes)}
    grid = Grid(spec.title, ["Model", *spec.facts.values()])
    for column in spec.columns:
        mark = f" {marks[column.note]}" if column.note else ""
        both = spec.published(column)
        grid.headers += [f"{column.label}{mark}, published", f"{column.label}, ours"] if both else [column.label + mark]
        grid.headers += [P] * bool(column.paired) + [WELCH] * column.welch
    grid.notes = [f"Published: {spec.source}." if any(map(spec.published, spec.columns)) else f"{spec.source}."]
    grid.notes += [f"{marks[name]} {text.strip()}" for name, text in spec.notes.items()]
    filled = Filled(spec, records)
    for row in spec.rows:
        cells = [f"{row.label} {marks[row.note]}" if row.note else row.label]
        sizes = {"parameters": f"{row.parameters:,}" if row.parameters else "–"}
        sizes |= {"cache": f"{row.cache:g}" if row.cache else "–"}
        cells += [str({**sizes, **row.facts}.get(key, "–")) for key in spec.facts]
        for column in spec.columns:
            if spec.published(column):
                cells.append(row.published.get(column.key, "–"))
            cells += filled.paired(column, row) if column.paired else [filled.cell(column, row)]
        grid.rows.append(cells)
    grid.list_records(filled.facts())
    if any(" ± " in cell for row in grid.rows for cell in row[1:]):
        grid.notes.append("±: standard error over the items of the test set, of one seed.")
    grid.notes += filled.left_out() + filled.commands()
    return grid


class Filled:
    """Our numbers of a table, from the records that stand for its rows."""

    def __init__(self, spec: Spec, records: Sequence[SavedRecord]) -> None:
        self.spec, self.records = spec, records
        self.scored, self.usable = scored(records, spec)
        self.chosen = {row.label: choose(row, self.usable, spec) for row in spec.rows}
        paths = (saved.path for records in self.chosen.values() for saved in records)
        self.names = {path: f"R{i}" for i, path in enumerate(paths, 1)}
        self.tests: dict[str, dict[str, OverSeeds]] = {}
        for column in (column for column in spec.columns if column.paired):
            pairs = {row.label: self._pairs(column, row) or [] for row in spec.rows}
            self.tests[column.key] = {label: over_seeds(both) for label, both in pairs.items() if len(both) > 1}

    def cell(self, column: Column, row: Row) -> str:
        """Our number of a row."""
        ours, others = self.chosen[row.label], self.chosen.get(row.baseline or self.spec.baseline, [])
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
            return self._ratio(column, ours, others)
        if column.against:
            after, before = (_numbers(column.against, records) for records in (ours, others))
            return f"{mean(after) - mean(before):+.{column.digits}f}" if after and before else NOT_RUN
        values = [value for saved in ours if (value := _value(column, saved)) is not None]
        if not values:
            return NOT_RUN
        middle, least, most = (f"{value:.{column.digits}f}" for value in (mean(values), min(values), max(values)))
        if len(values) > 1:
            spread = f"{len(values)} seeds" if least == most else f"{least}–{most}, {len(values)} seeds"
            return f"{middle} ({spread})"
        errors = [standard_error(saved, column.value) for saved in ours if column.value and not column.exp]
        known = [error * column.factor for error in errors if error is not None]
        return f"{middle} ± {known[0]:.{column.digits}f}" if len(known) == 1 else middle

    def paired(self, column: Column, row: Row) -> list[str]:
        """The row's difference from its baseline over the seeds, its p and that of Welch's test, each with Holm's."""
        cells, tests = 2 + column.welch, self.tests[column.key]
        if not row.command or self._pairs(column, row) is None:
            return ["–"] * cells
        if row.label not in tests:
            return [NOT_RUN] * cells
        test = tests[row.label]
        middle, low, high = (f"{value:+.{column.digits}f}" for value in (test.mean, test.low, test.high))
        if isnan(test.p):
            return [f"{middle} (each of {test.count} seeds)", *["–"] * (cells - 1)]
        planned = sum(bool(other.command) and self._pairs(column, other) is not None for other in self.spec.rows)
        known = [label for label in tests if not isnan(tests[label].p)]
        shown = []
        for name in ("p", "welch")[: cells - 1]:
            values = [getattr(tests[label], name) for label in known]
            adjusted = holm(values, planned)[known.index(row.label)]
            shown.append(f"{getattr(test, name):.2g} ({adjusted:.2g})")
        return [f"{middle} ({low} to {high}, n = {test.count})", *shown]

    def _pairs(self, column: Column, row: Row) -> list[tuple[float, float]] | None:
        """The baseline's and the row's number of each seed that both have; None: the row is its own baseline."""
        label = row.baseline or self.spec.baseline
        if label == row.label:
            return None
        numbers = [
            {saved.record["seed"]: number * column.factor for saved in self.chosen.get(name, [])
             if (number := saved.number(column.paired)) is not None}
            for name in (label, row.label)
        ]  # fmt: skip
        return [(numbers[0][seed], number) for seed, number in numbers[1].items() if seed in numbers[0]]

    def _ratio(self, column: Column, ours: Sequence[SavedRecord], others: Sequence[SavedRecord]) -> str:
        """The baseline's number divided by the row's, from the newest two records with the same protocol."""
        new, base = (sorted(records, key=lambda r: r.record["started"], reverse=True) for records in (ours, others))
        pairs = [(before, saved) for saved in new for before in base if protocol(before) == protocol(saved)]
        for before, saved in pairs:
            above, below = before.number(column.ratio), saved.number(column.ratio)
            if above is not None and below:
                return f"{above / below:.{column.digits}f} ({self.names[before.path]}/{self.names[saved.path]})"
        return "protocols differ" if ours and others and not pairs else NOT_RUN

    def facts(self) -> list[dict[str, str]]:
        """The facts of each record in the table."""
        pairs = [(label, saved) for label, chosen in self.chosen.items() for saved in chosen]
        return [{"Record": "", "Row": label} | facts(self.names[saved.path], saved) for label, saved in pairs]

    def left_out(self) -> list[str]:
        """The numbers of scored records that read another corpus."""
        if not self.spec.corpus:
            return []
        others = [corpus_of(saved.record) for saved in self.scored if saved not in self.usable]
        sample, name = sum(corpus.startswith(EMBEDDED) for corpus in others), self.spec.corpus["name"]
        other = f"data other than {name}" if name else "other data"
        counts = {"the embedded sample corpus": sample, other: len(others) - sample}
        return [f"Left out: {count} scored record(s) of {what}." for what, count in counts.items() if count]

    def commands(self) -> list[str]:
        """The commands of the rows without a record."""
        if not any(column.measured for column in self.spec.columns):
            return []
        missing = [row for row in self.spec.rows if row.command and not self.chosen[row.label]]
        return self.spec.commands([row for row in missing if not row.split or not statistics(row, self.records)])


def _numbers(key: str, records: Sequence[SavedRecord]) -> list[float]:
    return [value for saved in records if (value := saved.number(key)) is not None]


def _value(column: Column, saved: SavedRecord) -> float | None:
    """The number of one record; None if it lacks the number, or one of those in a mean."""
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

"""The specification of a table: experiments/<paper>/<table>.yaml, read and checked."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from attnlab.errors import ConfigError

SIZES = {"parameters": "Parameters", "cache": "Cache per token and layer"}


@dataclass(frozen=True)
class Column:
    """A column of a table. One of `value`, `ratio`, `against` and `computed` gives the source of our number.

    Args:
        key: its name in a row's `published` and `computed`.
        label: its heading.
        value: a dotted key of the record.
        ratio: the same; the baseline's number divided by the row's.
        against: the same; the row's number minus the baseline's.
        computed: the row's `computed` number.
        digits: decimals of our number.
        note: the name of one of the specification's notes.
    """

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
    """A row of a table.

    Args:
        label: its first cell.
        published: the published numbers by the key of their column, as they are printed.
        command: the row's own overrides, `task=mustc scale=paper attention=mha`; empty for a number that the paper
            quotes from elsewhere.
        note: the name of one of the specification's notes.
        corpus: how the name of this row's corpus begins, in a table of several; empty: as the specification says.
        parameters: the model's parameters.
        cache: cached numbers per token and layer.
        facts: further cells that say what the row is.
        computed: numbers that follow from the configuration; tests hold them, and `facts`, to mode=describe.
    """

    label: str
    published: Mapping[str, str]
    command: str = ""
    note: str = ""
    corpus: str = ""
    parameters: int = 0
    cache: float = 0
    facts: Mapping[str, str] = field(default_factory=dict)
    computed: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Plot:
    """A point for each row.

    Args:
        x: a dotted key of the records.
        y: the same.
        x_label: what x is, with its unit.
        y_label: the same of y.
        log_x: whether equal factors of x are equally far apart.
    """

    x: str
    y: str
    x_label: str
    y_label: str
    log_x: bool = False


@dataclass(frozen=True)
class Spec:
    """A table.

    Args:
        title: the heading.
        source: where the published numbers stand.
        corpus: `name`, how the name of the rows' corpus begins, and `train`, least and most training segments, or
            questions of the test split where nothing is trained.
        baseline: the label of the row that ratios and differences refer to.
        command: the command of every row, with `{row}` where the row's own overrides go.
        columns: the columns after those of `facts`.
        rows: the rows.
        before: a command to run before those of the rows.
        facts: headings of columns that say what a row is, by the key in its `facts`.
        notes: text by name, for columns and rows to refer to.
        modes: the modes whose records count.
        plot: a figure of the same rows.
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
    modes: Sequence[str] = ("train", "test")
    plot: Plot | None = None

    def published(self, column: Column) -> bool:
        """Whether any row has a published number for a column; a comparison of our own has none."""
        return any(column.key in row.published for row in self.rows)

    def row_command(self, row: Row) -> str:
        """The command that measures a row."""
        return self.command.format(row=row.command)

    def overrides(self, row: Row) -> list[str]:
        """The settings in a row's command, as :func:`attnlab.config.check.compose` takes them."""
        return [word for word in shlex.split(self.row_command(row)) if "=" in word]


def read_spec(path: Path) -> Spec:
    """The specification in a YAML file.

    Args:
        path: the file, for instance experiments/mtla/table1.yaml.

    Raises:
        ConfigError: the file is missing, or is not such a specification.
    """
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
    if "{row}" not in spec.command:
        raise ConfigError(f"{path}: command {spec.command!r} has no {{row}} for the rows' own overrides")
    if unknown := ({c.note for c in spec.columns} | {r.note for r in spec.rows}) - {"", *spec.notes}:
        raise ConfigError(f"{path}: note {sorted(unknown)[0]!r} is not among its notes")
    return spec

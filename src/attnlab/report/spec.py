"""The specification of a table: experiments/<paper>/<table>.yaml, read and checked."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from attnlab.errors import ConfigError, nearest
from attnlab.report.figure import Panel, Plot
from attnlab.run.record import NOT_RUN

OF_THE_COMMAND = ("mode=", "checkpoint=")  # words of `after` that are not part of the row's configuration
PICTURES = ("ranks", "fusion", "context")
SIZES = {"parameters": "Parameters", "cache": "Cache per token and layer"}


@dataclass(frozen=True)
class Column:
    """A column of a table. One of the keys from `value` to `statistic` gives our number.

    Args:
        key: its name in a row's `published` and `computed`.
        value, mean: a dotted key of the record; dotted keys whose mean is our number.
        ratio, against: a dotted key. The baseline's number divided by the row's; the row's minus the baseline's.
        paired: a dotted key. The row's minus the baseline's of the same seed: mean, 95 % interval and seeds, and p of
            Student's paired t-test, also with Holm's correction for all rows with a command.
        welch: whether p of Welch's test stands beside it, where two runs share only the number of their seed.
        setting: a dotted key of the configuration of the row's command; a row may name another.
        statistic: a key of `statistics` in records of mode=statistics, for the row's split.
        described: the dotted key that mode=describe fills for a computed column; tests compare them.
        factor: a factor of our number, 100 for a share in percent.
        exp: take exp of the record's number: the perplexity of a loss in nats.
        unit: text that follows our number without a space: M, %.
        note: the name of one of the specification's notes.
    """

    key: str
    label: str
    value: str = ""
    mean: Sequence[str] = ()
    ratio: str = ""
    against: str = ""
    paired: str = ""
    welch: bool = False
    computed: bool = False
    setting: str = ""
    statistic: str = ""
    described: str = ""
    factor: float = 1
    exp: bool = False
    digits: int = 2
    unit: str = ""
    note: str = ""

    @property
    def measured(self) -> bool:
        """Whether our number comes from a record, so that a row needs a run."""
        return bool(self.value or self.mean or self.ratio or self.against or self.paired or self.statistic)


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Args:
        published: the published numbers as printed, by the key of their column.
        command: the row's own overrides; empty for a number that the paper quotes from elsewhere.
        baseline: the label of the row to which its ratios and differences refer; empty: the specification's.
        start: the overrides of the run that must exist first, if the command names it by `model=`.
        differs: keys of columns whose published number does not follow from the other published cells or from the
            configuration. A note explains it. Tests compare all other cells with their published number.
        corpus: the beginning of the corpus' name, in a table of several; "sample of TASK" for an embedded one.
        split, train: in a table of statistics, the split and the least and most items of the training split.
        cache: cached numbers per token and layer.
        facts: further cells that describe the row.
        computed: numbers that follow from the configuration; tests compare them and `facts` with mode=describe.
        settings: dotted keys of the configuration by column key, in place of the columns' own.
    """

    label: str
    published: Mapping[str, str]
    command: str = ""
    note: str = ""
    baseline: str = ""
    start: str = ""
    differs: Sequence[str] = ()
    corpus: str = ""
    split: str = ""
    train: Sequence[int] = ()
    parameters: int = 0
    cache: float = 0
    facts: Mapping[str, str] = field(default_factory=dict)
    computed: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Spec:
    """A table.

    Args:
        corpus: `name`, the beginning of the corpus' name, and `train`, the least and most training segments (test
            questions if nothing is trained). A table without measured columns has neither.
        baseline: the label of the row to which ratios and differences refer, unless a row names another.
        command: the command of every row, with `{row}` in place of the row's own overrides.
        before: a command to run before those of the rows.
        after: a command to run after that of each row, with RUN for its run directory; its record counts.
        facts: headings of columns that describe a row, by the key in its `facts`.
        notes: texts by name, for columns and rows.
        picture: "ranks" of heads or "fusion" matrices of the first row with a run. "context": decoding over the context
            from records of mode=bench, which name a row's mechanism by its fact "variant".
    """

    title: str
    source: str
    command: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    baseline: str = ""
    corpus: Mapping[str, Any] = field(default_factory=dict)
    before: str = ""
    after: str = ""
    facts: Mapping[str, str] = field(default_factory=lambda: dict(SIZES))
    notes: Mapping[str, str] = field(default_factory=dict)
    modes: Sequence[str] = ("train", "test")
    plots: Sequence[Plot] = ()
    curves: Sequence[Panel] = ()
    picture: str = ""

    def published(self, column: Column) -> bool:
        """Whether any row has a published number for a column."""
        return any(column.key in row.published for row in self.rows)

    @property
    def quality(self) -> str:
        """The dotted key of the first number of quality that a column shows; empty if nothing is measured."""
        keys = (key for column in self.columns for key in (column.value, *column.mean))
        return next((key for key in keys if key.startswith("quality.")), "")

    def row_command(self, row: Row) -> str:
        """The command that measures a row."""
        return self.command.format(row=row.command)

    def commands(self, rows: Sequence[Row]) -> list[str]:
        """Notes with the commands that measure these rows. Several rows may need the same run."""
        labels: dict[str, list[str]] = {}
        for row in rows:
            labels.setdefault(self.row_command(row), []).append(row.label)
        lines = [f"first, for every row, `{self.before}`"] * bool(rows and self.before)
        lines += [f"{', '.join(names)}: `{command}`" for command, names in labels.items()]
        lines += [f"then, with the run directory of each row, `{self.after}`"] * bool(rows and self.after)
        return [f"{NOT_RUN}: {line}" for line in lines]

    def overrides(self, row: Row) -> list[str]:
        """The settings in a row's command for :func:`attnlab.config.check.compose`, without a run in `model=`."""
        after = [word for word in shlex.split(self.after) if not word.startswith(OF_THE_COMMAND)]
        words = [word for word in [*shlex.split(self.row_command(row)), *after] if "=" in word]
        return [word for word in words if not (row.start and word.startswith("model="))]


def read_spec(path: Path) -> Spec:
    """Read a specification, for instance experiments/mtla/table1.yaml; ConfigError if it is missing or wrong."""
    try:
        plain = yaml.safe_load(path.read_text(encoding="utf-8"))
        parts = {"columns": Column, "rows": Row, "plots": Plot, "curves": Panel}
        spec = Spec(**plain | {key: [part(**item) for item in plain.get(key, ())] for key, part in parts.items()})
    except OSError as error:
        others = path.parent.parent.glob("*/*.yaml")
        near = nearest(str(path), (str(other) for other in others if other.name[:5] == path.name[:5]))
        raise ConfigError(f"{path}: cannot be read ({error.strerror}){near}") from error
    except (yaml.YAMLError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: not the specification of a table: {' '.join(str(error).split())}") from error
    if problem := next(_problems(spec), ""):
        raise ConfigError(f"{path}: {problem}")
    return spec


def _problems(spec: Spec) -> Iterator[str]:
    """The errors of a specification."""
    if any(c.measured and not c.statistic for c in spec.columns) and not (spec.corpus and spec.quality):
        yield "measured columns need `corpus` and a column of quality"
    if spec.picture not in ("", *PICTURES):
        yield f"{spec.picture!r}: expected {' or '.join(PICTURES)}"
    if "{row}" not in spec.command:
        yield f"command {spec.command!r} has no {{row}} for the rows' own overrides"
    for note in [column.note for column in spec.columns] + [row.note for row in spec.rows]:
        if note and note not in spec.notes:
            yield f"note {note!r} is not among its notes{nearest(note, list(spec.notes))}"
    rows = {row.label: row for row in spec.rows if row.command}
    compares = any(column.ratio or column.against or column.paired for column in spec.columns)
    for row in rows.values():
        label = row.baseline or spec.baseline
        if label not in rows and (label or compares):
            yield f"{row.label}: baseline {label!r} is the label of no row with a command{nearest(label, list(rows))}"
        elif label and rows[label].corpus != row.corpus:
            yield f"{row.label}: its baseline {label!r} has another corpus"

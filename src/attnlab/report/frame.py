"""Records as one data frame, of which tables and figures are views."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pandas as pd

from attnlab.errors import DataError
from attnlab.run.record import NOT_RUN
from attnlab.run.store import SavedRecord


def frame(records: Iterable[SavedRecord], **columns: str | Callable[[SavedRecord], Any]) -> pd.DataFrame:
    """A row for each record, with the record in the column `saved`.

    Values keep their types, so that they are written as the record has them. A value that is missing is None.

    Args:
        columns: for each further column a dotted key of the record, or a function of the record.
    """
    rows = [
        {"saved": saved} | {name: get(saved) if callable(get) else _value(saved, get) for name, get in columns.items()}
        for saved in records
    ]
    return pd.DataFrame(rows, columns=["saved", *columns], dtype=object)


def _value(saved: SavedRecord, dotted: str) -> Any:
    value: Any = saved.record
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def number(dotted: str) -> Callable[[SavedRecord], float | None]:
    """A column of numbers: the value of a dotted key, None where nothing was measured."""
    return lambda saved: saved.number(dotted)


def known(values: Iterable[float | None]) -> list[float]:
    """The values that were measured."""
    return [value for value in values if not pd.isna(value)]  # type: ignore[misc]


def finished(records: Iterable[SavedRecord], is_of: Callable[[SavedRecord], Any], what: str) -> list[SavedRecord]:
    """The finished records for which `is_of` is true; `what` they are of, for the error.

    Raises:
        DataError: there is none.
    """
    chosen = [saved for saved in records if saved.record["status"] == "finished" and is_of(saved)]
    if not chosen:
        raise DataError(f"no finished record {what} among these records")
    return chosen


def spread(values: Iterable[float], form: str, error: float | None = None) -> str:
    """Mean ± standard deviation; `not run` without values, or where one is missing.

    Args:
        form: the format of both: .2f.
        error: stands in place of the standard deviation of a single value.
    """
    values = list(values)
    if not values or any(map(pd.isna, values)):
        return NOT_RUN
    width = stdev(values) if len(values) > 1 else error
    return f"{mean(values):{form}}" + ("" if width is None or pd.isna(width) else f" ± {width:{form}}")


def read_runs(path: Path, headers: Sequence[str], columns: Sequence[str], numbers: Sequence[str]) -> pd.DataFrame:
    """A runs.csv, the numbers in a table of runs whose records are not committed.

    Args:
        headers: the first line that the file must have.
        columns: their names in the frame, which are unique.
        numbers: those of `columns` that are numbers; `not run` and empty cells become NaN.

    Raises:
        DataError: the file is something else.
    """
    try:
        runs = pd.read_csv(path, header=None, names=list(columns), dtype=str, keep_default_na=False, index_col=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error
    if runs.empty or list(runs.iloc[0]) != list(headers):
        raise DataError(f"{path}: line 1: expected the columns {', '.join(headers)}")
    runs = runs.iloc[1:].reset_index(drop=True)
    for column in numbers:
        texts = runs[column]
        runs[column] = pd.to_numeric(texts.where(~texts.isin([NOT_RUN, ""])), errors="coerce")
        wrong = runs[column].isna() & ~texts.isin([NOT_RUN, ""])
        if wrong.any():
            raise DataError(
                f"{path}: line {wrong.idxmax() + 2}: {column}: expected a number, got {texts[wrong.idxmax()]!r}"
            )
    return runs

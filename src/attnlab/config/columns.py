"""The columns of own data, read from the first row of each table before torch is imported."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnlab.errors import DataError

TABLES = ("attnlab.data.Table", "attnlab.data.table.Table")  # `_target_` of readers of such tables
SPELLINGS = {"train": ("train", "training"), "dev": ("dev", "valid", "val", "validation"), "test": ("test",)}
TOGETHER = ("data", "manifest", "metadata")
SUFFIXES = (".jsonl", ".json", ".csv", ".tsv")


def tables(root: Path, spellings: Sequence[str], suffixes: Sequence[str] = SUFFIXES) -> list[Path]:
    """The files of `root` with one of these names; at most one is expected.

    Args:
        root: of the corpus.
        spellings: names without suffix.
        suffixes: of the kinds of tables.
    """
    return [path for name in spellings for suffix in suffixes if (path := root / f"{name}{suffix}").is_file()]


def check_columns(reader: Mapping[str, Any], root: Path) -> None:
    """Refuse names of columns that a table does not have.

    Args:
        reader: the node `task.data.reader`; one that is no table is not looked at.
        root: of the corpus.

    Raises:
        DataError: names the file, the column, those that there are, and the key.
    """
    if reader.get("_target_") not in TABLES:
        return
    wanted = {key: reader.get(key, default) for key, default in (("source", "source"), ("target", "target"))}
    wanted |= {"audio": reader["audio"]} if reader.get("audio") else {}
    for spellings in (*SPELLINGS.values(), TOGETHER):
        for path in tables(root, spellings):
            found = _header(path)
            lacking = [(key, column) for key, column in wanted.items() if found and column not in found]
            if found and lacking:
                key, column = lacking[0]
                raise DataError(
                    f"{path}: the column {column!r} is missing (found: {', '.join(found)}); task.data.reader.{key} "
                    "names it"
                )


def _header(path: Path) -> list[str] | None:
    """The columns of a table by its first row; None where that row is none: the reader then says what is wrong."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            if path.suffix in (".csv", ".tsv"):
                return next(csv.reader(file, delimiter="\t" if path.suffix == ".tsv" else ","), None)
            row = json.loads(next((line for line in file if line.strip()), "null"))
    except (OSError, ValueError, csv.Error):
        return None
    return [str(key) for key in row] if isinstance(row, dict) else None

"""`attnlab runs`: list, compare and remove the runs in a folder, and show the commands that a table still lacks.

All values come from the records in the folder (:mod:`attnlab.run.store`). Nothing here imports torch.
"""

import logging
import sys
from collections.abc import Callable, Collection, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from attnlab.callbacks.summary import label
from attnlab.config.batch import counted
from attnlab.config.build import leaves
from attnlab.errors import ConfigError, DataError, LockedError, nearest, printable
from attnlab.report.significance import standard_error, sure
from attnlab.run import store
from attnlab.run.console import StderrHandler
from attnlab.run.directory import near, refuse_live
from attnlab.run.record import EMBEDDED, NOT_RUN, RECORD
from attnlab.run.store import BROKEN, OUTPUTS, LedgerEntry, SavedRecord, collect, finite

HELP = """\
attnlab runs [KEY=VALUE ...] [FOLDER]                 list the runs in FOLDER (default: outputs), the oldest first;
                                                      sort=quality: the best first, by task, corpus and metric
attnlab runs compare RUN RUN [RUN ...]                settings in which runs differ, their numbers, and how sure
                                                      their differences are (predictions of one test set)
attnlab runs missing SPEC [SPEC ...] [FOLDER]         the commands of a table's rows that are still to be run
attnlab runs prune WHAT [KEY=VALUE ...] [FOLDER]      show what would be removed; with --yes, remove it
    WHAT: failed, interrupted, broken (a record that cannot be read)

KEY: {keys}
VALUE: several with commas; * and ? stand for other letters; null for none. tags=a,b: one of the two.
Examples: attnlab runs task=mustc attention=mtla,mla status=finished    attnlab runs attention=tpa* tags=final
          attnlab runs missing experiments/mtla/table1.yaml             attnlab runs prune failed task=ptb --yes"""
FILTERS = (
    "status", "mode", "task", "attention", "compress", "scale", "experiment", "stride", "rank", "seed", "tags",
    "recipe", "commit",
)  # fmt: skip
HEADINGS = (
    "started (UTC)", "status", "mode", "task", "corpus", "mechanism", "scale", "seed", "updates", "quality", "cache",
    "directory", "parent",
)  # fmt: skip
NUMERIC = ("seed", "updates", "cache")
SORTS = ("started", "quality")
LOWER = ("perplexity", "wer", "loss", "error")  # metrics of which lower values are better
PRUNED = ("failed", "interrupted", BROKEN)
NUMBERS = ("quality", "parameters", "kv_cache", "training", "inference")  # sections whose numbers are compared
Filters = dict[str, list[str]]
ABOUT = ("status", "started", "seed", "corpus", "identity.corpus", "environment.device", "environment.git")


def main(arguments: Sequence[str]) -> int:
    """Run the command in the words after `attnlab runs` and return the exit code, 0; ConfigError for wrong words."""
    logging.basicConfig(level=logging.WARNING, format="warning: %(message)s", handlers=[StderrHandler()])
    if {"-h", "--help"} & set(arguments):
        print(HELP.format(keys=", ".join(FILTERS)))
        return 0
    names, filters, yes = parsed(arguments)
    actions: dict[str, Callable[[Sequence[str], Filters], None]]
    actions = {"compare": compare, "missing": missing, "prune": partial(prune, yes=yes)}
    first = names[0] if names else ""
    if yes and first != "prune":
        raise ConfigError("--yes belongs to attnlab runs prune")
    if first in actions:
        if "sort" in filters:
            raise ConfigError(f"runs {first}: sort= belongs to the list of runs")
        actions[first](names[1:], filters)
        return 0
    if first and not Path(first).is_dir():
        near = nearest(first, list(actions))
        raise ConfigError(f"runs {first}: neither a folder nor one of {', '.join(actions)}{near}")
    order = filters.pop("sort", ["started"])
    if len(order) != 1 or order[0] not in SORTS:
        raise ConfigError(f"runs sort={','.join(order)}: expected one of {', '.join(SORTS)}{nearest(order[0], SORTS)}")
    runs = _chosen(_folder(names), filters)
    runs = sorted(runs, key=_best_first) if order == ["quality"] else runs
    rows = _aligned([HEADINGS, *map(_cells, runs)], right=[HEADINGS.index(name) for name in NUMERIC])
    errors = [f"  ({run.error[:120]})" if run.error else "" for run in runs]
    for row, error in zip(rows, ["", *errors], strict=True):
        print(row + printable(error))
    print(counted(len(runs), "run"), file=sys.stderr)
    return 0


def parsed(arguments: Sequence[str]) -> tuple[list[str], Filters, bool]:
    """The names in a command line, its filters, and whether it has --yes; ConfigError for an unknown option or key."""
    names, filters = [], {}
    for text in arguments:
        key, equals, value = text.partition("=")
        if text.startswith("-") and text != "--yes":
            raise ConfigError(f"runs {text}: no such option{nearest(text, ['--yes', '--help'])}")
        if not equals or Path(text).exists():
            names.append(text)
        elif key not in (*FILTERS, "sort"):
            raise ConfigError(f"runs {text}: runs are not filtered by {key}{nearest(key, list(FILTERS))}")
        else:
            filters[key] = value.strip("[]'\"").split(",")
    return [name for name in names if name != "--yes"], filters, "--yes" in names


def compare(names: Sequence[str], filters: Filters) -> None:
    """Print the settings in which runs differ, their numbers, and the significance of differences from the first."""
    if len(names) < 2 or filters:
        raise ConfigError("runs compare takes two or more run directories or records, and nothing else")
    files = [path / RECORD if (path := Path(name)).is_dir() else path for name in names]
    read = {saved.path: saved for saved in collect(files)}
    if unread := [file for file in files if file not in read]:
        raise DataError(f"{unread[0]}: not a record that can be read")
    runs = [read[file] for file in files]
    plain = [dict(leaves(run.record)) for run in runs]
    recipes = [dict(leaves(run.canonical)) for run in runs]
    rows = [["", *names], *([key, *(str(values.get(key, NOT_RUN)) for values in plain)] for key in ABOUT)]
    settings = {key: [str(recipe.get(key, "unset")) for recipe in recipes] for recipe in recipes for key in recipe}
    differing = [[key, *values] for key, values in sorted(settings.items()) if len(set(values)) > 1]
    rows += [[f"RECIPE{'' if differing else ' (the same)'}", *[""] * len(runs)], *differing]
    rows.append(["NUMBERS", *[""] * len(runs)])
    keys = dict.fromkeys(key for values in plain for key in values if key.partition(".")[0] in NUMBERS)
    for key in keys:
        first, *_ = numbers = [run.number(key) for run in runs]
        if any(number is not None for number in numbers):
            rows.append([key, *(_number(run, key, first) for run in runs)])
    print("\n".join(_aligned([list(map(printable, row)) for row in rows])))
    print(printable(f"SIGNIFICANCE, against {names[0]}"))
    for name, run in zip(names[1:], runs[1:], strict=True):
        print("\n".join(printable(f"{name}: {line}") for line in sure(runs[0], run)))


def missing(names: Sequence[str], filters: Filters) -> None:
    """Print the commands of the rows of tables without a finished record of the row's recipe."""
    from attnlab.report.bench import newest
    from attnlab.report.match import choose, scored
    from attnlab.report.spec import read_spec

    specs = {name: read_spec(Path(name)) for name in names if not Path(name).is_dir()}
    if not specs:
        raise ConfigError("runs missing takes specifications of tables, such as experiments/mtla/table1.yaml")
    roots = [name for name in names if name not in specs]
    runs = _chosen(_folder(roots), filters) if roots or OUTPUTS.is_dir() else []
    for name, spec in specs.items():
        files = [run.directory / RECORD for run in runs if run.status == "finished" and run.value("mode") in spec.modes]
        records = collect(files) if files else []
        rows = [row for row in spec.rows if row.command]
        if spec.picture == "context":
            lacking = [row for row in rows if newest(spec, row, records) is None]
        else:
            usable = scored(records, spec)[1]
            lacking = [row for row in rows if not choose(row, usable, spec)]
        commands = [spec.before] * bool(spec.before and lacking) + [spec.row_command(row) for row in lacking]
        for command in dict.fromkeys(commands):
            print(command)
        print(f"{name}: {len(lacking)} of {len(rows)} rows are still to be run", file=sys.stderr)


def prune(names: Sequence[str], filters: Filters, yes: bool) -> None:
    """Show the runs that would be removed, or with --yes remove them. Runs that stay are printed to stderr.

    Only run directories below the folder are removed. A run stays if it is in progress, is reached through a link, or
    holds a file that no run writes.
    """
    what = [name for name in names if name in PRUNED]
    rest = [name for name in names if name not in PRUNED]
    if not what:
        raise ConfigError(f"runs prune: say what to remove: {', '.join(PRUNED)}{nearest(' '.join(rest), PRUNED)}")
    root = _folder(rest)
    runs = [run for run in _chosen(root, filters, quiet=True) if run.status in what]
    gone = {run.directory: f"{run.status}: {run.error[:100]}" for run in runs}
    left = 0
    for path, why in gone.items():
        try:
            refuse_live(path)
            if reason := store.refusal(path, root):
                raise DataError(reason)
            size = sum(file.lstat().st_size for file in path.rglob("*") if not file.is_dir()) / 2**20
            if yes:
                store.remove(path, root, what)
            print(printable(f"{path}  {size:,.1f} MiB  {why}"))
        except (LockedError, DataError) as error:
            left += 1
            print(printable(f"{path}: left: {' '.join(str(error).split())}"), file=sys.stderr)
    count = len(gone) - left
    done = "removed" if yes else "would be removed: the same command with --yes removes what is listed"
    more = f"; {left} left, see above" if left else ""
    print(f"{counted(count, 'folder')} {done}{more}", file=sys.stderr)


def _folder(names: Sequence[str]) -> Path:
    """The folder that was named, or outputs/."""
    if len(names) > 1:
        raise ConfigError(f"runs {' '.join(names)}: give one folder")
    root = Path(names[0]) if names else OUTPUTS
    if not root.is_dir():
        where = "runs leave their records in outputs/, below the directory they start in"
        raise DataError(f"{root}: no such folder; {where}")
    return root


def _chosen(root: Path, filters: Filters, quiet: bool = False) -> list[LedgerEntry]:
    """The runs that pass all filters. Unreadable records are named, and left out unless a filter asks for them."""
    runs = store.entries(root)
    asked = quiet or BROKEN in filters.get("status", ())
    for run in runs:
        if run.status == BROKEN and not asked:
            print(printable(f"warning: {run.directory / RECORD}: skipped: {run.error}"), file=sys.stderr)
    runs = [run for run in runs if asked or run.status != BROKEN]
    return [run for run in runs if all(_passes(run.value(key), patterns) for key, patterns in filters.items())]


def _passes(value: Any, patterns: Sequence[str]) -> bool:
    """Whether one of the values of a run's key matches one of a filter's patterns."""
    values = (value if isinstance(value, list) else [value]) or [None]
    texts = ["null" if item in (None, "") else str(item) for item in values]
    return any(fnmatchcase(text, pattern) for text in texts for pattern in patterns)


def _aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Rows of cells as aligned lines; `right`: the columns that are flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.rjust if i in right else str.ljust for i in range(len(widths))]
    cells = [[side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)] for row in rows]
    return ["  ".join(row).rstrip() for row in cells]


def _best_first(run: LedgerEntry) -> tuple[Any, ...]:
    """The place of a run among those with comparable scores; runs without a score come last."""
    if run.score is None:
        return (True,)
    metric, value = run.score
    return False, str(run.value("task")), run.corpus, metric, value if metric.startswith(LOWER) else -value


def _cells(run: LedgerEntry) -> tuple[str, ...]:
    quality = f"{label(run.score[0])} {run.score[1]:.6g}" if run.score else NOT_RUN
    numbers = (finite(run.value(key)) for key in ("training.steps", "kv_cache.elements_per_token_per_layer"))
    updates, cache = ("" if number is None else f"{number:.12g}" for number in numbers)
    mode, task, scale, seed = (str(run.record.get(key, "")) for key in ("mode", "task", "scale", "seed"))
    corpus = "sample" if run.corpus.startswith(EMBEDDED) else run.corpus
    words = (run.status, mode, task, corpus, run.label, scale)
    started = run.started[:16].replace("T", " ")
    places = (run.directory.as_posix(), near(Path(parent)).as_posix() if (parent := run.value("parent.path")) else "")
    return tuple(map(printable, (started, *words, seed, updates, quality, cache, *places)))


def _number(run: SavedRecord, key: str, first: float | None) -> str:
    """A number of a run with its standard error and its ratio to the first run's number."""
    value, error = run.number(key), standard_error(run, key)
    if value is None:
        return NOT_RUN
    ratio = f" ({value / first:.3g}x)" if first and value != first else ""
    return f"{value:.6g}" + ("" if error is None else f" ± {error:.2g}") + ratio

"""Records that compare one mechanism with many: a table with a line for each mechanism and a column for each length."""

from typing import Any

from attnlab.report.grid import Grid
from attnlab.run.record import NOT_RUN
from attnlab.run.store import SavedRecord

LEAST = 4  # references that make such a table
MEASURES = {
    "seconds": "time by wall clock, over `{}`'s of the same round",
    "peak_memory": "peak memory, over `{}`'s",
    "cache": "cache, over `{}`'s",
}
LENGTHS = {"training": "text", "model": "text", "decoding": "context", "generation": "context", "prefill": "text"}
SHARE = "share_outside_products"
NOISE = (
    "Products were timed in another run than the whole: these shares are off by ten percent or so either way; "
    "disturbed: other work slowed the products down"
)


def is_wide(found: SavedRecord) -> bool:
    """Whether all rows of a record compare the same mechanism with at least `LEAST` references, by length.

    Args:
        found: a record of mode=bench.
    """
    rows = found.record["bench"]["rows"]
    return bool(rows) and all(
        row["what"] in LENGTHS and len(row["ratios"]) >= LEAST and len({pair["of"] for pair in row["ratios"]}) == 1
        for row in rows
    )


def grids(found: SavedRecord, place: str) -> list[Grid]:
    """The tables of such a record: times, peak memory, caches, and shares outside of matrix products if it has these.

    Args:
        found: the record.
        place: machine and link, for the note below each table.
    """
    every: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for row in found.record["bench"]["rows"]:
        every.setdefault((row["what"], bool(row.get("reorder"))), []).append(row)
    tables = []
    for (what, reorder), rows in every.items():
        one = rows[0]["ratios"][0]["of"]
        fixed = ", ".join(f"{key} {rows[0][key]}" for key in ("batch", "prefix", "steps") if rows[0].get(key))
        width = (found.record["config"]["task"].get("model") or {}).get("d_model")
        title = f"{what}{', rows reordered' * reorder}, {f'd {width}, ' * bool(width)}{fixed}"
        headers = ["Mechanism", *(f"{row[LENGTHS[what]]} positions" for row in rows)]
        for measure, words in MEASURES.items():
            lines = [[f"`{one}`", *(_own(row["variants"][one], measure) for row in rows)]]
            for name in rows[0]["variants"]:
                if name != one:
                    lines.append([f"`{name}`", *(_ratio(row, name, measure) for row in rows)])
            if any(cell for line in lines[1:] for cell in line[1:] if not cell.startswith(NOT_RUN)):
                tables.append(Grid(f"{title}: {words.format(one)}", headers, lines, [place]))
        shares = [
            [f"`{name}`", *(_share(row["variants"].get(name, {})) for row in rows)] for name in rows[0]["variants"]
        ]
        if any(cell for line in shares for cell in line[1:]):
            notes = [NOISE, place]
            tables.append(Grid(f"{title}: share of the time outside of matrix products", headers, shares, notes))
    return tables


def _own(variant: dict[str, Any], measure: str) -> str:
    """The number itself, of what the others are compared with."""
    match measure:
        case "seconds":
            return f"{1e3 * variant['seconds']['median']:.3g} ms" if "seconds" in variant else NOT_RUN
        case "peak_memory":
            peak = variant.get("peak_memory_mib")
            return f"{peak:.3g} MiB" if isinstance(peak, int | float) else ""
    return f"{variant['cache_bytes']['measured'] / 2**20:.3g} MiB" if "cache_bytes" in variant else ""


def _ratio(row: dict[str, Any], name: str, measure: str) -> str:
    """A cell: median (least to most) of a time, one number of a memory; empty where it was not measured."""
    pair: dict[str, Any] = next((pair for pair in row["ratios"] if pair["against"] == name), {})
    if NOT_RUN in pair:
        return f"{NOT_RUN}: {pair[NOT_RUN]}" if measure == "seconds" else ""
    found = pair.get(measure)
    if isinstance(found, dict):
        return f"{found['median']:.3g} ({found['min']:.3g} to {found['max']:.3g})"
    return f"{found:.3g}" if isinstance(found, int | float) else ""


def _share(variant: dict[str, Any]) -> str:
    found = variant.get(SHARE)
    if isinstance(found, float) and found < 0:  # the products alone took longer than the whole
        return "disturbed"
    return f"{found:.0%}" if isinstance(found, float) else ""

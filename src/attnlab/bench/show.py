"""Print the table of a benchmark to stdout."""

import sys
from pathlib import Path
from typing import Any

from rich.table import Table

from attnlab.run.console import Screen
from attnlab.run.record import NOT_RUN


def show(record: dict[str, Any], directory: Path) -> None:
    """Print the protocol, a line for each variant of each row, and the checks.

    Args:
        record: the record of a benchmark.
        directory: the run directory, which has record.json.
    """
    console = Screen(width=None if sys.stdout.isatty() else 150, highlight=False)
    bench = record["bench"]
    chosen = next(iter(bench["rows"][0]["variants"]))
    table = Table(title=f"{chosen} · {_words(bench['protocol'])}")
    for heading in ("shape", "variant"):
        table.add_column(heading, overflow="fold")
    for heading in ("time (least - most)", "tokens/s", "peak MiB", "cache MiB", f"{chosen} faster by", "smaller by"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in bench["rows"]:
        shape = " ".join(f"{key} {value}" for key, value in row.items() if key not in ("what", "variants", "ratios"))
        label = f"{row['what']}  {shape}"
        pairs = {pair["against"]: pair for pair in row["ratios"]}
        for name, found in row["variants"].items():
            table.add_row(label, name, *_cells(found, pairs.get(name)))
            label = ""
        table.add_section()
    console.print(table)
    for row in bench["rows"]:
        for name, found in row["variants"].items():
            if isinstance(share := found.get("share_of_copy"), float):
                speed = f"{found['bytes_per_second'] / 1e9:.4g} GB/s"
                console.print(f"{row['what']} context {row['context']}: {name} reads {speed}, {share:.0%} of a copy")
            if line := _utilisation(found):
                console.print(f"{row['what']}: {name}: {line}")
            if isinstance(share := found.get("share_outside_products"), float):
                where = f"context {row['context']}" + (" reordered" if row["reorder"] else "")
                spends = f"spends {share:.0%} outside matrix products" if share >= 0 else "share of products: disturbed"
                console.print(f"{row['what']} {where}: {name} {spends}")
        for pair in row["ratios"]:
            if NOT_RUN in pair:
                console.print(f"{row['what']}: no ratio of {pair['of']} against {pair['against']}: {pair[NOT_RUN]}")
    for name, found in bench["checks"].items():
        if NOT_RUN in found:
            console.print(f"no check of {name}: {found[NOT_RUN]}")
        elif found:
            errors = _words({key: value for key, value in found.items() if key not in ("kernels", "reference")})
            console.print(f"check of {name} against its {found.get('reference', 'reference')}: {errors}")
    console.print(f"record: {directory / 'record.json'}", soft_wrap=True)


def _utilisation(found: dict[str, Any]) -> str:
    """Kernels, launching, and shares of the device's peaks; empty where a result has none of these."""
    parts = [f"{operation} by {' and '.join(names)}" for operation, names in found.get("kernels", {}).items()]
    parts += [found["launched"]] if "launched" in found else []
    for key, words in (("flops", "of the FLOP peak"), ("bandwidth", "of the memory bandwidth")):
        share = found.get(f"share_of_peak_{key}")
        if share is not None:
            parts.append(f"{share:.0%} {words}" if isinstance(share, float) else f"share {words} {share}")
    return ", ".join(parts)


def _cells(found: dict[str, Any], pair: dict[str, Any] | None) -> list[str]:
    if NOT_RUN in found:
        return [NOT_RUN, "", "", "", "", ""]
    time, cache = found["seconds"], found.get("cache_bytes")
    cells = [
        f"{1e3 * time['median']:.4g} ms ({1e3 * time['min']:.3g} - {1e3 * time['max']:.3g})",
        f"{found['tokens_per_second']:.4g}",
        _number(found["peak_memory_mib"]),
        f"{cache['measured'] / 2**20:.3g}" if cache else "",
    ]
    if pair is None or NOT_RUN in pair:
        return [*cells, "", "" if pair is None else NOT_RUN]
    faster = pair["seconds"]
    smaller = [f"{pair[key]:.2f}x {word}" for key, word in (("cache", "cache"), ("peak_memory", "peak")) if key in pair]
    times = f"{faster['median']:.2f}x ({faster['min']:.2f} - {faster['max']:.2f})"
    if "cpu_seconds" in pair:
        times += f"\ncpu {pair['cpu_seconds']['median']:.2f}x"
    return [*cells, times, "\n".join(smaller)]


def _number(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else NOT_RUN


def _words(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items() if not isinstance(value, str) or len(value) < 40)

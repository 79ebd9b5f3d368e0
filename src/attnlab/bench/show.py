"""Print the table of a benchmark to stdout."""

import sys
from pathlib import Path
from typing import Any

from rich.table import Table

from attnlab.run.console import Screen
from attnlab.run.record import NOT_RUN


def show(record: dict[str, Any], directory: Path) -> None:
    """Print the protocol, a line for each variant of each row, and the checks of a record and its run directory."""
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
        for name, result in row["variants"].items():
            table.add_row(label, name, *_cells(result, pairs.get(name)))
            label = ""
        table.add_section()
    console.print(table)
    for row in bench["rows"]:
        for name, result in row["variants"].items():
            if isinstance(share := result.get("share_of_copy"), float):
                speed = f"{result['bytes_per_second'] / 1e9:.4g} GB/s"
                console.print(f"{row['what']} context {row['context']}: {name} reads {speed}, {share:.0%} of a copy")
            if line := _utilisation(result):
                console.print(f"{row['what']}: {name}: {line}")
            if isinstance(share := result.get("share_outside_products"), float):
                where = f"context {row['context']}" + (" reordered" if row["reorder"] else "")
                spends = f"spends {share:.0%} outside matrix products" if share >= 0 else "share of products: disturbed"
                console.print(f"{row['what']} {where}: {name} {spends}")
        for pair in row["ratios"]:
            if NOT_RUN in pair:
                console.print(f"{row['what']}: no ratio of {pair['of']} against {pair['against']}: {pair[NOT_RUN]}")
    for name, result in bench["checks"].items():
        if NOT_RUN in result:
            console.print(f"no check of {name}: {result[NOT_RUN]}")
        elif result:
            errors = _words({key: value for key, value in result.items() if key not in ("kernels", "reference")})
            console.print(f"check of {name} against its {result.get('reference', 'reference')}: {errors}")
    console.print(f"record: {directory / 'record.json'}", soft_wrap=True)


def _utilisation(result: dict[str, Any]) -> str:
    """Kernels, launching, and shares of the device's peaks; empty where a result has none of these."""
    parts = [f"{operation} by {' and '.join(names)}" for operation, names in result.get("kernels", {}).items()]
    parts += [result["launched"]] if "launched" in result else []
    for key, words in (("flops", "of the FLOP peak"), ("bandwidth", "of the memory bandwidth")):
        share = result.get(f"share_of_peak_{key}")
        if share is not None:
            parts.append(f"{share:.0%} {words}" if isinstance(share, float) else f"share {words} {share}")
    return ", ".join(parts)


def _cells(result: dict[str, Any], pair: dict[str, Any] | None) -> list[str]:
    if NOT_RUN in result:
        return [NOT_RUN, "", "", "", "", ""]
    time, cache = result["seconds"], result.get("cache_bytes")
    cells = [
        f"{1e3 * time['median']:.4g} ms ({1e3 * time['min']:.3g} - {1e3 * time['max']:.3g})",
        f"{result['tokens_per_second']:.4g}",
        _number(result["peak_memory_mib"]),
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

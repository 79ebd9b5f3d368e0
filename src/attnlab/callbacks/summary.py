"""The summary at the end of a run: the main numbers of the record, and some lines of predictions.tsv."""

import csv
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from attnlab.config.batch import counted
from attnlab.run.console import Screen
from attnlab.run.directory import ORIGINAL, PREDICTIONS
from attnlab.run.record import BUSY, NOT_RUN, PUBLISHED, RECORD, corpus_of
from attnlab.run.store import SavedRecord

WIDTH = 130  # columns where the output is not a terminal
LONGEST = 200  # characters of a text among the samples; predictions.tsv has all of it
LABELS = {  # of metrics; others are named as in the record, with spaces
    "bleu": "BLEU",
    "chrf": "chrF",
    "wer": "WER",
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "rougeL": "ROUGE-L",
    "top1": "top-1",
    "top5": "top-5",
    "floor": "floor (best possible on this corpus)",
    "perplexity_per_word": "perplexity per word or line end",
    "sentences_left_out": "sentences left out of the test set",
    "ended_at_limit": "texts that ended at the limit of length",
}
COUNTS = ("sentences_left_out", "ended_at_limit")  # of what is not as it should be


def show(record: dict[str, Any], directory: Path, samples: int = 3) -> None:
    """Print a table of the record's numbers, some lines of predictions.tsv evenly spread, and where the record lies."""
    console = Screen(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    names = (record["task"], SavedRecord(directory / RECORD, record).label, record["scale"])
    table = Table(title=" · ".join(name for name in names if name not in (None, "none")), show_header=False)
    table.add_column()
    table.add_column(overflow="fold")  # a long word, such as a signature, is never cut
    for name, value in lines_of(record):
        table.add_row(name, escape(value))
    console.print(table)
    originals = {row["id"]: row["hypothesis"] for row in spread(directory / f"{ORIGINAL}{PREDICTIONS}", samples)}
    for row in spread(directory / PREDICTIONS, samples):
        shown = {"src": ("dim", row["source"]), "ref": ("green", row["reference"])}
        if row.get("id") in originals:  # the model before its conversion continues the same text
            shown["original"] = ("magenta", originals[row["id"]])
        sample = Table.grid(padding=(0, 1))
        for label, (style, text) in (shown | {"hyp": ("cyan", row["hypothesis"])}).items():
            if label != "src" or text.strip() not in ("", row["reference"].strip()):
                sample.add_row(f"[{style}]{label}[/]", escape(textwrap.shorten(text, LONGEST, placeholder=" …")))
        console.print(sample)
    console.print(f"record: {directory / 'record.json'}", soft_wrap=True)


def lines_of(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and value of each line of the table. Values that were not measured have no line."""
    yield "corpus", corpus_of(record)
    if (parts := record["quality"].get("held_out", PUBLISHED)) != PUBLISHED:
        yield "validation and test", parts
    yield from _quality_lines(record["quality"], record.get("compression", {}))
    if "conversion" in record:
        yield from _conversion_lines(record["conversion"])
    if needle := record["quality"].get("needle"):
        yield "needle in a haystack", _needle(needle)
    if shares := record.get("front_end", {}).get("layer_shares"):
        yield "share of each layer", f"{', '.join(f'{share:.3f}' for share in shares)}   (of the stored features)"
    total, attention = (record["parameters"][key] for key in ("total", "attention"))
    yield "parameters", f"{total:,}   (attention {attention:,})"
    if "compression" in record:
        yield from _compression_lines(record["compression"])
    yield from _cost_lines(record)


def _quality_lines(quality: dict[str, Any], compression: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for point, values in compression.get("quality", {}).items():
        if values != NOT_RUN:
            yield f"quality, {point}", ", ".join(_with_errors(values))
    if quality and not compression:
        headline, *others = quality
        characters = quality.get("unit") == "characters"  # of error rates
        for key in (headline, *(key for key in others if isinstance(quality[key], float))):
            signature = quality.get("signature" if key == headline else f"{key}_signature")
            name = "CER" if key == "wer" and characters else label(key)
            yield (
                name,
                f"{quality[key]}{interval(quality, f'{key}_interval')}{f'   ({signature})' if signature else ''}",
            )
        yield from (("warning", text) for text in quality.get("warnings", ()))
        yield from ((label(key), str(quality[key])) for key in COUNTS if quality.get(key))


def interval(values: dict[str, Any], key: str, times: int = 1, digits: int = 2) -> str:
    """The 95 % interval of a number, if the record has it."""
    ends = [f"{times * end:.{digits}f}" for end in values.get(key, ())]
    return f" (95 %: {' to '.join(ends)})" if ends else ""


def _right(needle: dict[str, Any]) -> str:
    return f"{100 * needle['accuracy']:.1f} %{interval(needle, 'accuracy_interval', 100, 1)} right"


def _needle(needle: dict[str, Any]) -> str:
    asked = f"of {needle['trials']} texts for each of {len(needle['cells'])} lengths and depths"
    return f"{_right(needle)}, {asked}; {needle['gain']:.3f} nats gained"


def _conversion_lines(conversion: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for point, values in conversion.get("points", {}).items():
        if values != NOT_RUN:
            size = f"{values['cache_bytes_per_token']:,.6g} bytes of cache per token of a long text"
            if not values["cache_bytes_per_token"]:
                size = f"{values['cache_bytes_measured']:,} bytes of cache, which windows bound"
            scores = f"perplexity {values['perplexity']:.4f}{interval(values, 'perplexity_interval')}"
            scores += f", needle {_right(values['needle'])}" if "needle" in values else ""
            yield point, f"{scores}, {size}, {values['tokens_per_second']} tokens/s"
    if ratio := conversion.get("perplexity_ratio"):
        ends = interval(ratio, "interval", digits=4)
        yield "perplexity over the original's", f"{ratio['value']:.4f}{ends}, {ratio['windows']} windows in pairs"
    if cache := conversion.get("cache"):
        share = f"{100 * cache['share']:.1f} % of the original's numbers, windows included"
        yield f"cache of {cache['positions']} tokens", share


def _compression_lines(compression: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if rate := compression.get("rate"):
        sizes = f"{rate['parameters']:,} parameters in place of {rate['parameters_dense']:,}"
        saving = f"{rate['model_saving_percent']:.1f} % of the whole model saved"
        yield "compression", f"rate {rate['rate']:.2f}: {sizes}; {saving}"
    if "change" in compression:
        yield "change by the compression", compression["change"]
    if "search" in compression:
        yield "search", f"{compression['chosen']}, the best of {len(compression['search'])} by the validation split"
    if remaining := compression.get("remaining"):
        keys = ("attention", "multiply_adds", "parameters")
        yield "remaining", ", ".join(f"{key.replace('_', '-')} {remaining[f'{key}_percent']:.1f} %" for key in keys)


def _cost_lines(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Cache, memory and speed."""
    cache, inference, training = record["kv_cache"], record["inference"], record["training"]
    if cache["elements_per_token_per_layer"] != NOT_RUN:
        numbers = cache["elements_per_token_per_layer"]
        yield "cache per token and layer", f"{numbers:g} numbers" if numbers else _fixed_cache(record)
    if cache["bytes_measured"] != NOT_RUN:
        measured, predicted = (f"{cache[f'bytes_{key}'] / 2**20:.2f}" for key in ("measured", "predicted"))
        yield "cache of the largest batch", f"{measured} MiB ({predicted} predicted)"
    if inference["peak_memory_mib"] != NOT_RUN:
        yield "memory", f"{inference['peak_memory_mib']} MiB peak, {inference['mean_memory_mib']} mean while scoring"
    yield from _speeds("scoring" if inference["beam"] == NOT_RUN else "decoding", inference, one_pass=True)
    busy = inference.get("busy_cores_before", NOT_RUN)
    if busy != NOT_RUN and busy > BUSY:
        yield "machine busy", f"other programs kept {busy:.1f} cores busy before scoring: its speed is not comparable"
    if "speedup" in inference:
        baseline, *ratios = inference["speedup"].items()
        better = ", ".join(f"{name.replace('_', ' ')} {ratio:.2f}x" for name, ratio in ratios)
        yield "against the baseline", f"{better}   (above 1: better than {baseline[1]['path']})"
    if training["steps"] != NOT_RUN:
        resumed = "   (after resuming only)" * (training.get("resumed") is True)
        for name, value in _speeds(f"training, {counted(training['steps'], 'update')}", training):
            yield name, f"{value}{resumed}"


def _with_errors(values: dict[str, Any]) -> Iterator[str]:
    """Name and value of each number, with its standard error if it has one."""
    for key, value in values.items():
        if not key.endswith("_stderr"):
            yield f"{key} {value}" + (f" ± {values[f'{key}_stderr']}" if f"{key}_stderr" in values else "")


def _fixed_cache(record: dict[str, Any]) -> str:
    """The size of a cache that does not grow with the text."""
    window = (record["config"].get("attention") or {}).get("window")
    return f"at most {counted(window, 'token')} are kept" if window else "of fixed size, whatever the length"


def label(metric: str) -> str:
    """A metric's name for people."""
    return LABELS.get(metric, metric.replace("_", " "))


def _speeds(name: str, section: dict[str, Any], one_pass: bool = False) -> Iterator[tuple[str, str]]:
    """A line with the speed; `one_pass`: it says that the speed is of one pass, or the range of several."""
    beam = [] if section.get("beam", NOT_RUN) == NOT_RUN else [f"beam {section['beam']}"]
    seconds = [] if section["seconds"] == NOT_RUN else [f"{section['seconds']} s"]
    passes = section.get("passes", 1)
    if seconds and one_pass and passes == 1:
        seconds = [f"one pass of {seconds[0]}"]
    for unit in ("tokens", "images"):
        if (speed := section.get(f"{unit}_per_second", NOT_RUN)) != NOT_RUN:
            least, most = section.get(f"{unit}_per_second_range", (speed, speed))
            several = f" ({least} to {most} in {passes} passes)" if passes > 1 else ""
            yield name, ", ".join([f"{speed} {unit}/s{several}", *beam, *seconds])


def spread(path: Path, count: int) -> list[dict[str, str]]:
    """At most `count` rows of predictions.tsv, evenly spread. Empty: there is no such file."""
    if not path.is_file():
        return []
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return rows[:: max(1, len(rows) // count)][:count]

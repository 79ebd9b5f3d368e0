"""Draw the mean of six tasks over the size of the cache, beside MHA2MLA's.

python experiments/convert/smollm2/figure.py

`shares.csv` has the share of the cache after several numbers of tokens, and `means.csv` and `means.png` the means minus
that of the full cache.
"""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from matplotlib.figure import Figure

from attnlab.report.figure import COLOURS, panels, write
from attnlab.report.table import as_csv

HERE = Path(__file__).parent
FULL = 384  # numbers that SmolLM2 caches for a token and layer
QUESTION, COUNTED = 100, 512  # tokens of a typical question, and those that convert.keep counts
LENGTHS = (QUESTION, 128, 256, COUNTED, 2048, 8192)
MHA2MLA = "SmolLM-135M, {} % saved, MHA2MLA, 2.25B tokens"


def records() -> dict[str, dict[str, Any]]:
    """The records of this folder by their run's name."""
    lines = (HERE / "records.jsonl").read_text(encoding="utf-8").splitlines()
    return {str(Path(record["file"]).parent): record for record in map(json.loads, lines)}


def share(layers: list[dict[str, Any]], tokens: int) -> float:
    """The cache after `tokens` tokens, in percent of the original's."""
    seen = [min(tokens, layer["window"] + layer["sinks"]) if "window" in layer else tokens for layer in layers]
    numbers = sum(n * (layer["rope_dim"] + layer["latent_dim"]) for n, layer in zip(seen, layers, strict=True))
    return 100 * numbers / (tokens * FULL * len(layers))


def shares(saved: dict[str, dict[str, Any]]) -> pd.DataFrame:
    """A row for each conversion and number of tokens."""
    rows = []
    for name, record in saved.items():
        if "conversion" in record and all("rope_dim" in layer for layer in record["conversion"]["layers"]):
            layers, counted = record["conversion"]["layers"], record["conversion"]["cache"]
            assert abs(share(layers, counted["positions"]) - 100 * counted["share"]) < 0.02, name
            rows += [[name, tokens, round(share(layers, tokens), 1)] for tokens in LENGTHS]
    return pd.DataFrame(rows, columns=["Run", "Tokens", "Cache, %"])


def means(saved: dict[str, dict[str, Any]], sizes: pd.DataFrame) -> pd.DataFrame:
    """A point for each conversion whose tasks were scored, and those of MHA2MLA."""
    size = sizes.set_index(["Run", "Tokens"])["Cache, %"]
    original = saved["original_tasks_epyc"]["quality"]["tasks"]["mean"]
    rows = []
    for name, record in saved.items():
        if "_tasks_" not in name or name.startswith("original"):
            continue
        run, mean = name.replace("_tasks", ""), record["quality"]["tasks"]["mean"]
        kind = "attnlab, healed with at most 0.5 M tokens" if "healed" in name else "attnlab, no training"
        change = round(100 * (mean["accuracy"] - original["accuracy"]), 2)
        rows.append([kind, size[run, COUNTED], size[run, QUESTION], change])
    table = yaml.safe_load((HERE.parent / "tasks.yaml").read_text(encoding="utf-8"))
    published = {row["label"]: row["published"].get("average") for row in table["rows"]}
    tuned = float(published["SmolLM-135M, 0 % saved, trained as long, 2.25B tokens"])
    for saving in ("68.75", "81.25", "87.5"):
        size_left = 100 - float(saving)
        change = round(float(published[MHA2MLA.format(saving)]) - tuned, 2)
        rows.append(["MHA2MLA, healed with 2.25 B tokens", size_left, size_left, change])
    columns = [
        "Conversion",
        f"Cache after {COUNTED} tokens, %",
        f"Cache after {QUESTION} tokens, %",
        "Change of the mean",
    ]
    return pd.DataFrame(rows, columns=columns).sort_values(columns[:2])


def draw(data: pd.DataFrame) -> Figure:
    """A panel for each way to count the cache."""
    page, axes = panels(2, 4.2, 3.4, sharey=True)
    for panel, column in zip(axes, data.columns[1:3], strict=True):
        for colour, (name, rows) in zip(COLOURS, data.groupby("Conversion", sort=False), strict=False):
            panel.plot(rows[column], rows["Change of the mean"], "o-", color=colour, label=name)
        panel.axhline(0, color="#999999", linewidth=0.8)
        panel.set_xlabel(column)
    axes[0].set_ylabel("mean of six tasks minus full cache, points")
    axes[1].legend(fontsize=7)
    page.suptitle("135 M parameters: accuracy over the cache (higher is better)", fontsize=10)
    return page


if __name__ == "__main__":
    saved = records()
    sizes = shares(saved)
    (HERE / "shares.csv").write_text(as_csv(sizes), encoding="utf-8")
    write(HERE / "means", means(saved, sizes), draw)

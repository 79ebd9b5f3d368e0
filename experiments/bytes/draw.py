"""Draw recall and perplexity over the bytes of the cache, from cache.csv and kvpress.csv, into bytes.csv and bytes.png.

python experiments/bytes/draw.py
"""

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from attnlab.report.figure import look, panels, plain, write

HERE = Path(__file__).parent
PRESSES = {
    "KVzip, chunks of 64": "KVzip",
    "AdaKV of ExpectedAttention, 128 positions": "AdaKV",
    "StreamingLLM": "StreamingLLM",
}
LABELS = {"Recall": "recall in % of the original's", "Perplexity": "perplexity over the original's"}


def points() -> pd.DataFrame:
    """The mean, the least and the largest value of three seeds, for each method and size."""
    cache, evicted = (pd.read_csv(HERE / f"{name}.csv") for name in ("cache", "kvpress"))
    evicted = evicted[evicted["Press"].isin(PRESSES)].assign(Method=evicted["Press"].map(PRESSES))
    whole = pd.read_csv(HERE / "kvpress.csv").query("Press == 'none'").set_index("Seed")
    second = "Perplexity of the second half"
    evicted = evicted.assign(
        Size=evicted["Bytes counted %"].round(),
        Recall=100 * evicted["Recall %"] / evicted["Seed"].map(whole["Recall %"]),
        Perplexity=evicted[second] / evicted["Seed"].map(whole[second]),
        Bytes=evicted["Bytes counted %"],
    )
    original = cache[cache["Method"] == "original"].set_index("Seed")
    cache = cache.assign(
        Size=cache["Keep %"],
        Recall=100 * cache["Recall %"] / cache["Seed"].map(original["Recall %"]),
        Perplexity=cache["Perplexity over the original"],
        Bytes=cache["Bytes of 256 %"],
    )
    columns = ["Method", "Size", "Seed", "Bytes", "Recall", "Perplexity"]
    both = pd.concat([cache[columns], evicted[columns]]).melt(columns[:4], var_name="Measure", value_name="Value")
    groups = both.groupby(["Measure", "Method", "Size"], sort=False)
    values = groups["Value"].agg(["mean", "min", "max", "count"]).join(groups["Bytes"].mean())
    return values.reset_index().round(4)


def draw(data: pd.DataFrame) -> Figure:
    page, axes = panels(2, 5.5, 4.2)
    for panel, (measure, of_measure) in zip(axes, data.groupby("Measure", sort=False), strict=True):
        for number, (method, line) in enumerate(of_measure.groupby("Method", sort=False)):
            line = line.sort_values("Bytes")
            panel.plot(line["Bytes"], line["mean"], label=method, markersize=4, **look(number))
            panel.fill_between(line["Bytes"], line["min"], line["max"], alpha=0.12, color=look(number)["color"])
        panel.set_xscale("log")
        panel.set_xticks([3, 6, 12, 25, 50, 100], ["3", "6", "12", "25", "50", "100"])
        panel.minorticks_off()
        plain(panel, xlabel="bytes of the cache in % (texts of 256 tokens)", ylabel=LABELS[str(measure)])
    axes[1].set_ylim(0.995, 1.06)
    axes[0].legend(fontsize=7, frameon=False)
    return page


if __name__ == "__main__":
    for path in write(HERE / "bytes", points(), draw):
        print(path)

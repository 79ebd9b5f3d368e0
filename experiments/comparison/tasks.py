"""Draw quality lost against cache saved, one panel for each task, into tasks.csv and tasks.png.

python experiments/comparison/tasks.py
"""

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from attnlab.report.figure import look, panels, plain, write

HERE = Path(__file__).parent
RECALL = HERE.parent / "recall"
FAMILIES = {  # by the beginning of a row's label; the first that fits
    "sliding window of 64, MLA": "window and MLA",
    "sliding window": "window",
    "multi-linear": "multi-linear",
    "GQA": "GQA, MQA",
    "MQA": "GQA, MQA",
    "MLA": "MLA",
    "MTLA": "MTLA",
    "TPA": "TPA",
}
TASKS = {  # points of a table, the axis' label, and a factor of the difference; None: quality is a perplexity
    "WikiText-2": (HERE / "wikitext2_points.csv", "perplexity over MHA's, %", None),
    "spoken digits to German text": (HERE / "digits_points.csv", "points of BLEU below MHA's", 1),
    "AN4 speech recognition": (HERE / "an4_points.csv", "points of accuracy below MHA's", 100),
    "MQAR, 4 to 32 pairs": (RECALL / "table_points.csv", "points of accuracy below MHA's", 100),
}


def family(row: str) -> str:
    """The family of a row; empty: it is not drawn."""
    if row.endswith((", alone", ", then MHA")):
        return ""
    return next((name for start, name in FAMILIES.items() if row.startswith(start)), "")


def points() -> pd.DataFrame:
    """The mean, the least and the largest loss of the seeds of each row, against MHA with the same seed."""
    parts = []
    for task, (file, _, factor) in TASKS.items():
        data = pd.read_csv(file)
        data["row"] = data["row"].str.removesuffix(" [c]")
        of_mha = data[data["row"] == "MHA"].set_index("seed")
        y, mha = data["y"], data["seed"].map(of_mha["y"])
        lost = 100 * (y / mha - 1) if factor is None else factor * (mha - y)
        saved = data["seed"].map(of_mha["x"]) / data["x"]
        data = data.assign(Task=task, Family=data["row"].map(family), Saved=saved, Lost=lost)
        parts.append(data[data["Family"] != ""])
    groups = pd.concat(parts).groupby(["Task", "Family", "row"], sort=False)
    values = groups["Lost"].agg(["mean", "min", "max", "count"]).join(groups["Saved"].mean())
    return values.reset_index().rename(columns={"row": "Row"}).round(3)


def draw(data: pd.DataFrame) -> Figure:
    page, axes = panels(len(TASKS), 5.5, 4.2)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(FAMILIES.values()))}
    for panel, (task, of_task) in zip(axes, data.groupby("Task", sort=False), strict=True):
        for name, rows in of_task.groupby("Family", sort=False):
            style = look(numbers[str(name)]) | {"linestyle": "", "markersize": 5}
            spread = [rows["mean"] - rows["min"], rows["max"] - rows["mean"]]
            panel.errorbar(rows["Saved"], rows["mean"], spread, label=name, capsize=2, **style)
        panel.axhline(0, color="grey", linewidth=0.8)
        panel.set_xscale("log")
        ticks = [tick for tick in (1, 2, 4, 8, 16, 32) if tick < of_task["Saved"].max()]
        panel.set_xticks(ticks, [str(tick) for tick in ticks])
        panel.minorticks_off()
        panel.set_title(task, fontsize=10)
        plain(panel, xlabel="cache, times smaller than MHA's", ylabel=TASKS[str(task)][1])
    axes[0].legend(fontsize=7, frameon=False)
    return page


if __name__ == "__main__":
    for path in write(HERE / "tasks", points(), draw):
        print(path)

"""Draw the quality that compressions cost over the parameters left, from the committed records.

python experiments/comparison/compression.py
"""

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from attnlab.report.figure import logarithmic, look, panels, plain, write
from attnlab.report.match import choose, scored
from attnlab.report.spec import read_spec
from attnlab.run.store import collect

HERE = Path(__file__).parent
LEFT = "parameters.total / parameters.original.total"
RATIO = "quality.perplexity / compression.quality.dense.perplexity"
POINTS = "compression.quality.compressed.top1 - compression.quality.dense.top1"
MODELS = {  # the specification, its title, the number, its axis
    "photos": ("vision transformer, photos of fruits", POINTS, "points of top-1 lost (before fine-tuning)"),
    "gpt2": ("GPT-2, WikiText-2 by bytes", RATIO, "perplexity over the dense model's"),
    "llama": ("Llama with rotary keys, WikiText-2 by bytes", RATIO, "perplexity over the dense model's"),
}


def points() -> pd.DataFrame:
    """The mean, the least and the largest value of the seeds, for each model, method and share."""
    records, rows = collect([HERE / "compression"]), []
    for name, (_, number, _) in MODELS.items():
        spec = read_spec(HERE / f"compression_{name}.yaml")
        usable = scored(records, spec)[1]
        for row in spec.rows:
            for saved in choose(row, usable, spec) if row.label != "dense" else []:
                value = saved.number(number)
                if value is not None:
                    lost = -value if number == POINTS else value
                    rows.append((name, *row.label.split(", "), 100 * (saved.number(LEFT) or 0), lost))
    data = pd.DataFrame(rows, columns=["model", "method", "kept", "left", "lost"])
    groups = data.groupby(["model", "method", "kept"], sort=False)
    values = groups["lost"].agg(["mean", "min", "max", "count"]).join(groups["left"].mean())
    return values.reset_index().round(4)


def draw(data: pd.DataFrame) -> Figure:
    shown = [name for name in MODELS if name in set(data["model"])]
    methods = list(dict.fromkeys(data["method"]))
    page, axes = panels(len(shown), 5.2, 4.6)
    for panel, name in zip(axes, shown, strict=True):
        title, number, label = MODELS[name]
        for method, line in data[data["model"] == name].groupby("method", sort=False):
            line, style = line.sort_values("left"), look(methods.index(str(method)))
            panel.plot(line["left"], line["mean"], label=method, markersize=4, **style)
            panel.fill_between(line["left"], line["min"], line["max"], alpha=0.12, color=style["color"])
        if number == RATIO:
            logarithmic(panel, "y")
        plain(panel, title=title, xlabel="parameters of the model left, %", ylabel=label)
    names = {text: line for panel in axes for line, text in zip(*panel.get_legend_handles_labels(), strict=True)}
    page.legend(list(names.values()), list(names), loc="outside right upper", frameon=False, fontsize=8)
    return page


if __name__ == "__main__":
    for path in write(HERE / "compression", points(), draw):
        print(path)

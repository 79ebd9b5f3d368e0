"""Test methods against TruncAtt over images and seeds.

python experiments/irratt/dinov2/paired.py [RUN ...]

`right.csv` has a 1 for each image that a run's model classifies correctly, before and after fine-tuning; RUN adds a
run to it. `paired.csv` has the tests, which are computed from it.
"""

import csv
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from attnlab.report.significance import SEED, bootstrap, share
from attnlab.run.directory import PREDICTIONS, UNTUNED
from attnlab.run.store import SavedRecord, collect

HERE = Path(__file__).parent
POINTS = {"before": UNTUNED, "after": PREDICTIONS}
EQUAL, MAIN = "TruncAtt", "IrrAtt"
DRAWS = 10_000
NAMES = {"truncatt": "TruncAtt", "irratt": "IrrAtt", "global_svd": "global SVD", "cp_slimatt": "CP SlimAtt", "laser": "LASER",
         "trawl": "TRAWL", "mlp_svd": "MLP SVD"}  # fmt: skip
KEYS = ["method", "budget", "seed", "fine-tuning"]


def rows_of(saved: SavedRecord) -> list[list[object]]:
    """The rows of `right.csv` of a run, whose folder is named METHOD_BUDGET_seedSEED."""
    name, seed = saved.path.parent.name.rsplit("_seed", 1)
    method, budget = name.rsplit("_", 1)
    rows = []
    for point, file in POINTS.items():
        with open(saved.path.parent / file, encoding="utf-8", newline="") as lines:
            images = list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
        right = "".join(str(int(image["reference"] == image["hypothesis"])) for image in images)
        rows.append([NAMES[method], int(budget), int(seed), point, right])
    return rows


def holm(values: list[float]) -> list[float]:
    """Holm's adjusted p-values of a family of tests."""
    order = sorted(range(len(values)), key=values.__getitem__)
    steps = np.maximum.accumulate([(len(values) - i) * values[k] for i, k in enumerate(order)])
    return [min(1.0, float(steps[order.index(k)])) for k in range(len(values))]


def tests(right: pd.DataFrame) -> pd.DataFrame:
    """A row for each method, budget and point: top-1 minus TruncAtt's, its 95 % interval, p, and p by Holm."""
    statistics = {}
    for (method, budget, point), runs in right.groupby(["method", "budget", "fine-tuning"], sort=False):
        seeds = np.array([[int(mark) for mark in marks] for marks in runs.sort_values("seed")["right"]])
        statistics[method, budget, point] = np.stack([seeds.sum(0), np.full(seeds.shape[1], len(seeds))], 1), len(seeds)
    rows = []
    for (method, budget, point), (values, seeds) in statistics.items():
        base, other = statistics.get((EQUAL, budget, point), (None, 0))
        if method == EQUAL or seeds != other:
            continue
        before, after, p, low, high, _ = bootstrap(base.astype(float), values.astype(float), share, DRAWS, SEED)
        rows.append([method, budget, point, seeds, len(values), before, after, after - before, low, high, p])
    heads = ["Method", "Budget", "Fine-tuning", "Seeds", "Images", "TruncAtt", "Method's", "Difference", "Low", "High", "p"]
    table = pd.DataFrame(rows, columns=heads)
    for family in (table["Method"] == MAIN, table["Method"] != MAIN):
        table.loc[family, "p by Holm"] = holm(list(table.loc[family, "p"]))
    return table.round({name: 2 for name in heads[5:10]} | {"p": 4, "p by Holm": 4})


if __name__ == "__main__":
    file = HERE / "right.csv"
    right = pd.read_csv(file, dtype={"right": str}) if file.is_file() else pd.DataFrame(columns=[*KEYS, "right"])
    new = [row for saved in collect([Path(run) for run in sys.argv[1:]]) for row in rows_of(saved)] if sys.argv[1:] else []
    right = pd.concat([right, pd.DataFrame(new, columns=right.columns)]).drop_duplicates(KEYS, keep="last")
    right.sort_values(KEYS).to_csv(file, index=False)
    tests(pd.read_csv(file, dtype={"right": str})).to_csv(HERE / "paired.csv", index=False)

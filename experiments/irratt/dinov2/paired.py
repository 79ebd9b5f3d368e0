"""Test methods against TruncAtt over images and seeds.

python experiments/irratt/dinov2/paired.py [RUN ...]

`right.csv` has a 1 for each image that a run's model classifies correctly, before and after fine-tuning. RUN adds a run
to it. `paired.csv` has the tests, which are computed from it.
"""

import csv
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from attnlab.report.significance import SEED, bootstrap, holm, share
from attnlab.run.directory import PREDICTIONS, UNTUNED
from attnlab.run.store import SavedRecord, collect

HERE = Path(__file__).parent
POINTS = {"before": UNTUNED, "after": PREDICTIONS}
EQUAL, MAIN = "truncatt", "irratt"
DRAWS = 10_000
KEYS = ["method", "budget", "fine-tuning", "seed"]


def right_of(saved: SavedRecord) -> list[list[object]]:
    """The rows of `right.csv` of a run in a folder METHOD_BUDGET_seedSEED."""
    name, seed = saved.path.parent.name.rsplit("_seed", 1)
    method, budget = name.rsplit("_", 1)
    rows: list[list[object]] = []
    for point, file in POINTS.items():
        with open(saved.path.parent / file, encoding="utf-8", newline="") as lines:
            images = list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
        marks = "".join(str(int(image["reference"] == image["hypothesis"])) for image in images)
        rows.append([method, int(budget), point, int(seed), marks])
    return rows


def tests(right: pd.DataFrame) -> pd.DataFrame:
    """Top-1 minus TruncAtt's with the same budget, over the images and the seeds that both have."""
    runs = {tuple(row[:4]): [int(mark) for mark in row[4]] for row in right.itertuples(index=False, name=None)}
    rows = []
    for method, budget, point in dict.fromkeys(key[:3] for key in runs if key[0] != EQUAL):
        others = [key[3] for key in runs if key[:3] == (method, budget, point)]
        seeds = [seed for seed in others if (EQUAL, budget, point, seed) in runs]
        if not seeds:
            continue
        counts = [
            np.stack([np.sum([runs[name, budget, point, seed] for seed in seeds], 0), [len(seeds)] * length], 1)
            for name in (EQUAL, method)
            for length in [len(runs[name, budget, point, seeds[0]])]
        ]
        equal, other, p, low, high, _ = bootstrap(counts[0], counts[1], share, DRAWS, SEED)
        rows.append([method, budget, point, len(seeds), equal, other, other - equal, low, high, p])
    columns = ["method", "budget", "fine-tuning", "seeds", "TruncAtt", "other", "difference", "low", "high", "p"]
    table = pd.DataFrame(rows, columns=columns)
    for family, planned in ((table["method"] == MAIN, 6), (table["method"] != MAIN, 5 * 6)):
        table.loc[family, "p by Holm"] = holm(table.loc[family, "p"].tolist(), planned)
    return table.round(dict.fromkeys(columns[4:9], 2) | dict.fromkeys(["p", "p by Holm"], 4))


if __name__ == "__main__":
    file = HERE / "right.csv"
    right = pd.read_csv(file, dtype={"right": str}) if file.is_file() else pd.DataFrame(columns=[*KEYS, "right"])
    added = [row for run in sys.argv[1:] for saved in collect([Path(run)]) for row in right_of(saved)]
    right = pd.concat([right, pd.DataFrame(added, columns=right.columns)]).drop_duplicates(KEYS, keep="last")
    right.sort_values(KEYS).to_csv(file, index=False)
    tests(pd.read_csv(file, dtype={"right": str})).to_csv(HERE / "paired.csv", index=False)

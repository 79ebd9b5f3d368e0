"""Write table.md and table.csv: the mechanisms beside the Llama of transformers, from records.jsonl.

python experiments/peers/table.py
"""

import json
from pathlib import Path
from typing import Any

import pandas as pd

from attnlab.bench.peers import PEERS

HERE = Path(__file__).parent
TITLES = {
    "generation": "A step of decoding, ms",
    "prefill": "Reading a prompt into empty caches, ms",
    "model": "A training step, forward and backward, ms",
}

D, HEADS, HEAD, LAYERS, INNER, VOCABULARY, LATENT, ROTARY = 384, 6, 64, 6, 580, 8192, 256, 32


def products(variant: str, positions: int) -> float:
    """Multiply-adds of a training step for each position of a text, of MHA, MLA and MTLA.

    A linear layer has three products, and that of a latent a fourth, because backward builds keys and values again. A
    pair of a query and a key has two products forward and five backward, because logits are not stored.
    """
    name, _, stride = variant.partition(".stride=")
    linear, key, value = 4 * D * D, HEAD, HEAD
    if name in ("mla", "mtla"):
        key, up = HEAD + ROTARY, LATENT * 2 * D
        linear = D * HEADS * key + D * (LATENT + ROTARY) + up + D * D + up / 3
    pairs = positions / 2 / int(stride or 1) * HEADS * (4 * key + 3 * value)
    return 3 * (LAYERS * (linear + 3 * D * INNER) + VOCABULARY * D) + LAYERS * pairs


def lines() -> list[dict[str, Any]]:
    """A line for each variant of each measurement; times in milliseconds, of a step if it is decoding."""
    lines = []
    for text in (HERE / "records.jsonl").read_text().splitlines():
        record = json.loads(text)
        for row in record["bench"]["rows"]:
            calls = row.get("steps", 1)
            shape = f"batch {row['batch']}, " + (
                f"after {row['context']}" if "context" in row else f"{row['text']} positions"
            )
            for name, values in row["variants"].items():
                times = {key: 1e3 * values["seconds"][key] / calls for key in ("median", "min", "max")}
                line = {"What": row["what"], "Shape": shape, "Variant": name, "ms": times["median"]}
                if row["what"] == "model" and name.partition(".")[0] in ("mha", "mla", "mtla"):
                    line["by count"] = products(name, row["text"]) / products("mha", row["text"])
                lines.append(
                    line | {"least": times["min"], "most": times["max"], "times read": values.get("times_read")}
                )
    return lines


def table() -> pd.DataFrame:
    """With each time over that of the fastest peer of the shape, and over MHA's where there is no peer."""
    data = pd.DataFrame(lines())
    shapes = data.groupby(["What", "Shape"], sort=False)
    peers = data[data["Variant"].isin(PEERS)].groupby(["What", "Shape"])["ms"].min()
    best = {key: peers.get(key, rows.loc[rows["Variant"] == "mha", "ms"].min()) for key, rows in shapes}
    over = [line.ms / best[line.What, line.Shape] for line in data.itertuples()]
    return data.assign(**{"of the peer": over}).round(
        {"ms": 3, "least": 3, "most": 3, "times read": 2, "of the peer": 2, "by count": 2}
    )


def page(data: pd.DataFrame) -> str:
    """A table for each kind of measurement: a row for each variant, a column for each shape."""
    parts = ["# Mechanisms beside the Llama of transformers"]
    for what, rows in data.groupby("What", sort=False):
        shapes = list(dict.fromkeys(rows["Shape"]))
        parts += [
            "",
            f"## {TITLES[str(what)]}",
            "",
            "| | " + " | ".join(shapes) + " |",
            "| --- |" + " ---: |" * len(shapes),
        ]
        for name in dict.fromkeys(rows["Variant"]):
            cells = []
            for shape in shapes:
                line = rows[(rows["Variant"] == name) & (rows["Shape"] == shape)].squeeze()
                read = "" if pd.isna(line["times read"]) else f", {line['times read']:.1f} r"
                cells.append(f"{line['ms']:.3g} ({line['of the peer']:.2f}{read})")
            parts.append(f"| `{name}` | " + " | ".join(cells) + " |")
    note = "Median of the rounds. In brackets: over the fastest peer of the shape, or over MHA where there is none; "
    note += "r: times the time in which the bytes of weights and caches are read once."
    return "\n".join([*parts, "", note, ""])


if __name__ == "__main__":
    data = table()
    data.to_csv(HERE / "table.csv", index=False, lineterminator="\n")
    (HERE / "table.md").write_text(page(data))

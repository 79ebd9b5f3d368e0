"""Write table.md, table.csv and settings.csv from the lines of search.py.

python experiments/tensorllm/smollm2/table.py
"""

import json
from math import sqrt
from pathlib import Path
from typing import Any

import pandas as pd
from scipy.stats import binomtest

from attnlab.report.significance import holm

HERE = Path(__file__).parent
METHODS = ("tensorllm", "laser", "laser_mlp", "trawl", "laser_tensorllm", "mlp_svd")
SETS = {"fever": "FEVER", "hotpotqa": "HotpotQA", "arc_easy": "ARC-Easy"}
NOT_RUN = "not run"


def lines() -> pd.DataFrame:
    """A row for each line of the search, with its setting as text."""
    data = pd.DataFrame(
        {**json.loads(line), "set": name}
        for name in SETS
        for file in sorted(HERE.glob(f"{name}_*.jsonl"))
        for line in file.read_text().splitlines()
    )
    return data.assign(shown=data["setting"].map(shown)).drop_duplicates(["set", "part", "method", "shown", "answered"])


def shown(setting: dict[str, Any]) -> str:
    """A setting as text: the layer, and the rank or rho."""
    layers = setting.get("layers")
    where = [] if not setting else ["all layers" if layers is None else f"layer {layers[0]}"]
    return ", ".join([*where, *(f"{key} {setting[key]}" for key in ("rank", "rho") if key in setting)])


def mcnemar(before: str, after: str) -> dict[str, Any]:
    """The exact paired test of two rows of right answers, and a 95 % interval of the difference in points."""
    pairs = list(zip(before, after, strict=True))
    count, gained, lost = len(pairs), pairs.count(("0", "1")), pairs.count(("1", "0"))
    p = binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
    change, spread = (gained - lost) / count, sqrt(gained + lost - (gained - lost) ** 2 / count) / count
    return {
        "change": 100 * change,
        "least": 100 * (change - 1.96 * spread),
        "most": 100 * (change + 1.96 * spread),
        "gained": gained,
        "lost": lost,
        "p": p,
    }


def table() -> pd.DataFrame:
    """A row for each set and method: the chosen setting, and its accuracy on the reporting part."""
    data = lines()
    rows = []
    for name, title in SETS.items():
        of_set = data[(data["set"] == name) & data["answered"]]
        dense = of_set[of_set["method"] == "dense"].set_index("part")
        for method in METHODS:
            row: dict[str, Any] = {"Questions": title, "Method": method}
            parts = {part: of_set[(of_set["method"] == method) & (of_set["part"] == part)] for part in dense.index}
            if "reporting" in parts and len(parts["reporting"]):
                (report,) = parts["reporting"].to_dict("records")
                first, original = dense.loc["choosing"], dense.loc["reporting"]
                choice = parts["choosing"].set_index("shown").loc[report["shown"]]
                row |= {"Setting": report["shown"], "choosing, original": first["accuracy"]}
                row |= {"choosing, compressed": choice["accuracy"], "reporting, original": original["accuracy"]}
                row |= {"reporting, compressed": report["accuracy"], **mcnemar(original["right"], report["right"])}
                row |= {"loss, original": original["loss"], "loss, compressed": report["loss"]}
                row |= {"asked": len(report["right"])}
            rows.append(row)
    result = pd.DataFrame(rows)
    if "p" not in result:
        return result.assign(p=None, change=None, Holm=None)
    tested = result["p"].notna()
    result.loc[tested, "Holm"] = holm(result.loc[tested, "p"].tolist(), len(result))
    return result.round({"change": 2, "least": 2, "most": 2, "p": 5, "Holm": 5})


def page(data: pd.DataFrame) -> str:
    """The table as Markdown."""
    parts = [
        "# SmolLM2-135M-Instruct: accuracy of chosen compressions on other questions",
        "",
        "| Questions | Method | Chosen | Choosing part, % | Reporting part, % | Change | Gained, lost | p | Holm |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in data.to_dict("records"):
        if pd.isna(row["p"]):
            parts.append(f"| {row['Questions']} | {row['Method']} |" + f" {NOT_RUN} |" * 7)
            continue
        parts.append(
            f"| {row['Questions']} | {row['Method']} | {row['Setting']} "
            f"| {row['choosing, original']:.1f} -> {row['choosing, compressed']:.1f} "
            f"| {row['reporting, original']:.1f} -> {row['reporting, compressed']:.1f} "
            f"| {row['change']:+.1f} ({row['least']:+.1f} to {row['most']:+.1f}) "
            f"| {row['gained']:.0f}, {row['lost']:.0f} | {row['p']:.3g} | {row['Holm']:.3g} |"
        )
    parts += [
        "",
        "Accuracy of the original -> that of the compressed model, and the change in points with its 95 % interval.",
        conclusion(data),
        "",
    ]
    return "\n".join(parts)


def conclusion(data: pd.DataFrame) -> str:
    """What the tests say, in a sentence."""
    tested = data[data["p"].notna()]
    sure = tested[tested["Holm"] < 0.05] if len(tested) else tested
    names = [
        [f"{row['Method']} on {row['Questions']}" for row in rows.to_dict("records")]
        for rows in (sure[sure["change"] > 0], sure[sure["change"] < 0])
    ]
    raised, lowered = (", ".join(group) or "none" for group in names)
    return (
        f"Of {len(data)} pairs of a method and a set, {len(tested)} are tested. At 5 % after Holm, accuracy is raised "
        f"by {raised}, and lowered by {lowered}."
    )


if __name__ == "__main__":
    data = table()
    data.to_csv(HERE / "table.csv", index=False, lineterminator="\n")
    (HERE / "table.md").write_text(page(data))
    settings = lines()[["set", "part", "method", "shown", "accuracy", "loss"]]
    settings.to_csv(HERE / "settings.csv", index=False, lineterminator="\n")

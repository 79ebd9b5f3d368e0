"""All ratios of benchmarks in one page."""

import re
from pathlib import Path
from typing import Any

import pytest

from attnlab.config.build import CONF
from attnlab.errors import DataError
from attnlab.report.command import main
from tests.report.conftest import Run
from tests.report.test_bench import DECODING, bench, measured, training

EXPERIMENTS = CONF.parent / "experiments"


def cells(page: str, words: str) -> list[list[str]]:
    """The cells of the lines that have `words`."""
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in page.splitlines() if words in line]


def test_a_line_for_each_ratio(tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    decoding = DECODING | {"reorder": True, "context": 0}
    pair = {"of": "mtla", "against": "published_mtla", "seconds": {"median": 1.2345, "min": 1.0, "max": 2.0}}
    first = bench(run, "a", [training(512, 1.2), decoding | {"ratios": [pair | {"cache": 4.0}]}])
    second = bench(run, "b", [training(1024, 0.5), DECODING])  # it has no ratio of decoding
    out = tmp_path / "out"
    assert main(["speed", str(first), str(second), "--out", str(out)]) == 0
    assert capsys.readouterr().out.split() == [str(out / "SPEED.md")]
    page = (out / "SPEED.md").read_text()
    training_page, decoding_page = page[page.index("## Training step") :].split("## Decoding, token by token")
    (row, _, later, _) = cells(training_page, "`mtla s=2`")
    assert row[:5] == ["`mtla s=2`", "`mha`", "d 512, 512 positions, batch 2", "1.2 (0.6 to 2.4)", "1.5"]
    assert later[2:4] == ["d 512, 1024 positions, batch 2", "0.5 (0.25 to 1)"] and "By CPU" not in page
    assert [line[3] for line in cells(training_page, "no room")] == 2 * ["not run: no room"]
    ((_, other, shape, faster, cache, _, record),) = cells(decoding_page, "`mtla s=2`")
    assert (other, faster, cache) == ("published", "1.23 (1 to 2)", "4")
    assert shape == "d 512, prefix 4, 2 steps, batch 8, rows reordered"
    assert (out / record[record.index("(") + 1 : -1]).resolve() == first


def test_the_peak_of_almost_nothing_is_not_divided(tmp_path: Path, run: Run) -> None:
    row = training(512, 1.2)
    row["variants"]["mtla"] = measured(0.01, 0.5)
    path = bench(run, "a", [row])
    assert main(["speed", str(path)]) == 0
    assert "Times less memory |" not in (path.parent / "SPEED.md").read_text()


def test_one_mechanism_beside_many_is_a_table_by_length(tmp_path: Path, run: Run) -> None:
    names = ["gqa", "mla", "mtla.stride=2", "tpa"]

    def row(text: int) -> dict[str, Any]:
        pairs: list[dict[str, Any]] = [
            {"of": "mha", "against": name, "seconds": {"median": 0.5 + i, "min": 0.25, "max": 4.0}, "peak_memory": 2.0}
            for i, name in enumerate(names)
        ]
        if text == 64:
            pairs[3] = {"of": "mha", "against": "tpa", "not run": "no room"}
        variants = {name: measured(0.01, 10.0) | {"share_outside_products": 0.25} for name in ["mha", *names]}
        return {"what": "training", "batch": 2, "prefix": 0, "text": text, "variants": variants, "ratios": pairs}

    path = bench(run, "a", [row(32), row(64)])
    assert main(["speed", str(path)]) == 0
    page = (path.parent / "SPEED.md").read_text()
    times, memory, shares = page[page.index("## All mechanisms by length") :].split("\n### ")[1:]
    assert [line[1:] for line in cells(times, "| `")] == [
        ["10 ms", "10 ms"],
        ["0.5 (0.25 to 4)"] * 2,
        ["1.5 (0.25 to 4)"] * 2,
        ["2.5 (0.25 to 4)"] * 2,
        ["3.5 (0.25 to 4)", "not run: no room"],
    ]
    assert cells(times, "Mechanism") == [["Mechanism", "32 positions", "64 positions"]]
    assert cells(memory, "`mtla.stride=2`") == [["`mtla.stride=2`", "2", "2"]]
    assert cells(shares, "`mha`")[-1] == ["`mha`", "25%", "25%"]
    assert "Training step" not in page and "[record](record.json)" in times


def test_nothing_to_show(run: Run) -> None:
    with pytest.raises(DataError, match="no finished record of mode=bench with a ratio"):
        main(["speed", str(bench(run, "a", [DECODING]))])


SPREAD = r"[\d.]+ \([\d.]+ to [\d.]+\)"


@pytest.mark.parametrize("path", [CONF.parent / "README.md", *sorted(EXPERIMENTS.glob("*/README.md"))], ids=str)
def test_the_ratios_in_a_readme_are_those_of_the_records(path: Path) -> None:
    """Each row's, next to each other as in a row of SPEED.md, with the factor of memory that follows there."""
    rows = [re.sub(r" *\| *", "|", line) for line in (EXPERIMENTS / "SPEED.md").read_text().splitlines()]
    for line in path.read_text().splitlines():
        if line.startswith("|") and (found := re.search(rf"{SPREAD}( \| {SPREAD})*( \| [\d.]+)?", line)):
            ratios = re.sub(r" *\| *", "|", found[0])
            assert any(f"|{ratios}|" in row for row in rows), line


def test_there_are_ratios_in_the_readmes() -> None:
    texts = [path.read_text() for path in (CONF.parent / "README.md", *EXPERIMENTS.glob("*/README.md"))]
    assert sum(len(re.findall(SPREAD, text)) for text in texts) > 60

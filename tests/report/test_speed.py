"""The ratios of speed in README and the pages of experiments are those of SPEED.md."""

import re
from pathlib import Path

import pytest

from attnlab.config.build import CONF

EXPERIMENTS = CONF.parent / "experiments"
PAGES = [CONF.parent / "docs" / "how-to" / "speed.md", *sorted(EXPERIMENTS.glob("*/README.md"))]
SPREAD = r"[\d.]+ \([\d.]+ to [\d.]+\)"


@pytest.mark.parametrize("path", PAGES, ids=str)
def test_the_ratios_in_a_readme_are_those_of_the_records(path: Path) -> None:
    """Each row's, next to each other as in a row of SPEED.md, with the factor of memory that follows there."""
    rows = [re.sub(r" *\| *", "|", line) for line in (EXPERIMENTS / "SPEED.md").read_text().splitlines()]
    for line in path.read_text().splitlines():
        if line.startswith("|") and (match := re.search(rf"{SPREAD}( \| {SPREAD})*( \| [\d.]+)?", line)):
            ratios = re.sub(r" *\| *", "|", match[0])
            assert any(f"|{ratios}|" in row for row in rows), line


def test_there_are_ratios_in_the_readmes() -> None:
    texts = [
        path.read_text() for path in (CONF.parent / "docs" / "how-to" / "speed.md", *EXPERIMENTS.glob("*/README.md"))
    ]
    assert sum(len(re.findall(SPREAD, text)) for text in texts) > 60

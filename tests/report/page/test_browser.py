"""The page in headless Chromium. Skipped where there is none."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnlab.report import command
from tests.report.page.conftest import Write

pytest.importorskip("bokeh")
pytest.importorskip("itables")

from tests.report.page.chromium import BROWSER, Page

pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="needs Chromium")]
HOSTILE = "<script>alert(1)</script>"
IMAGE = '"><img src=x onerror=alert(1)>'
ROWS = "[...document.querySelectorAll('#runs tbody tr[data-run]')]"
FIRST = f"{ROWS}.map(row => row.cells[0].textContent)"
QUALITIES = f"{ROWS}.map(row => row.cells[2].textContent)"


@pytest.fixture(scope="module")
def file(write: Write, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of fifteen runs, the newest first: 0 has no score, 1 and 2 hostile texts, 3 failed, 14 is the best."""
    place = tmp_path_factory.mktemp("report") / "outputs"
    for i in range(15):
        mechanism = {0: "mha", 1: HOSTILE, 2: IMAGE}.get(i, "mla" if i % 2 else "tpa")
        write(
            place / f"run{i:02}",
            [(step, 5 / step + i) for step in range(1, 300)],
            [(f"satz {HOSTILE}", f"a reference {j}", f"a {mechanism} {j}") for j in range(8)],
            attention=mechanism,
            stride=None,
            rank=5,
            inference__tokens_per_second="not run" if i == 9 else 100.0 + i,
            task=HOSTILE if i == 1 else "mustc",
            corpus="sample",
            tags=[HOSTILE, IMAGE] if i == 1 else [],
            command=f"python -m attnlab task=mustc attention='{mechanism}'",
            quality={"bleu": 2.0 * i} if i else {},
            kv_cache__elements_per_token_per_layer=64 * i,
            started=f"2026-01-{28 - i}T00:00:00+00:00",
            **({"status": "failed", "error": "disk full"} if i == 3 else {}),
        )
    page = place.parent / "report.html"
    assert command.main([str(place), "-o", str(page)]) == 0
    return page


@pytest.fixture
def page(file: Path, tmp_path: Path) -> Iterator[Page]:
    with Page(file, tmp_path) as opened:
        yield opened
        assert opened.problems == []
        assert opened.get("document.querySelectorAll('img').length") == 0


def test_sort_search_and_filter(page: Page) -> None:
    assert page.get(QUALITIES) == ["not run", *(f"{2 * i}" for i in range(1, 10))]
    for way in ("ascending", "descending"):
        page.click("#runs th:nth-child(3) .dt-column-title")
        page.wait(f"document.querySelector('#runs th:nth-child(3)').ariaSort === '{way}'")
    assert page.get(QUALITIES) == [f"{2 * i}" for i in range(14, 4, -1)]  # as numbers, not as texts
    page.click(".dt-search input")
    page.type("tpa")
    assert page.get(FIRST) == ["tpa"] * 6 and page.get(QUALITIES)[0] == "28"
    assert "6 runs" in page.get("document.querySelector('.dt-info').textContent")
    assert sorted(page.drawn("plot-cache")) == [4, 6, 8, 10, 12, 14] == sorted(page.drawn("loss"))
    assert page.get("[...document.querySelectorAll('#quality .names span:not([hidden])')].map(n => n.textContent)") == [
        "tpa"
    ]
    assert page.get("document.querySelectorAll('[data-of]:not([hidden])').length") == 4 * 6
    page.get("document.querySelector('.dt-search input').select()")
    page.type("disk full no such run")
    assert page.get(ROWS + ".length") == 0
    page.get("document.querySelector('.dt-search input').select()")
    page.type(" ")
    page.click("#runs th:nth-child(1) .dtcc-button")  # the filter of a column
    page.wait("document.querySelectorAll('.dtcc-list-buttons button').length > 0")
    options = page.get("[...document.querySelectorAll('.dtcc-list-buttons .dtcc-button-text')].map(b => b.textContent)")
    assert sorted(options) == sorted({"mha", "mla", "tpa", HOSTILE, IMAGE})
    page.click(f".dtcc-list-buttons button:nth-child({options.index('mla') + 1})")
    assert set(page.get(FIRST)) == {"mla"} and sorted(page.drawn("plot-cache")) == [3, 5, 7, 9, 11, 13]


def test_hostile_texts_are_shown_as_they_are(page: Page) -> None:
    assert HOSTILE in page.get(FIRST) and IMAGE in page.get(FIRST)
    page.click("tr[data-run='1'] button")
    assert HOSTILE in page.get("document.querySelector('.details').innerText")
    assert f"satz {HOSTILE}" in page.get("document.querySelector('#samples').innerText")
    assert f"a {IMAGE} 0" in page.get("document.querySelector('#samples').innerText")
    page.get("document.querySelector('#group').value = 1;"
             "document.querySelector('#group').dispatchEvent(new Event('change'))")  # fmt: skip
    assert page.drawn("plot-cache") == [1]
    x, y = page.point("plot-cache", 1)
    page.move(x - 5, y)
    page.move(x, y)
    _until(page, HOSTILE)


def test_hover_and_copy(page: Page) -> None:
    x, y = page.point("plot-cache", 9)
    page.move(x - 5, y)
    page.move(x, y)
    text = _until(page, "run09")
    assert "mla, rank 5, seed 1" in text and "18 BLEU" in text and "576" in text and "not run" in text
    page.click("tr[data-run='9'] button")
    assert page.get("document.querySelector('tr[data-run=\"9\"] button').ariaExpanded") == "true"
    page.click(".details .copied button")
    assert page.get("document.querySelector('.details .copied button').textContent") == "copied"
    page.get("document.querySelector('.dt-search input').focus()")
    page.paste()
    assert (
        page.get("document.querySelector('.dt-search input').value") == "python -m attnlab task=mustc attention='mla'"
    )


@pytest.mark.parametrize("dark", [False, True])
def test_on_a_phone(file: Path, tmp_path: Path, dark: bool) -> None:
    """No part of the page is wider than the window, also with a row open and beside the mouse."""
    with Page(file, tmp_path, width=390, height=844, dark=dark) as page:
        page.click("tr[data-run='4'] button")
        assert page.get("document.querySelector('.details pre').getBoundingClientRect().right") <= 390
        x, y = page.point("plot-cache", 8)
        page.move(x - 5, y)
        page.move(x, y)
        _until(page, "run08")
        assert page.get("document.documentElement.scrollWidth") <= 390
        ground = page.get("getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(20, 24, 29)" if dark else "rgb(255, 255, 255)")
        assert page.problems == []


def test_without_runs(tmp_path: Path) -> None:
    (tmp_path / "outputs").mkdir()
    command.main([str(tmp_path / "outputs"), "-o", str(tmp_path / "report.html")])
    with Page(tmp_path / "report.html", tmp_path / "profile") as page:
        assert page.get("document.body.innerText.trim()").startswith("No runs in ") and page.problems == []


def _until(page: Page, words: str) -> str:
    """The text beside the mouse, once it has these words."""
    for _ in range(100):
        if words in (text := page.tooltip()):
            return text
        time.sleep(0.05)
    raise AssertionError(page.tooltip())

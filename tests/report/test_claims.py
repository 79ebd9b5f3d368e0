"""Numbers in README.md and in the pages under docs/ and experiments/ are those of the committed records.

:mod:`attnlab.report.marks` has the form of a mark. Besides its numbers a test knows the records behind it: their check,
machine, day and seeds.
"""

import calendar
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from attnlab.config.build import CONF, leaves
from attnlab.errors import ConfigError
from attnlab.report.marks import MARK, NUMBER, Evidence, Marks
from attnlab.report.match import PLACES, composed
from attnlab.run.identity import canonical

ROOT = CONF.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "experiments").rglob("*.md"))]

COUNTED = re.compile(r": (parameters|kv_cache|multiply_adds_per_token)\.")  # fields that no machine and no seed changes


@cache
def marks() -> Marks:
    return Marks(ROOT / "experiments")


@cache
def evidence(mark: str, folder: Path) -> Evidence:
    return marks().evidence(mark, folder)


def agrees(printed: str, value: float) -> bool:
    mantissa, _, exponent = printed.replace(",", "").partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    return abs(float(printed.replace(",", "")) - value) <= unit / 2 * (1 + 1e-9)


def check(text: str, folder: Path) -> None:
    """Compare each mark of a page with the numbers before it."""
    start = 0
    for mark in MARK.finditer(text):
        values, printed = evidence(mark[1], folder).values, NUMBER.findall(text[start : mark.start()])
        if mark[1].startswith("among"):
            assert all(any(agrees(number, value) for number in printed) for value in values), (mark[1], values)
        else:
            last = printed[-len(values) :]
            assert len(last) == len(values) and all(map(agrees, last, values)), f"{mark[1]}: {last}, but {values}"
        start = mark.end()
    assert text.count("<!-- =") == len(MARK.findall(text)), "a mark is not closed"


def blocks(section: str) -> Iterator[str]:
    """Paragraphs, lists and hidden details of a section, and each row of a table with what stands above it."""
    caption = ""
    for block in re.split(
        r"\n\s*\n", re.sub(r"<details>.*?</details>", lambda m: re.sub(r"\n+", "\n", m[0]), section, flags=re.S)
    ):
        header, *rows = block.strip().splitlines() or [""]
        starts = [f"{caption}\n{block}"] if header.startswith("- ") else [block]
        yield from (f"{caption}\n{header}\n{row}" for row in rows) if header.startswith("|") else starts
        caption = block if not header.startswith("|") else caption


def problems(text: str, folder: Path, is_verdict: bool = False) -> Iterator[str]:
    """Marks whose records need a word that the page does not show; `is_verdict`: the page of claims."""
    for section in re.split(r"(?m)^(?=#)", text):
        named = {mark: evidence(mark, folder) for mark in MARK.findall(section)}
        whole = sum((one for mark, one in named.items() if not COUNTED.search(mark)), Evidence([], []))
        for block in blocks(section):
            words = MARK.sub("", block)
            last = block.splitlines()[-1] if "\n|" in block else block
            behind = sum((named[mark] for mark in MARK.findall(last) if not COUNTED.search(mark)), Evidence([], []))
            missing = [name for name in behind.machines if len(whole.machines) > 1 and name not in words]
            missing += [day for day in behind.days if len(whole.days) > 1 and not shows(words, day)]
            missing += ["check failed"] * (bool(behind.failed) and (is_verdict or "check failed" not in words))
            yield from (f"{name!r} is not shown: {' '.join(last.split())[:200]}" for name in missing)
        yield from (f"one seed: {sentence}" for sentence in alone(section, named))


def shows(words: str, day: str) -> bool:
    year, month, number = map(int, day.split("-"))
    return day in words or f"{number} {calendar.month_name[month]}" in words


def alone(section: str, named: dict[str, Evidence]) -> Iterator[str]:
    """Sentences with a word of more than their one seed can tell."""
    remaining = MARK.findall(section)
    text = MARK.sub("\0", section)
    for sentence in re.split(r"(?<=[.:])\s+(?=\W*[A-Z])|\n- |\n\n|\|", text):
        here = [named[remaining.pop(0)] for _ in range(sentence.count("\0"))]
        if any(len(one.seeds) == 1 for one in here) and re.search(r"\b(best|all|never|always)\b", sentence):
            yield " ".join(sentence.replace("\0", "").split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_marked_numbers_are_those_of_the_records(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    check(text, page.parent)
    assert page.name != "README.md" or page.parent.name == "experiments" or MARK.search(text), "no number is marked"
    assert list(problems(text, page.parent, page.name == "claims.md")) == []


FAILED = "204<!-- = gpu/bench/bench.csv : ms : Record=R5; Shape=batch 40 prefix 145 beam 50 steps 30; Variant=mtla -->"
TIME = (
    "0.237<!-- = gpu/bench/bench.csv : ms : Record=R1; Shape=batch 64 prefix 0 context 32768; Variant=mtla triton -->"
)
OTHER = "1338<!-- = mtla/bench/bench.csv : ms : Record=R7; Variant=mtla -->"
SEED = "29.2<!-- = comparison/wikitext2/mha_4e-3_seed1/record.json : quality.perplexity -->"
SEEDS = "29.2<!-- = comparison/wikitext2/mha_4e-3_seed*/record.json : quality.perplexity -->"


@pytest.mark.parametrize(
    ("text", "reasons"),
    [
        (f"It takes {FAILED} ms.", ["check failed"]),
        (f"It takes {FAILED} ms (check failed).", []),
        (f"The check failed.\n\nIt takes {FAILED} ms.", ["check failed"]),
        (f"Its check failed:\n\n| | ms |\n| --- | --- |\n| MTLA | {FAILED} |", []),
        (f"It takes {TIME} ms.", []),
        (f"A Xeon on 2026-11-27: {OTHER} ms. An H100 on 26 November: {TIME} ms.", []),
        (f"A Xeon: {OTHER} ms.\n\nAn H100: {TIME} ms.", ["2026-11-27", "2026-11-26"]),
        (f"On 2026-11-27 {OTHER} ms.\n\nAn H100 on 2026-11-26: {TIME} ms.", ["Xeon"]),
        (f"# One\n\n{OTHER} ms.\n\n# Another\n\n{TIME} ms.", []),
        (f"The best has {SEED}.", ["one seed"]),
        (f"It never has {SEED}.", ["one seed"]),
        (f"It has {SEED}. All others are elsewhere.", []),
        (f"The best has {SEEDS}.", []),
        (f"| | ppl |\n| --- | --- |\n| all | {TIME} |", []),
    ],
)  # fmt: skip
def test_a_mark_needs_the_words_that_tell_its_record_from_others(text: str, reasons: list[str]) -> None:
    wrong = list(problems(text, ROOT / "experiments"))
    assert len(wrong) == len(reasons) and all(reason in line for reason, line in zip(reasons, wrong, strict=True)), (
        wrong
    )


def test_a_verdict_has_no_number_of_a_failed_check() -> None:
    text = f"It takes {FAILED} ms (check failed)."
    assert any("check failed" in line for line in problems(text, ROOT / "experiments", is_verdict=True))


@cache
def is_older(path: Path) -> bool:
    """Whether a training's command gives another recipe today; a key that is missing counts as null."""
    saved = marks().records[path]
    words = [word for word in shlex.split(saved.record["command"]) if "=" in word and not word.startswith("seed=")]
    if saved.record["mode"] != "train" or any(word.startswith(("model=", "checkpoint=")) for word in words):
        return False  # a table's rows have their recipe, and one that starts from a run does not name it
    try:
        recipes = [leaves(canonical(composed(*words))), leaves(saved.canonical)]
    except ConfigError:  # an overlay or a key has another name today
        return True
    today, then = ({key: value for key, value in pairs if value is not None} for pairs in recipes)
    keys = {key for key in today.keys() | then.keys() if key not in PLACES}
    return any(today.get(key) != then.get(key) for key in keys)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_says_so_where_it_names_a_record_of_an_older_recipe(page: Path) -> None:
    """Records that a mark names directly. A table is filled by records of its rows' recipes alone."""
    text = page.read_text(encoding="utf-8")
    named = [mark for mark in MARK.findall(text) if ".json" in mark]
    records = [saved for mark in named for saved in evidence(mark, page.parent).records]
    older = {saved.name for saved in records if is_older(saved.path)}
    assert not older or "older recipe" in " ".join(MARK.sub("", text).split()), sorted(older)

"""The page of claims: experiments/claims.yaml as claims.md, with a verdict on each headline claim of the papers.

A verdict is not written by hand: :func:`verdict` derives it from the claim's number.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, nan
from pathlib import Path
from typing import Any

import yaml

from attnlab.errors import ConfigError, nearest
from attnlab.report.marks import MARK, Evidence, Marks
from attnlab.report.significance import holm, over_seeds
from attnlab.report.table import Grid
from attnlab.run.files import write_text

FILE = "claims.yaml"
HEADERS = ["", "Claim", "Number", "Verdict"]
LEVEL = 0.05
FEWEST = 3  # seeds
VERDICTS = {
    "reproduced": "An exact count or an exact test gives what the paper states.",
    "refuted": "An exact count, an exact test or the paper's own tables contradict it.",
    "holds at our size": (
        "Measured on a smaller model or another machine: the whole interval of the number agrees with the claim, and a "
        "difference has p below 5 % by Holm's correction for all comparisons of its table, over at least three seeds."
    ),
    "does not hold at our size": (
        "The same where the whole interval contradicts the claim. The paper's own size is not contradicted."
    ),
    "undecided at our size": (
        "Measured, but one of these conditions is missing, or the comparison is not of like with like."
    ),
    "not run": "Nothing here measures what the claim is about. The commands and what they need are named.",
}
REPRODUCED, REFUTED, HOLDS, CONTRADICTED, UNDECIDED, OPEN = VERDICTS
TESTS = {"agrees": REPRODUCED, "contradicts": REFUTED}


@dataclass(frozen=True)
class Number:
    """The interval of a number that decides a claim; `exact`: a count. `p`: of no difference, corrected."""

    low: float
    high: float
    exact: bool = False
    p: float = 0.0


def verdict(number: Number, least: float = -inf, most: float = inf, is_like: bool = True) -> str:
    """The verdict on a claim whose number should lie from `least` to `most`.

    `is_like`: whether like was compared with like, over enough seeds.
    """
    agrees, contradicts = least <= number.low and number.high <= most, number.high < least or most < number.low
    if number.exact and is_like:
        return REPRODUCED if agrees else REFUTED
    if not is_like or not number.p < LEVEL or agrees == contradicts:
        return UNDECIDED
    return HOLDS if agrees else CONTRADICTED


def _over_seeds(values: Sequence[float], planned: int) -> Number:
    half = len(values) // 2
    test = over_seeds(list(zip(values[half:], values[:half], strict=True)))
    return Number(test.low, test.high, p=holm([test.p], planned)[0] if test.count >= FEWEST else nan)


READINGS: dict[
    str, Callable[[Sequence[float], int], Number]
] = {  # how the numbers of a claim's marks become an interval
    "count": lambda values, _: Number(values[0], values[0], exact=True),
    "more": lambda values, _: Number(values[0] - values[1], values[0] - values[1], exact=True),
    "times": lambda values, _: Number(values[0] / values[1], values[0] / values[1], exact=True),
    "spread": lambda values, _: Number(values[1], values[2]),  # a middle, the least and the most
    "difference": lambda values, _: Number(values[1], values[2], p=values[-1]),  # and last its p by Holm
    "seeds": _over_seeds,  # of one method with each seed, then of the other
}


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, in our words.

    Args:
        where: its place in the paper.
        why: what decides it, in Markdown; numbers have marks, as in a README.
        number: the one number that the page shows, in Markdown with its interval and its mark.
        reads: how the numbers of its marks are read, one of READINGS; empty: they do not decide the claim.
        asks: the least and the most number that agree with the claim; null: no bound.
        planned: the number of comparisons that Holm's correction of reading "seeds" counts.
        unlike: why the comparison is not of like with like.
        test: what an exact test shows about the claim, one of TESTS, in place of a number.
        commands: what a user can type to try it.
        needs: what the commands need.
    """

    claim: str
    where: str
    why: str
    number: str = "–"
    reads: str = ""
    asks: Sequence[float | None] = (None, None)
    planned: int = 1
    unlike: str = ""
    test: str = ""
    commands: Sequence[str] = ()
    needs: str = ""

    def verdict(self, evidence: Evidence) -> str:
        """The verdict by the evidence of its number. ConfigError: an unknown word."""
        for word, known in ((self.test, TESTS), (self.reads, READINGS)):
            if word and word not in known:
                raise ConfigError(f"{word!r} is none of {', '.join(known)}{nearest(word, list(known))}")
        if self.test:
            return TESTS[self.test]
        if not self.reads:
            return OPEN
        try:
            least, most = self.asks
            number = READINGS[self.reads](evidence.values, self.planned)
        except (IndexError, ValueError, ZeroDivisionError) as error:
            what = f"asks {self.asks} or too few numbers for {self.reads!r}"
            raise ConfigError(
                f"{self.claim!r}: expected [least, most] and the numbers of its marks, got {what}"
            ) from error
        enough = self.reads != "difference" or not evidence.seeds or len(evidence.seeds) >= FEWEST
        bounds = -inf if least is None else least, inf if most is None else most
        return verdict(number, *bounds, is_like=enough and not self.unlike)

    def details(self, behind: str) -> str:
        """What the page shows on demand; `behind`: the records."""
        why = self.why + f" The comparison is not of like with like: {self.unlike}" * bool(self.unlike)
        commands = "\n".join(f"- `{command}`" for command in self.commands)
        needs = f"Needs: {self.needs}." * bool(self.needs)
        return "\n\n".join(filter(None, [why, behind, commands, needs]))


def _evidence(marks: Marks, text: str, folder: Path) -> Evidence:
    """What the marks of a text name. ConfigError: a record whose check failed."""
    evidence = sum((marks.evidence(mark, folder) for mark in MARK.findall(text)), Evidence([], []))
    if evidence.failed:
        raise ConfigError(f"{', '.join(evidence.failed)}: its check failed, so that no verdict can use its numbers")
    return evidence


def _paper(claims: Sequence[dict[str, Any]], about: str = "") -> tuple[str, list[Claim]]:
    """The line above a paper's table, on its method and its words, and the rows."""
    return about, [Claim(**claim) for claim in claims]


def render(path: Path) -> list[Path]:
    """Write claims.md beside its file: counts of verdicts, and for each paper a table and what is behind its rows.

    ConfigError for a wrong file, or for a mark that names a record whose check failed.
    """
    try:
        plain = yaml.safe_load(path.read_text(encoding="utf-8"))
        title = plain["title"]
        papers = {paper: _paper(**part) for paper, part in plain["papers"].items()}
    except (OSError, yaml.YAMLError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path}: not a page of claims: {' '.join(str(error).split())}") from error
    marks, parts = Marks(path.parent), []
    counts = Grid(
        title, ["Paper", *VERDICTS], notes=[f"{name}: {text}" for name, text in VERDICTS.items()], is_markup=True
    )
    for paper, (about, claims) in papers.items():
        table, behind, verdicts = Grid(paper, HEADERS, is_markup=True), [], []
        for i, claim in enumerate(claims, 1):
            try:
                number = _evidence(marks, claim.number, path.parent)
                every = _evidence(marks, f"{claim.claim} {claim.number} {claim.why}", path.parent)
                verdicts.append(claim.verdict(number))
                table.rows.append([str(i), claim.claim, " ".join([claim.number, number.about()]).strip(), verdicts[-1]])
                details = claim.details(every.places(marks.root))
                behind.append(f"<details><summary>{i}. {claim.where}</summary>\n\n{details}\n\n</details>\n")
            except (ConfigError, TypeError) as error:
                raise ConfigError(f"{path}: {claim.claim!r}: {error}") from error
        counts.rows.append([paper, *(str(verdicts.count(name)) for name in VERDICTS)])
        heading, rest = table.markdown().replace(" ---:", " ---").split("\n", 1)
        parts += [f"#{heading}\n\n{about}\n{rest}" if about else f"#{heading}\n{rest}", *behind]
    page = path.with_suffix(".md")
    write_text(page, "\n".join([counts.markdown(), *parts]))
    return [page]

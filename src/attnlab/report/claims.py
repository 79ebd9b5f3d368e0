"""The page of claims: experiments/claims.yaml, a verdict on each headline claim of the papers, as claims.md."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from attnlab.errors import ConfigError, nearest
from attnlab.report.table import Grid
from attnlab.run.files import write_text

FILE = "claims.yaml"
HEADERS = ["Claim", "In the paper", "Verdict", "What decides it", "Commands"]


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, in our words.

    Args:
        where: its place in the paper.
        verdict: one of the file's `verdicts`.
        why: what decides it, in Markdown; numbers have marks, as in a README.
        commands: what a user can type to try it.
        needs: what the commands need.
    """

    claim: str
    where: str
    verdict: str
    why: str
    commands: Sequence[str] = ()
    needs: str = ""

    def cells(self) -> list[str]:
        """Its row of the paper's table."""
        commands = "; ".join(f"`{command}`" for command in self.commands)
        return [self.claim, self.where, self.verdict, self.why, commands + f". Needs: {self.needs}." * bool(self.needs)]


def _paper(claims: Sequence[dict[str, Any]], about: str = "") -> tuple[str, list[Claim]]:
    """The line above a paper's table, on its method and its words, and the rows."""
    return about, [Claim(**claim) for claim in claims]


def render(path: Path) -> list[Path]:
    """Write claims.md beside its file: counts of verdicts, and a table for each paper. ConfigError for a wrong file."""
    try:
        plain = yaml.safe_load(path.read_text(encoding="utf-8"))
        title, verdicts = plain["title"], plain["verdicts"]
        papers = {paper: _paper(**part) for paper, part in plain["papers"].items()}
    except (OSError, yaml.YAMLError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path}: not a page of claims: {' '.join(str(error).split())}") from error
    for claim in (claim for _, claims in papers.values() for claim in claims):
        if claim.verdict not in verdicts:
            near = nearest(claim.verdict, verdicts)
            raise ConfigError(f"{path}: {claim.claim!r}: verdict {claim.verdict!r} is not among its verdicts{near}")
    notes = [f"{name}: {text}" for name, text in verdicts.items()]
    counts = Grid(title, ["Paper", *verdicts], notes=notes, is_markup=True)
    parts = []
    for paper, (about, claims) in papers.items():
        counts.rows.append([paper, *(str(sum(claim.verdict == name for claim in claims)) for name in verdicts)])
        rows = [claim.cells() for claim in claims]
        table = Grid("\n\n".join(filter(None, [paper, about])), HEADERS, rows, is_markup=True).markdown()
        parts.append(f"#{table}".replace(" ---:", " ---"))
    page = path.with_suffix(".md")
    write_text(page, "\n".join([counts.markdown(), *parts]))
    return [page]

"""Texts of records and names of folders in Markdown, Python and CSV files, where they are neither markup nor code."""

import json
import re

from attnlab.errors import printable

SPECIAL = re.compile(r"[\\`*<&~$#]|\](?=[(\[:])|!(?=\[)|(?<=:)//|(?<=www)\.", re.IGNORECASE)
EMPHASIS = re.compile(r"(?<![^\W_])_|_(?![^\W_])")  # an underscore inside a word is none
MARKED = re.compile(r"(`[^`]+`|(?<!!)\[[\w .-]+\]\([\w./-]+\))")  # code, and links to files
FORMULA = re.compile(r"[=@\t\r]|[+-].*[A-Za-z]\s*[(|!]", re.DOTALL)  # the beginning of what a spreadsheet computes


def plain(value: object) -> str:
    """One line of Markdown that shows a text as it is; control characters are escaped as in Python."""
    return _escaped(printable(" ".join(str(value).split())))


def inline(text: str) -> str:
    """One line of Markdown in which code in backquotes and links to files stay, and all else is :func:`plain`."""
    parts = MARKED.split(printable(" ".join(text.split())))
    return "".join(part if i % 2 else _escaped(part) for i, part in enumerate(parts))


def _escaped(text: str) -> str:
    escaped = SPECIAL.sub(lambda one: "&lt;" if one[0] == "<" else f"\\{one[0]}", text)
    return EMPHASIS.sub(r"\\_", escaped) if len(EMPHASIS.findall(text)) > 1 else escaped


def cell(text: str) -> str:
    """A line of Markdown as a cell of a table."""
    return text.replace("|", "\\|")


def code(text: object) -> str:
    """A text as code inside a line of Markdown."""
    shown = printable(str(text))
    fence = _fence(shown, 1)
    space = " " * (shown[:1] in ("`", " ", "") or shown[-1:] in ("`", " "))
    return f"{fence}{space}{shown}{space}{fence}"


def block(language: str, text: object) -> str:
    """A text, whose line breaks stay, as a block of code in Markdown."""
    shown = printable(str(text), keep="\n")
    fence = _fence(shown, 3)
    return f"{fence}{language}\n{shown}\n{fence}"


def literal(text: str) -> str:
    """A text as a string of Python, in double quotes."""
    return json.dumps(text, ensure_ascii=not text.isprintable())


def spreadsheet(value: object) -> object:
    """A value for a CSV file; a text that a spreadsheet would compute gets an apostrophe, as it is typed there."""
    return f"'{value}" if isinstance(value, str) and FORMULA.match(value) else value


def _fence(text: str, least: int) -> str:
    """More backquotes than stand in a row anywhere in a text."""
    return "`" * max(least, 1 + max(map(len, re.findall("`+", text)), default=0))

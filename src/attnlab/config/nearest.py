"""The valid names nearest to a mistyped one."""

import difflib
from collections.abc import Iterable


def nearest(word: str, names: Iterable[str]) -> str:
    """The end of an error line: the close names, and the others where all are few; empty if there are none."""
    names = sorted(names)
    close = matches(word, names)
    others = [name for name in names if name not in close] if len(names) <= 12 else []
    hint = f"; nearest: {', '.join(close)}" if close else ""
    return f"{hint}; {'others' if close else 'there are'}: {', '.join(others)}" if others else hint


def matches(word: str, names: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """At most three names, the closest first; capitals do not matter.

    Args:
        cutoff: likeness from 0 to 1 that a name needs, as difflib measures it.
    """
    by_lower = {name.lower(): name for name in names}
    return [by_lower[name] for name in difflib.get_close_matches(word.lower(), by_lower, 3, cutoff)]

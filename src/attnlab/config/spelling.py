"""Keys with a second spelling on the command line."""

from collections.abc import Iterable

SPELLINGS = {
    "compress.search": "task.search"
}  # it belongs to the task, which scores; its values are those of compress=


def spelled(arguments: Iterable[str]) -> list[str]:
    """A command line in which every key has its own name, as the configuration files and records have it."""
    found = []
    for text in arguments:
        key, sign, value = text.partition("=")
        found.append(f"{SPELLINGS.get(key, key)}{sign}{value}")
    return found

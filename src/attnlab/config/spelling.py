"""Keys with a second spelling on the command line."""

from collections.abc import Iterable

SPELLINGS = {
    "compress.search": "task.search"
}  # it belongs to the task, which scores; its values are those of compress=


def spelled(arguments: Iterable[str]) -> list[str]:
    """A command line in which every key has its own name, as the configuration files and records have it.

    The keys of the node `trainer` are arguments of Lightning's Trainer, which no file lists: Hydra must add them.

    Args:
        arguments: as in sys.argv[1:].
    """
    found = []
    for text in arguments:
        key, sign, value = text.partition("=")
        key = f"++{key}" if key.startswith("trainer.") else SPELLINGS.get(key, key)
        found.append(f"{key}{sign}{value}")
    return found

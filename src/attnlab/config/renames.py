"""What the keys and classes of an older configuration are called today. One line for each key that is renamed or added.

Run identities, old checkpoints and old records are read through this table, so that they keep their meaning; an old
key on the command line is refused with its new name.

A key is a dotted path from the root, `task.train.clip`, or a parameter of a class wherever it is used, `MTLA.stride`.
Classes and functions of this package are known by their name alone, `MTLA`: moving one to another module needs no
line, renaming one does.
"""

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Renames:
    """The tables.

    Args:
        keys: old key -> new key. A node moves with everything in it.
        removed: key that no longer exists -> what to write instead, one sentence for the error message.
        absent: key that was added later -> what its absence meant. A value equal to that counts as absent, so that
            adding an option changes no identity.
        classes: old name of a class or function -> new name. Whole dotted paths are allowed for foreign ones.
        rewrite: functions that change an old configuration (plain, in place) where one line cannot say it. They run
            before the other tables, in order, and must leave a current configuration as it is.
    """

    keys: Mapping[str, str] = field(default_factory=dict)
    removed: Mapping[str, str] = field(default_factory=dict)
    absent: Mapping[str, Any] = field(default_factory=dict)
    classes: Mapping[str, str] = field(default_factory=dict)
    rewrite: tuple[Callable[[MutableMapping[str, Any]], None], ...] = ()


RENAMES = Renames(
    keys={
        "bench.prompt": "bench.prefix",
        "task.attention_prompt": "task.attention_prefix",
        "task.flow": "task.kind",
        "AbsoluteMultiLinear.reads_prompt": "AbsoluteMultiLinear.reads_prefix",
        "RelativeMultiLinear.reads_prompt": "RelativeMultiLinear.reads_prefix",
        "SummedMultiLinear.reads_prompt": "SummedMultiLinear.reads_prefix",
        "TiedMultiLinear.reads_prompt": "TiedMultiLinear.reads_prefix",
    },
    classes={
        "tests.reference.published.of": "of",
        "ImageClassificationFlow": "ImageClassificationTask",
        "LanguageModellingFlow": "LanguageModellingTask",
        "SequenceToTextFlow": "SequenceToTextTask",
        "SpokenIntentFlow": "SpokenIntentTask",
    },
)


def advice(key: str, owner: str = "", renames: Renames = RENAMES) -> str | None:
    """What to write instead of an old key; None if `key` is not one.

    Args:
        key: a dotted key of the command line.
        owner: the name of the class beside whose `_target_` the key stands, if there is one.
        renames: the tables.
    """
    last = key.rpartition(".")[2]
    for old in (key, *([f"{owner}.{last}"] if owner else [])):
        if old in renames.removed:
            return f"{key} was removed: {renames.removed[old]}"
    parts = key.split(".")
    for i in range(len(parts), 0, -1):
        old, rest = ".".join(parts[:i]), parts[i:]
        if old in renames.keys:
            return f"{key} was renamed: write {'.'.join([renames.keys[old], *rest])}"
        if old in renames.removed:
            return f"{key} was removed: {renames.removed[old]}"
    if owner and f"{owner}.{last}" in renames.keys:
        new = renames.keys[f"{owner}.{last}"].partition(".")[2]
        return f"{key} was renamed: write {key.removesuffix(last)}{new}"
    return None

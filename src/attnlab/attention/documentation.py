"""Complete docstrings of mechanisms: every argument with its line, and an example."""

import inspect
import re
from typing import Any, get_args

COMMON = {
    "d_model": "width d of the inputs and outputs.",
    "num_heads": "number H of query heads.",
    "dropout": "probability that an attention weight is set to zero in training.",
    "norm_eps": "epsilon of the norms.",
}
SIZES = {"d_model": 64, "num_heads": 8}  # of the example
EXAMPLE = """
Example:
    >>> attention = {name}({arguments})
    >>> cache = attention.new_cache(batch=1, capacity=8)
    >>> attention.extend(torch.randn(1, 5, 64), cache).shape
    torch.Size([1, 5, 64])"""
SECTION = re.compile(r"\n\n(?=(?:\w+Error(?:, \w+Error)*|Attributes|Example|Args):)")
ENTRY = re.compile(r"^    (\w+(?:, \w+)*): (.*?)(?=^    \w|\Z)", re.MULTILINE | re.DOTALL)


def complete(cls: type) -> None:
    """Give the docstring of a class an entry for each argument, by default that of its bases, and an example."""
    if not cls.__doc__:
        return
    parts = SECTION.split(inspect.cleandoc(cls.__doc__))
    texts = dict(COMMON)
    for base in reversed(cls.__mro__):
        for section in SECTION.split(inspect.cleandoc(base.__doc__ or "")):
            if section.startswith("Args:"):
                texts |= {name: text.rstrip() for names, text in ENTRY.findall(section) for name in names.split(", ")}
    parameters = arguments(cls)
    entries = [f"    {name}: {texts[name]}" for name in parameters if name in texts]
    own = [part for part in parts if not part.startswith("Args:")]
    own.insert(1, "\n".join(["Args:", *entries]))
    required = [name for name, one in parameters.items() if one is not None and one.default is one.empty]
    if SIZES.keys() >= set(required) and not inspect.isabstract(cls) and "Example:" not in cls.__doc__:
        values = ", ".join(f"{name}={SIZES[name]}" for name in required)
        own.append(EXAMPLE.format(name=cls.__name__, arguments=values).strip())
    cls.__doc__ = "\n\n".join(own)


def arguments(cls: Any) -> dict[str, inspect.Parameter | None]:
    """The arguments of a class by name, with those that `**options: Unpack[...]` names."""
    names: dict[str, inspect.Parameter | None] = {}
    for parameter in inspect.signature(cls).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            names |= dict.fromkeys(
                name for options in get_args(parameter.annotation) for name in options.__annotations__
            )
        else:
            names[parameter.name] = parameter
    return names

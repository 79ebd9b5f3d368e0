"""The model card of an exported model: a README.md written from the record of its run."""

import math
from collections.abc import Mapping
from typing import Any

import torch
import yaml

from attnlab.attention import Attention
from attnlab.config.build import at
from attnlab.errors import printable
from attnlab.run.markup import block, cell, code, inline, plain
from attnlab.run.record import NOT_RUN, corpus_of

LICENSE = """The licence of these weights has not been stated: `unknown` above is a placeholder. Whoever publishes them
chooses one that the terms of the corpus allow.{code}"""
CODE = " The Python files are a part of attnlab, Apache-2.0."


def card(
    record: Mapping[str, Any],
    *,
    title: str,
    python: str,
    folder: str,
    usage: str,
    library: str | None = None,
    pipeline: str | None = None,
    attentions: list[Attention] | None = None,
    longest: int | None = None,
    dtype: torch.dtype = torch.float32,
    notes: list[str] | None = None,
    serve: str | None = None,
    has_code: bool = False,
) -> str:
    """The card in Markdown with YAML front matter. Values missing in the record are `not run`.

    Args:
        python: the code that loads the model.
        folder: the name of the exported folder in that code.
        usage: what follows a sentence about `folder`, in Markdown.
        library: the hub's name of the library that loads the model.
        attentions: the mechanisms with a cache, or None.
        serve: the section about serving, or None.
        has_code: the folder has Python files.
    """
    named = [printable(str(record[key])) for key in ("task", "attention", "compress") if _known(record.get(key))]
    front = {"library_name": library, "pipeline_tag": pipeline, "license": "unknown", "tags": ["attnlab", *named]}
    head = yaml.safe_dump(
        {key: value for key, value in front.items() if value}, sort_keys=False, width=math.inf
    ).strip()
    cache = {}
    if attentions:
        cache["cache, bytes per token"] = sum(a.cache_elements_per_token for a in attentions) * dtype.itemsize
        if longest is not None:
            of_text = sum(a.cache_bytes(1, longest, dtype=dtype) for a in attentions)
            cache[f"cache, bytes of a text of {longest} tokens"] = of_text
    facts = {
        "task": record.get("task"),
        "attention": record.get("attention"),
        "stride": record.get("stride"),
        "rank": record.get("rank"),
        "compression": record.get("compress"),
        "parameters": at(record, "parameters.total"),
        "of these in attention": at(record, "parameters.attention"),
        "positions": longest,
        **cache,
        **({"weights": "dequantised from a GGUF file"} if at(record, "weights.file") == "GGUF" else {}),
        "corpus": corpus_of(record),
        "training steps": at(record, "training.steps"),
        "seed": record.get("seed"),
        "precision": at(record, "config.hardware.precision"),
        "identity of the run": at(record, "identity.run"),
        "commit": at(record, "environment.git"),
    }
    needed = ("parameters", "corpus", "training steps")
    rows = [_row(key, value) for key, value in facts.items() if _known(value) or key in needed]
    parts = [
        f"---\n{head}\n---\n",
        f"# {plain(title)}\n",
        "\n".join(["| | |", "|---|---|", *rows]) + "\n",
        f"## Quality\n\n{_quality(record)}\n",
        f"## How to load it\n\n{block('python', python)}\n",
        f"{code(folder)} is the path of this folder, as seen from the folder above it{usage}\n",
        *([f"## How to serve it\n\n{serve}\n"] if serve else []),
        *(["## Notes\n\n" + "\n".join(f"- {inline(note)}" for note in notes) + "\n"] if notes else []),
        f"## How it was made\n\n{block('bash', record.get('command', NOT_RUN))}\n",
        f"## Licence\n\n{LICENSE.format(code=CODE if has_code else '')}\n",
    ]
    return "\n".join(parts)


def _quality(record: Mapping[str, Any]) -> str:
    values = record.get("quality")
    values = values if isinstance(values, Mapping) else {}
    rows = [_row(key, value) for key, value in values.items() if isinstance(value, int | float)]
    if not rows:
        return NOT_RUN
    unit, signature = values.get("unit"), values.get("signature")
    texts = [f"per {unit}" if unit and str(unit) not in str(signature) else "", str(signature or "")]
    text = plain("; ".join(part for part in texts if part))
    where = f"On the test set{f' ({text})' if text else ''}:"
    return "\n".join([where, "", "| | |", "|---|---|", *rows])


def _known(value: Any) -> bool:
    return value not in (None, "none", NOT_RUN)


def _row(key: str, value: Any) -> str:
    """A row of a table; numbers have separators of thousands."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return f"| {cell(plain(key))} | {cell(plain(NOT_RUN if value is None else text))} |"

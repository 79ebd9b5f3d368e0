"""Weights as a safetensors file that other libraries read, and the files beside them."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from attnlab.errors import DataError
from attnlab.models.language_model import LanguageModel
from attnlab.pretrained.weights import cannot_write
from attnlab.run.files import replacing_folder

WEIGHTS, CONFIG, README = "model.safetensors", "config.json", "README.md"


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """As :func:`attnlab.run.files.replacing_folder`; errors of the file system in the block name `folder`.

    Raises:
        WriteError: the folder cannot be written; an earlier one then stays.
    """
    with replacing_folder(folder) as partial:
        try:
            yield partial
        except (OSError, SafetensorError) as error:  # safetensors wraps the errors of the file system
            raise cannot_write(folder, error) from error


def save(folder: Path, weights: Mapping[str, Tensor], prefix: str = "") -> None:
    """Write weights, each on its own: of names that share a tensor every one is written.

    Args:
        folder: gets `model.safetensors`.
        weights: by name.
    """
    tensors = {f"{prefix}{name}": value.detach().cpu().contiguous().clone() for name, value in weights.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write plain values, readable."""
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def copy(files: Iterable[Path], folder: Path) -> list[str]:
    """Copy files into a folder; their names."""
    sources = sorted(files)
    for file in sources:
        (folder / file.name).write_bytes(file.read_bytes())
    return [file.name for file in sources]


@torch.no_grad()
def check_logits(model: LanguageModel, exported: Any, near: float) -> None:
    """Compare the logits of a text of random tokens.

    Args:
        exported: of transformers.
        near: the largest difference, relative to the largest logit or to 1.

    Raises:
        DataError: they differ by more.
    """
    size = exported.config.vocab_size
    ids = torch.randint(size, (1, min(model.longest, 64)), generator=torch.Generator().manual_seed(0))
    expected = model(ids)
    apart = float((exported(ids).logits - expected).abs().max()) / max(1.0, float(expected.abs().max()))
    if not apart <= near:
        kind = type(exported).__name__
        raise DataError(f"the logits of {kind} differ from the model's by {apart:.1e} of the largest, above {near:.0e}")

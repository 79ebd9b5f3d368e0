"""A compressed model on disk: a folder with its weights (safetensors) and a manifest (JSON) that says how to build it.

The manifest names the family of the model and, for each module that compression has put in place, its kind and sizes.
Reading a folder builds classes of these two lists and no others, and runs no code from it. Weights are named by their
content and written first, the manifest last: a folder is always complete.

A folder may come from somebody else: no file outside it is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from attnlab.compression.modules.base import Replacement, build, describe
from attnlab.compression.transform import densify, install, replacements
from attnlab.errors import ConfigError, DataError
from attnlab.pretrained import Family, families, family_of
from attnlab.pretrained.weights import cannot_write, check_values
from attnlab.run.files import replacing, write_bytes

FORMAT = 1
MANIFEST = "manifest.json"
COMPRESSED = "compressed"  # the folder of a run with its compressed model
KINDS = {"model": str, "options": dict, "dtype": str, "modules": dict, "weights": str, "sha256": str}  # in a manifest
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def save(
    model: nn.Module, folder: str | Path, name: str, options: dict[str, Any], notes: dict[str, Any] | None = None
) -> None:
    """Write a model into a folder.

    Args:
        folder: made if missing; an earlier model in it is replaced when the new one is complete.

    Raises:
        WriteError: the folder cannot be written; an earlier model in it then stays.
    """
    folder = Path(folder)
    modules = {path: describe(module) for path, module in replacements(model).items()}
    digest, weights = _write(folder, {key: value.detach().cpu().contiguous() for key, value in _once(model).items()})
    manifest = {
        "format": FORMAT,
        "family": family_of(model).name,
        "model": name,
        "options": options,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "modules": modules,
        "weights": weights,
        "sha256": digest,
        "notes": notes or {},
    }
    write_bytes(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
    for old in folder.glob("weights-*.safetensors"):
        if old.name != weights:
            old.unlink()


def _write(folder: Path, tensors: dict[str, Tensor]) -> tuple[str, str]:
    """Write weights under the name of their content: the digest and the name. They may be as large as the memory."""
    file = folder / "weights-new.safetensors"
    with replacing(file) as partial:
        try:
            save_file(tensors, partial)
        except (OSError, SafetensorError) as error:
            raise cannot_write(folder, error) from error
    digest = _digest(file)
    name = f"weights-{digest[:12]}.safetensors"
    file.replace(folder / name)
    return digest, name


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def load(folder: str | Path) -> nn.Module:
    """The model in a folder, its ranks and weights as they were saved, in eval mode on the CPU.

    Raises:
        DataError: no such folder, a damaged one, or one of another format.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    path = _weights(folder, manifest)
    try:
        if _digest(path) != manifest["sha256"]:
            raise DataError(f"{path}: damaged: its content is not what {MANIFEST} says; save or copy the folder again")
        model = _fill(_empty(manifest), path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except BROKEN as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{folder}: manifest and weights do not make a model: {reason}") from error
    return model.eval()


BROKEN = (SafetensorError, ConfigError, LookupError, TypeError, ValueError, RuntimeError, AttributeError, OverflowError)


def _weights(folder: Path, manifest: dict[str, Any]) -> Path:
    """The file of weights. DataError: it lies outside the folder."""
    path = folder / manifest["weights"]
    if Path(manifest["weights"]).name != manifest["weights"] or path.resolve().parent != folder.resolve():
        raise DataError(f"{folder / MANIFEST}: weights: expected a file of this folder, got {manifest['weights']!r}")
    return path


def _modules(manifest: dict[str, Any]) -> dict[str, Replacement]:
    return {path: build(layout) for path, layout in manifest["modules"].items()}


def _family(manifest: dict[str, Any]) -> Family:
    by_name, name = families(), manifest.get("family", "timm")
    if not isinstance(name, str) or name not in by_name:
        raise ConfigError(f"family: expected one of {', '.join(by_name)}, got {name!r}")
    family = by_name[name]
    if unknown := sorted(manifest["options"].keys() - family.options):
        known = ", ".join(sorted(family.options))
        raise ConfigError(f"the option {unknown[0]!r} of {MANIFEST} is unknown; expected only {known}")
    return family


def densified(folder: str | Path) -> nn.Module:
    """The model in a folder as one of the architecture that it was made from, in eval mode on the CPU.

    Raises:
        DataError: as `load` raises it.
        ConfigError: it cannot be written exactly (:func:`attnlab.compression.transform.densify`).
    """
    model, manifest = load(folder), read_manifest(Path(folder))
    with _dtype(manifest):
        dense = _family(manifest).empty(manifest["model"], manifest["options"])
    return densify(model, dense).eval()


def _empty(manifest: dict[str, Any]) -> nn.Module:
    """The model of a manifest on the CPU, in its type; buffers that are not saved have their values."""
    with _dtype(manifest):
        model = _family(manifest).empty(manifest["model"], manifest["options"])
        install(model, _modules(manifest))
    return model


@contextmanager
def _dtype(manifest: dict[str, Any]) -> Iterator[None]:
    """The type of new parameters: a model that is cast afterwards has rounded buffers (rotary frequencies)."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[manifest["dtype"]])
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)


def _once(model: nn.Module) -> dict[str, Tensor]:
    """The weights by name; of several names of one tensor (tied embeddings) the first."""
    weights: dict[str, Tensor] = {}
    places: set[Any] = set()
    for name, value in model.state_dict().items():
        place = (value.data_ptr(), value.shape, value.stride(), value.dtype) if value.numel() else name
        if place not in places:
            weights[name] = value
        places.add(place)
    return weights


def _fill(model: nn.Module, path: Path) -> nn.Module:
    """Load every weight, exactly, except second names of tied tensors. RuntimeError: one is missing or unknown."""
    weights = load_file(path)
    tied = model.state_dict().keys() - _once(model).keys()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in weights:
            check_values(path, name, weights[name], tensor.dtype)
            tensor.data = tensor.data.to(weights[name].dtype)  # a model of several types
    missing, unknown = model.load_state_dict(weights, strict=False)
    if lost := sorted(set(missing) - tied):
        raise RuntimeError(f"the weights lack {lost[0]}")
    if unknown:
        raise RuntimeError(f"the weights have {unknown[0]}, for which there is no place")
    return model


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder. DataError: there is none, or it is not of this format."""
    path = folder / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        missing = {"format", *KINDS} - manifest.keys()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); a compressed model's folder has it") from error
    except (ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"{path}: not a manifest ({' '.join(str(error).split())})") from error
    if missing or manifest["format"] != FORMAT:
        what = f"lacks {sorted(missing)[0]}" if missing else f"format {manifest['format']}, expected {FORMAT}"
        raise DataError(f"{path}: not a manifest of a compressed model: {what}")
    for key, kind in KINDS.items():
        if not isinstance(value := manifest[key], kind):
            raise DataError(f"{path}: {key}: expected {kind.__name__}, got {value!r}; save or copy the folder again")
    if manifest["dtype"] not in DTYPES:
        raise DataError(f"{path}: dtype: expected one of {', '.join(DTYPES)}, got {manifest['dtype']!r}")
    for name, layout in manifest["modules"].items():
        if not isinstance(layout, dict):
            raise DataError(f"{path}: modules.{name}: expected dict, got {layout!r}")
    return manifest


def is_folder(path: Path) -> bool:
    """Whether a folder has a compressed model."""
    return (path / MANIFEST).is_file()


def find(source: str | Path) -> Path | None:
    """The folder of the compressed model that a path names, as that folder or as a run; None: it names none.

    Args:
        source: a folder, a run directory, or any other text.
    """
    path = Path(source).expanduser()
    return next((candidate for candidate in (path / COMPRESSED, path) if is_folder(candidate)), None)

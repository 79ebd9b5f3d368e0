"""A compressed model on disk: a folder with its weights (safetensors) and a manifest (JSON) of its modules.

The manifest names the family of the model, and the kind and sizes of each compressed module. A folder may come from
an untrusted source: reading it builds known families and kinds alone, runs no code and reads no file outside it.
The name of the weight file has a digest of its content, and the manifest is written last: a folder is always complete.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from attnlab.compression.modules.base import build, describe
from attnlab.compression.transform import densify, install, replacements
from attnlab.errors import ConfigError, DataError
from attnlab.pretrained import adapter, families, family_of
from attnlab.pretrained.weights import cannot_write, check_values
from attnlab.run.files import digest_of, replacing, write_bytes

FORMAT = 1
MANIFEST = "manifest.json"
COMPRESSED = "compressed"  # the folder of a run with its compressed model
KINDS = {"format": int, "model": str, "options": dict, "dtype": str, "modules": dict, "weights": str, "sha256": str}
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BROKEN = (SafetensorError, ConfigError, LookupError, TypeError, ValueError, RuntimeError, AttributeError, OverflowError)


def save(
    model: nn.Module, folder: str | Path, name: str, options: dict[str, Any], notes: dict[str, Any] | None = None
) -> None:
    """Write a model into a folder; an earlier model in it is replaced when the new one is complete.

    Raises:
        WriteError: the folder cannot be written.
    """
    folder = Path(folder)
    modules = {path: describe(module) for path, module in replacements(model).items()}
    file = folder / "weights-new.safetensors"
    with replacing(file) as partial:
        try:
            save_file({name: value.detach().cpu().contiguous() for name, value in _once(model).items()}, partial)
        except (OSError, SafetensorError) as error:
            raise cannot_write(folder, error) from error
    digest = digest_of(file)
    weights = file.replace(folder / f"weights-{digest[:12]}.safetensors").name
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


def load(folder: str | Path) -> nn.Module:
    """Load the compressed model of a folder, in eval mode on the CPU.

    Raises:
        DataError: the folder is missing, damaged or of another format, or its sizes do not match its weights.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if (folder / adapter.CONFIG).is_file():
        raise DataError(
            f"{folder / adapter.CONFIG}: no adapter is merged into factors; load it with peft, or remove it"
        )
    path = folder / manifest["weights"]
    if path.name != manifest["weights"] or path.resolve().parent != folder.resolve():
        raise DataError(f"{folder / MANIFEST}: weights: expected a file of this folder, got {manifest['weights']!r}")
    try:
        if digest_of(path) != manifest["sha256"]:
            raise DataError(f"{path}: damaged: its checksum differs from {MANIFEST}; save or copy the folder again")
        with _dtype(manifest):
            model = _dense(manifest)
            modules = {place: build(layout) for place, layout in manifest["modules"].items()}
            install(model, modules)
        return _fill(model, path).eval()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except BROKEN as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{folder / MANIFEST}: manifest and weights do not make a model: {reason}") from error


def densified(folder: str | Path) -> nn.Module:
    """Load the model of a folder in its original dense architecture, in eval mode on the CPU. DataError: as `load`.

    ConfigError: the dense architecture cannot hold it exactly (:func:`attnlab.compression.transform.densify`).
    """
    model, manifest = load(folder), read_manifest(Path(folder))
    with _dtype(manifest):
        return densify(model, _dense(manifest)).eval()


def _dense(manifest: dict[str, Any]) -> nn.Module:
    """The dense model of a manifest, uninitialised. ConfigError: an unknown family, model or option."""
    by_name, name = families(), str(manifest.get("family", "timm"))
    if name not in by_name:
        raise ConfigError(f"family: expected one of {', '.join(by_name)}, got {name!r}")
    family = by_name[name]
    if unknown := sorted(manifest["options"].keys() - family.options):
        known = ", ".join(sorted(family.options))
        raise ConfigError(f"the option {unknown[0]!r} of {MANIFEST} is unknown; expected only {known}")
    return family.empty(manifest["model"], manifest["options"])


@contextmanager
def _dtype(manifest: dict[str, Any]) -> Iterator[None]:
    """Set the dtype of new parameters: casting the model afterwards would round buffers (rotary frequencies)."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[manifest["dtype"]])
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)


def _once(model: nn.Module) -> dict[str, Tensor]:
    """The weights by name, shared tensors (tied embeddings) under their first name alone."""
    names: dict[Any, str] = {}
    state = model.state_dict()
    for name, value in state.items():
        place = (value.data_ptr(), value.shape, value.stride(), value.dtype) if value.numel() else name
        names.setdefault(place, name)
    return {name: state[name] for name in names.values()}


def _fill(model: nn.Module, path: Path) -> nn.Module:
    """Load all weights; shared tensors need one of their names. RuntimeError: a weight is missing or unknown."""
    weights = load_file(path)
    first, state = _once(model), model.state_dict()
    tied = state.keys() - first.keys()
    for name in tied & weights.keys():
        shared = next(other for other in first if state[other].data_ptr() == state[name].data_ptr())
        if shared in weights and not torch.equal(weights[name], weights[shared]):
            raise RuntimeError(f"{name} differs from {shared}, with which the options tie it")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in weights:
            check_values(path, name, weights[name], tensor.dtype)
            tensor.data = tensor.data.to(weights[name].dtype)  # a model of mixed dtypes
    missing, unknown = model.load_state_dict(weights, strict=False)
    if wrong := sorted({*missing, *unknown} - tied):
        raise RuntimeError(f"{wrong[0]} is missing in the file or in the model")
    return model


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder. DataError: it is missing, or of another format."""
    path = folder / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        wrong = next(((key, kind) for key, kind in KINDS.items() if not isinstance(manifest.get(key), kind)), None)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); a compressed model's folder has it") from error
    except (ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"{path}: not a manifest ({' '.join(str(error).split())})") from error
    if wrong is not None:
        key, kind = wrong
        raise DataError(f"{path}: {key}: expected {kind.__name__}, got {manifest.get(key)!r}; save the model again")
    for key, known in (("format", [FORMAT]), ("dtype", list(DTYPES))):
        if manifest[key] not in known:
            raise DataError(f"{path}: {key}: expected {' or '.join(map(str, known))}, got {manifest[key]!r}")
    return manifest


def is_folder(path: Path) -> bool:
    """Whether a folder holds a compressed model."""
    return (path / MANIFEST).is_file()


def find(source: str | Path) -> Path | None:
    """The folder of a compressed model, for the path of that folder or of a run; None: neither."""
    path = Path(source).expanduser()
    return next((candidate for candidate in (path / COMPRESSED, path) if is_folder(candidate)), None)

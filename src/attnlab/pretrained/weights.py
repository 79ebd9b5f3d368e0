"""Weight files that others wrote: read without running code, and loaded completely or not at all."""

import errno
from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from attnlab.errors import DataError, WriteError
from attnlab.run.files import verify

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt")
DTYPES = {"F32": torch.float32, "F64": torch.float64, "BF16": torch.bfloat16, "F16": torch.float16}  # in safetensors
FLOATING = tuple(DTYPES.values())
WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model")  # keys under which checkpoints keep their weights


def find(source: str) -> Path | None:
    """The local weight file that `source` names: a file, or a run's directory. None: it can only be a hub's name.

    Raises:
        DataError: it names a file or folder, and there are no weights.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        path = path / "checkpoints" / "averaged.safetensors"
        if not path.is_file():
            raise DataError(f"{source}: neither a finished run nor a compressed model's folder nor a checkpoint file")
    if path.is_file():
        return path
    if path.suffix in SUFFIXES or path.is_absolute() or source.startswith("."):
        raise DataError(f"{path}: no such checkpoint file; give a .safetensors or .pth file, or a name of the hub")
    return None


def read(path: Path) -> dict[str, Tensor]:
    """Weights by name. DataError: the file is damaged, or has more than tensors and plain values."""
    verify(path)  # of a run; the files of others have no checksums
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # foreign bytes raise many classes in pickle and safetensors
        raise DataError(f"{path}: not a readable checkpoint: {damage(error)}") from error
    for key in WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise DataError(f"{path}: not a checkpoint: expected weights by name")
    return {name.removeprefix("module.").removeprefix("model."): value for name, value in content.items()}


def fill(model: nn.Module, path: Path, weights: Mapping[str, Tensor]) -> None:
    """Load every one of `weights`, exactly. DataError: as :func:`check`."""
    check(model, path, weights)
    model.load_state_dict(weights)


def check(model: nn.Module, path: Path, weights: Mapping[str, Tensor]) -> None:
    """Refuse weights that a model cannot have.

    Args:
        path: where the weights come from, for the errors.
        weights: by the model's names.

    Raises:
        DataError: names the first tensor that is missing, of another shape or dtype, not finite, or unknown.
    """
    state = model.state_dict()
    kind = type(model).__name__
    for name, value in state.items():
        if name not in weights:
            raise DataError(f"{path}: the checkpoint lacks {name}; it is of another model than this {kind}")
        if weights[name].shape != value.shape:
            raise DataError(
                f"{path}: {name} has shape {tuple(weights[name].shape)}, this {kind}'s is {tuple(value.shape)}; the "
                "checkpoint is of another model"
            )
        check_values(path, name, weights[name], value.dtype)
    if extra := sorted(set(weights) - set(state)):
        raise DataError(f"{path}: the checkpoint has {extra[0]}, which this {kind} lacks; it is of another model")


def check_values(path: Path, name: str, value: Tensor, dtype: torch.dtype) -> None:
    """Refuse a `value` of a file that a model would silently cast, or cannot compute with.

    DataError: integers, booleans or quantised values for floating point or the reverse, NaN, or infinite values.
    """
    if value.dtype not in (FLOATING if dtype in FLOATING else (dtype,)):
        was, wanted = (str(kind).removeprefix("torch.") for kind in (value.dtype, dtype))
        raise DataError(f"{path}: {name} has dtype {was}, which this model cannot have; expected {wanted}")
    if not torch.isfinite(value).all():
        raise DataError(f"{path}: {name} has values that are NaN or infinite; the model cannot be used")


def check_stored(path: Path, model: nn.Module) -> None:
    """Refuse a file in which a parameter is not floating point: libraries cast it without a word.

    DataError: names the first tensor. The file may lack or have the `base_model_prefix` of the library's names.
    """
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            stored = {name: DTYPES.get(file.get_slice(name).get_dtype()) for name in file.keys()}  # noqa: SIM118
    else:
        content = torch.load(path, map_location="meta", weights_only=True)
        stored = {name: value.dtype for name, value in content.items() if isinstance(value, Tensor)}
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    for name, _ in model.named_parameters():
        with_prefix_or_without = {name, name.removeprefix(prefix), f"{prefix}{name}"}
        used = min(with_prefix_or_without & stored.keys(), default=None)  # transformers takes the first of several
        if used and stored[used] not in FLOATING:
            raise DataError(f"{path}: {used} is not floating point: quantised or damaged; give the original")


def cannot_write(path: Path, error: Exception) -> WriteError:
    """The error of a file or folder for which safetensors, which wraps the file system's errors, has no space."""
    number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
    return WriteError(number, first_line(error), str(path))


def damage(error: Exception) -> str:
    """What reading a file of weights has failed for."""
    if type(error).__name__ == "UnpicklingError":
        return "damaged, or it holds more than tensors and plain values"
    return f"damaged, cut short or foreign ({first_line(error)})"


def first_line(error: BaseException) -> str:
    """The first line of an error's text, shortened, or the name of its class."""
    return shorten((str(error).splitlines() or [""])[0] or type(error).__name__, 160)

"""External weight files: read without running code, and loaded completely or not at all."""

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
WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model")  # keys of the weights in checkpoints


def find(source: str) -> Path | None:
    """The weight file at a local path of a file or of a run; None: `source` may be a name of the hub.

    DataError: a file or folder without weights.
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
    verify(path)  # files of runs have checksums
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
    """Load all of `weights`. DataError: as :func:`check`."""
    check(model, path, weights)
    model.load_state_dict(weights)


def check(model: nn.Module, path: Path, weights: Mapping[str, Tensor]) -> None:
    """Compare `weights` from a file with a model. DataError: a missing, unknown, wrong or nonfinite tensor."""
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
    """Check a tensor `value` of a file for a parameter of `dtype`.

    DataError: integers, booleans or quantised values for floating point or the reverse, NaN, or infinite values.
    """
    if value.dtype not in (FLOATING if dtype in FLOATING else (dtype,)):
        was, wanted = (str(kind).removeprefix("torch.") for kind in (value.dtype, dtype))
        raise DataError(f"{path}: {name} has dtype {was}, which this model cannot have; expected {wanted}")
    if not torch.isfinite(value).all():
        raise DataError(f"{path}: {name} has values that are NaN or infinite; the model cannot be used")


def check_stored(path: Path, model: nn.Module) -> None:
    """DataError: a parameter is not floating point in a file, which libraries cast silently.

    Names in the file may lack or have the library's `base_model_prefix`.
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
    """The WriteError of an error of the file system, also if safetensors wraps it."""
    number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
    return WriteError(number, first_line(error), str(path))


def damage(error: Exception) -> str:
    """The reason of a failure to read weights."""
    if type(error).__name__ == "UnpicklingError":
        return "damaged, or it holds more than tensors and plain values"
    return f"damaged, cut short or foreign ({first_line(error)})"


def first_line(error: BaseException) -> str:
    """The first line of an error's text, shortened, or the name of its class."""
    return shorten((str(error).splitlines() or [""])[0] or type(error).__name__, 160)

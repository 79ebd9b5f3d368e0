"""Weight files that others wrote: read without running code, and loaded whole or not at all."""

import errno
import logging
from pathlib import Path
from textwrap import shorten

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from attnlab.errors import DataError, WriteError
from attnlab.runs.checksums import verify

log = logging.getLogger(__name__)

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt")
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
    """Weights by name. DataError: the file is damaged, or has more than tensors and plain values.

    Args:
        path: a file of safetensors or of PyTorch.
    """
    verify(path)  # of a run; the files of others have no checksums
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # foreign bytes raise many classes in pickle and safetensors
        if type(error).__name__ == "UnpicklingError":
            raise DataError(f"{path}: damaged, or it holds more than tensors and plain values") from error
        reason = f"damaged, cut short or foreign ({first_line(error)})"
        raise DataError(f"{path}: not a readable checkpoint: {reason}") from error
    for key in WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise DataError(f"{path}: not a checkpoint: expected weights by name")
    return {name.removeprefix("module.").removeprefix("model."): value for name, value in content.items()}


def fill(model: nn.Module, path: Path, weights: dict[str, Tensor]) -> None:
    """Load every weight, exactly. DataError names the first one that is missing, of another shape, or unknown.

    Args:
        model: it is changed.
        path: where the weights come from, for the errors.
        weights: by the model's own names.
    """
    own = model.state_dict()
    kind = type(model).__name__
    for name, value in own.items():
        if name not in weights:
            raise DataError(f"{path}: the checkpoint lacks {name}; it is of another architecture than task.model.name")
        if weights[name].shape != value.shape:
            was, now = tuple(weights[name].shape), tuple(value.shape)
            raise DataError(
                f"{path}: {name} has shape {was}, this {kind}'s is {now}: another architecture or class count"
            )
        if not torch.isfinite(weights[name]).all():
            raise DataError(f"{path}: {name} has values that are not numbers or not finite; it cannot be used")
    if extra := sorted(set(weights) - set(own)):
        raise DataError(
            f"{path}: the checkpoint has {extra[0]}, which this {kind} lacks; it is of another architecture"
        )
    model.load_state_dict(weights)
    log.info("weights from %s", path)


def cannot_write(path: Path, error: Exception) -> WriteError:
    """The error of a file or folder for which safetensors, which wraps the file system's errors, has no space.

    Args:
        path: what was to be written.
        error: what was raised.
    """
    number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
    return WriteError(number, first_line(error), str(path))


def first_line(error: BaseException) -> str:
    """The first line of an error's text, shortened, or the name of its class.

    Args:
        error: what was raised.
    """
    return shorten((str(error).splitlines() or [""])[0] or type(error).__name__, 160)

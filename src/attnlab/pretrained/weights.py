"""Files of weights, of runs and of other programs: read without running code, loaded completely or not at all."""

import errno
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from attnlab.errors import AttnlabError, DataError, WriteError
from attnlab.run.files import replacing_folder, replacing_summed, verify
from attnlab.run.identity import of_checkpoint

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt")
FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model")  # keys of the weights in checkpoints
PREFIX = "model."  # of the model's weights in a training checkpoint
OVERRIDES = "give the command the overrides of the checkpoint's run (its config.yaml has them)"


def find(source: str) -> Path | None:
    """The weight file at a local path of a file or of a run; None: `source` may be a name of the hub.

    DataError: a file or folder without weights.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return find_weights(path)
    if path.is_file():
        return path
    if path.suffix in SUFFIXES or path.is_absolute() or source.startswith("."):
        raise DataError(f"{path}: no such checkpoint file; give a .safetensors or .pth file, or a name of the hub")
    return None


def read(path: Path) -> dict[str, Tensor]:
    """Weights by name. DataError: the file is damaged, or has more than tensors and plain values."""
    weights = tensors(path)
    if path.suffix == ".safetensors":
        return weights
    return {name.removeprefix("module.").removeprefix(PREFIX): value for name, value in weights.items()}


def tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file under their own names; the values come from the disk when they are used.

    DataError: as :func:`read`.
    """
    with readable(path, "checkpoint"):
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    for key in WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise DataError(f"{path}: not a checkpoint: expected weights by name")
    return content


@contextmanager
def readable(path: Path, kind: str) -> Iterator[None]:
    """Turn every error of libraries that read a file or folder inside the block into a DataError that names it.

    Also if it has another checksum than `SHA256SUMS` beside it says. `kind`: what it should be.
    """
    verify(path)  # files of runs have checksums
    try:
        yield
    except AttnlabError:
        raise
    except Exception as error:  # foreign bytes raise many classes in pickle, torch and safetensors
        why = f"damaged, cut short or foreign ({first_line(error)})"
        if type(error).__name__ == "UnpicklingError":
            why = "damaged, or it holds more than tensors and plain values"
        raise DataError(f"{path}: not a readable {kind}: {why}") from error


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


def cannot_write(path: Path, error: Exception) -> WriteError:
    """The WriteError of an error of the file system, also if safetensors wraps it."""
    number = error.errno if isinstance(error, OSError) else None
    number = number or (errno.ENOSPC if "os error 28" in str(error) else errno.EIO)
    reason = error.strerror if isinstance(error, OSError) else None
    return WriteError(number, reason or first_line(error), str(path))


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """:func:`attnlab.run.files.replacing_folder`, with a WriteError of `folder` for errors of the file system."""
    with replacing_folder(folder) as partial:
        try:
            yield partial
        except Exception as error:  # safetensors wraps the errors of the file system; of tokenizers they are Exception
            if isinstance(error, OSError | SafetensorError) or type(error) is Exception:
                raise cannot_write(folder, error) from error
            raise


def write_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Write files into a folder by their relative paths."""
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def first_line(error: BaseException) -> str:
    """The first line of an error's text, shortened, or the name of its class."""
    return shorten((str(error).splitlines() or [""])[0] or type(error).__name__, 160)


# --- weights of runs ---


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights and identity of a training checkpoint (.ckpt) or of exported weights (.safetensors).

    DataError: it does not exist, is damaged, or holds more than tensors and plain values.
    """
    if not path.is_file():
        raise DataError(
            f"{path}: there is no such checkpoint file (expected a .ckpt or .safetensors file of a training run)"
        )
    with readable(path, "attnlab checkpoint"):
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                return {name: file.get_tensor(name) for name in file.keys()}, json.loads(metadata.get("identity", "{}"))  # noqa: SIM118
        content = torch.load(path, map_location="cpu", weights_only=True)
        return {k.removeprefix(PREFIX): v for k, v in content["state_dict"].items()}, content["identity"]


def trained(path: Path) -> dict[str, int]:
    """The updates and the complete epochs of a training checkpoint, by the key of their limit. DataError: damaged."""
    with readable(path, "attnlab checkpoint"):
        content = torch.load(path, map_location="meta", weights_only=True)
        loops = content["loops"]["fit_loop"]
        epochs = loops["epoch_progress"]["current"]["completed"] + loops["epoch_loop.batch_progress"]["is_last_batch"]
        return {"max_steps": content["global_step"], "max_epochs": epochs}


def write_weights(path: Path, weights: dict[str, Tensor], identity: dict[str, Any]) -> None:
    """Write `weights`, by name, as safetensors, atomically and with a checksum. WriteError: the disk is full, ...

    Tied weights are written once for each name. `identity`: plain values that a model must share to load them.
    """
    seen: set[int] = set()
    tensors = {}
    for name, value in weights.items():
        place = value.untyped_storage().data_ptr()
        tensors[name] = value.clone() if place in seen else value.contiguous()
        seen.add(place)
    with replacing_summed(path) as part:
        try:
            save_file(tensors, part, metadata={"identity": json.dumps(identity)})
        except (OSError, SafetensorError) as error:
            raise cannot_write(path, error) from error


def average(paths: list[Path]) -> dict[str, Tensor]:
    """The mean of the weights of one or more checkpoints, summed in float64, each in its own dtype."""
    total: dict[str, Tensor] = {}
    kinds: dict[str, torch.dtype] = {}
    for path in paths:
        for name, value in read_checkpoint(path)[0].items():
            kinds[name] = value.dtype
            total[name] = total[name] + value.double() if name in total else value.double()
    return {name: (value / len(paths)).to(kinds[name]) for name, value in total.items()}


def check_identity(path: Path, stored: dict[str, Any], wanted: dict[str, Any], advice: str = OVERRIDES) -> None:
    """Refuse a checkpoint of another model (DataError); the keys and classes of `stored` may have old names."""
    stored = of_checkpoint(stored)
    for key, value in wanted.items():
        if stored.get(key) != value:
            was, now = _difference(stored.get(key), value)
            raise DataError(f"{path}: the checkpoint is of another {key}: it has {was}, this run has {now}; {advice}")


def find_weights(path: Path) -> Path:
    """The averaged weights of a run directory; a file stays. DataError: a directory has no averaged weights."""
    if path.is_dir():
        averaged = path / "checkpoints" / "averaged.safetensors"
        if not averaged.is_file():
            raise DataError(
                f"{path}: no checkpoints/averaged.safetensors here; give the directory of a finished run of "
                "mode=train, or a .ckpt or .safetensors file"
            )
        return averaged
    return path


def _difference(was: Any, now: Any) -> tuple[str, str]:
    if isinstance(was, dict) and isinstance(now, dict):
        keys = dict.fromkeys(k for k in (*now, *was) if was.get(k) != now.get(k))
        return tuple(", ".join(f"{k}={side.get(k)}" for k in keys) for side in (was, now))  # type: ignore[return-value]
    return str(was), str(now)

"""Files of weights: read without running code, and written at once or not at all."""

import errno
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from attnlab.errors import DataError
from attnlab.pretrained.weights import damage
from attnlab.run.files import replacing_summed, verify
from attnlab.run.identity import of_checkpoint

OVERRIDES = "give the command the overrides of the checkpoint's run (its config.yaml has them)"
PREFIX = "model."  # of the model's weights in a training checkpoint


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights and identity of a training checkpoint (.ckpt) or of exported weights (.safetensors).

    DataError: it does not exist, is damaged, or holds more than tensors and plain values.
    """
    if not path.is_file():
        raise DataError(
            f"{path}: there is no such checkpoint file (expected a .ckpt or .safetensors file of a training run)"
        )
    verify(path)
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                return {name: file.get_tensor(name) for name in file.keys()}, json.loads(metadata.get("identity", "{}"))  # noqa: SIM118
        content = torch.load(path, map_location="cpu", weights_only=True)
        weights = {k.removeprefix(PREFIX): v for k, v in content["state_dict"].items()}
        return weights, content["identity"]
    except Exception as error:  # foreign bytes raise many classes in pickle, torch and safetensors
        raise DataError(f"{path}: not a readable attnlab checkpoint: {damage(error)}") from error


def write_weights(path: Path, weights: dict[str, Tensor], identity: dict[str, Any]) -> None:
    """Write `weights`, by name, as safetensors, atomically and with a checksum. OSError: of the file system.

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
        except SafetensorError as error:  # a full disk is no OSError here
            full = "os error 28" in str(error)
            raise OSError(errno.ENOSPC if full else errno.EIO, str(error), str(path)) from error


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

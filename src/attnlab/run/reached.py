"""How far a run has trained: what `resume=` with another limit must exceed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LAST = Path("checkpoints", "last.ckpt")


def recorded(run: Path) -> Mapping[str, Any] | None:
    """The record's `training` of a finished run; None where no record says that it finished.

    Args:
        run: its directory.
    """
    try:
        record = json.loads((run / "record.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(record, Mapping) or record.get("status") != "finished":
        return None
    training = record.get("training")
    return training if isinstance(training, Mapping) else {}


def saved(run: Path) -> Mapping[str, Any]:
    """`steps` and whole `epochs` in the last checkpoint of a run; empty where there is none that can be read.

    Imports torch; the tensors stay on the disk.

    Args:
        run: its directory.
    """
    if not (run / LAST).is_file():
        return {}
    import torch

    try:
        found = torch.load(run / LAST, map_location="cpu", weights_only=True, mmap=True)
        return {"steps": found["global_step"], "epochs": found["epoch"]}
    except (
        Exception
    ):  # torch.load raises pickle's own error classes too; the mode reads it again and says what is wrong
        return {}

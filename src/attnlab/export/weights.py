"""Export of any trained model as plain weights in a safetensors file, and the common files of exported folders."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import save_file
from torch import Tensor, nn

from attnlab.attention import Attention
from attnlab.errors import DataError
from attnlab.export.card import card
from attnlab.models.build import count_parameters
from attnlab.models.language_model import LanguageModel
from attnlab.pretrained.weights import new_folder, write_files
from attnlab.run.markup import code, literal

WEIGHTS, CONFIG, README = "model.safetensors", "config.json", "README.md"
PYTHON = """from safetensors.torch import load_file

weights = load_file({path})"""
USAGE = """. The names are those of the model's modules.
`{config}` has the classes of attnlab that they belong to, with every argument, so that the same model can be built with
attnlab or written anew.{files}"""


def save(folder: Path, weights: Mapping[str, Tensor], prefix: str = "") -> None:
    """Write `weights` by name to `model.safetensors`; a shared tensor is written under each of its names."""
    tensors = {f"{prefix}{name}": value.detach().cpu().contiguous().clone() for name, value in weights.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def in_dtype(model: Any, cfg: DictConfig) -> Any:
    """The model, after its weights were rounded as `dtype=` says."""
    return model if cfg.get("dtype") is None else model.to(getattr(torch, cfg.dtype))


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write plain values as indented JSON."""
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@torch.no_grad()
def check_logits(model: LanguageModel, exported: Any, near: float) -> None:
    """DataError: the logits of random tokens differ by more than `near`, relative to the largest or to 1."""
    size = exported.config.vocab_size
    ids = torch.randint(size, (1, min(model.longest, 64)), generator=torch.Generator().manual_seed(0))
    expected = model(ids)
    apart = float((exported(ids).logits - expected).abs().max()) / max(1.0, float(expected.abs().max()))
    if not apart <= near:
        kind = type(exported).__name__
        raise DataError(f"the logits of {kind} differ from the model's by {apart:.1e} of the largest, above {near:.0e}")


def export(
    model: nn.Module,
    attentions: list[Attention],
    cfg: DictConfig,
    record: Mapping[str, Any],
    files: Mapping[str, bytes],
    folder: Path,
) -> None:
    """Write `model.safetensors`, `config.json`, `files` and the model card, replacing an earlier folder.

    Args:
        attentions: the mechanisms with a cache in decoding.
        files: tokenizers, vocabularies, class names and the like of the run directory.

    Raises:
        WriteError: the folder cannot be written.
    """
    plain: Any = OmegaConf.to_container(cfg, resolve=True)
    about = {
        "task": cfg.task.name,
        "attention": plain.get("attention"),
        "model": plain["task"]["model"],
        "features": plain["task"]["data"].get("features"),
        "decode": plain["task"].get("decode"),
        "parameters": count_parameters(model),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
    }
    with new_folder(folder) as partial:
        save(partial, model.state_dict())
        names = sorted(files)
        write_files(files, partial)
        known = {key: value for key, value in about.items() if value is not None}
        write_json(partial / CONFIG, {**known, "files": names})
        beside = f" Beside it: {', '.join(map(code, names))}." if names else ""
        text = card(
            record,
            title=f"{record['task']}, {record['attention']}",
            python=PYTHON.format(path=literal(f"{folder.name}/{WEIGHTS}")),
            folder=folder.name,
            usage=USAGE.format(config=CONFIG, files=beside),
            attentions=attentions,
            dtype=next(model.parameters()).dtype,
        )
        (partial / README).write_text(text, encoding="utf-8")

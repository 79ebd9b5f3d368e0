"""Export of a trained vision transformer as a folder of timm: a plain state dict, its config, and the class names."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before timm)

import timm.models
import torch
from omegaconf import DictConfig
from torch import nn

from attnlab.compression.transform import densify, replacements
from attnlab.errors import ConfigError
from attnlab.export.card import card
from attnlab.export.weights import CONFIG, README, WEIGHTS, write_json
from attnlab.pretrained.timm import SIZES, VisionTransformer
from attnlab.pretrained.weights import new_folder
from attnlab.run.markup import code, literal

PYTHON = """import timm

model = timm.create_model({folder}, pretrained=True)"""
WEIGHTS_ALONE = "timm.create_model({name}, checkpoint_path={weights}, {sizes})"
USAGE = """. The weights alone: {weights}. The names of the classes, in the order of the \
outputs, are `label_names` in `config.json`. Images are resized and cropped to {side} x {side} and normalised as \
`pretrained_cfg` there says."""
FACTORED = "Compressed in training; here the factors are multiplied out, so that the model is as large as a dense one."


def export(
    model: nn.Module,
    spec: VisionTransformer,
    classes: Sequence[str],
    cfg: DictConfig,
    record: Mapping[str, Any],
    folder: Path,
) -> None:
    """Write a folder that `timm.create_model("local-dir:...", pretrained=True)` loads, replacing an earlier one.

    The factors of a compressed model are multiplied out.

    Args:
        classes: names in the order of the outputs.

    Raises:
        ConfigError: the dense architecture cannot hold a compressed model exactly.
        WriteError: the folder cannot be written.
    """
    dense: Any = model
    if factored := bool(replacements(model)):
        plain = spec.create(len(classes))
        try:
            dense = densify(model.cpu(), plain)
        except ConfigError as error:
            raise ConfigError(
                f"timm's {type(plain).__name__} cannot hold this compressed model exactly: "
                f"{str(error).partition(';')[0]}; the run's folder `compressed` has it as it is "
                "(attnlab.compression.load)"
            ) from error
    dense = dense.cpu().to(memory_format=torch.contiguous_format).eval()
    data, options = cfg.task.data, spec.options(len(classes))
    side = data.image_size
    preprocessing = {
        "input_size": [3, side, side],
        "mean": list(data.mean),
        "std": list(data.std),
        "interpolation": data.interpolation,
        "crop_pct": data.crop_pct,
    }
    sizes = {name: value for name, value in options.items() if name in SIZES}
    arguments = ", ".join(f"{name}={value!r}" for name, value in sizes.items())
    weights = literal(f"{folder.name}/{WEIGHTS}")
    alone = WEIGHTS_ALONE.format(name=literal(spec.name), weights=weights, sizes=arguments)
    with new_folder(folder) as partial:
        timm.models.save_for_hf(
            dense,
            str(partial),
            model_config={"label_names": list(classes)},
            model_args={name: value for name, value in sizes.items() if name != "num_classes"},
            safe_serialization=True,
        )
        config = json.loads((partial / CONFIG).read_text(encoding="utf-8"))
        config["pretrained_cfg"] |= preprocessing  # of this run, instead of the published weights'
        write_json(partial / CONFIG, config)
        text = card(
            record,
            title=f"{record['task']}, {spec.name}",
            python=PYTHON.format(folder=literal(f"local-dir:{folder.name}")),
            folder=folder.name,
            usage=USAGE.format(weights=code(alone), side=side),
            library="timm",
            pipeline="image-classification",
            notes=[FACTORED] if factored else None,
        )
        (partial / README).write_text(text, encoding="utf-8")

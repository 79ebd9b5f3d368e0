"""The classes of images that a model has not seen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import attnlab.torchvision_schemas  # noqa: F401  (before timm)

import torch
from omegaconf import DictConfig
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from attnlab.config.build import instantiate
from attnlab.data.inputs import InputKind
from attnlab.errors import DataError
from attnlab.tasks.prediction import Predictor, Result

if TYPE_CHECKING:
    from attnlab.data.images.folder import ImageData
    from attnlab.tasks.image_classification.module import ImageClassification

SHOWN = 5  # classes of an image
IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")


def check(path: Path) -> None:
    """Raise DataError where a file is no image, as far as its header tells."""
    try:
        with Image.open(path):
            pass
    except (OSError, ValueError, SyntaxError, UnidentifiedImageError) as error:
        raise DataError(f"{path}: cannot be decoded as an image") from error


INPUT = InputKind("image", IMAGES, ("image", "path", "input"), check)


class Classification(Predictor):
    """The most probable class as `prediction`, and as `classes` the first few with their probabilities.

    Args:
        module: with the model and the names of the classes.
        top: how many classes are named.
    """

    def __init__(self, module: ImageClassification, cfg: DictConfig, top: int = SHOWN) -> None:
        super().__init__(module, cfg.hardware.precision)
        self.module, self.names, self.top = module, module.classes, min(top, len(module.classes))
        data: ImageData = instantiate(cfg.task.data, path="task.data")
        self.transform, self.limit = data.transform(), data.eval_batch_size

    def read(self, value: str) -> Tensor:
        try:
            with Image.open(value) as image:
                prepared: Tensor = self.transform(image.convert("RGB"))
        except (OSError, ValueError, SyntaxError, UnidentifiedImageError) as error:
            raise DataError(f"{value}: cannot be decoded as an image") from error
        return prepared

    def size(self, prepared: Tensor) -> int:
        return 1

    def predict(self, batch: list[Tensor]) -> list[Result]:
        images = torch.stack(batch).to(self.device)
        best = self.module(images).float().softmax(-1).topk(self.top)
        results = []
        for values, places in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            classes = [{"class": self.names[i], "probability": p} for p, i in zip(values, places, strict=True)]
            results.append({"prediction": classes[0]["class"], "classes": classes})
        return results

    def shown(self, result: Result) -> str:
        return "\t".join(f"{each['class']} {each['probability']:.3f}" for each in result["classes"])

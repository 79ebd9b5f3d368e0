"""The layout of a folder of images, which is checked without torch and timm."""

from pathlib import Path

from omegaconf import DictConfig

from attnlab.data.files import check_folder
from attnlab.errors import DataError

SPLITS = {"train": ("train", "training"), "val": ("val", "valid", "validation", "eval", "evaluation")}
IMAGES = (".png", ".jpg", ".jpeg")  # those that timm reads


def check_layout(root: Path, data: DictConfig) -> None:
    """Raise DataError unless both splits have a folder of images for each class."""
    for split in SPLITS:
        place_of(root, split)


def place_of(root: Path, split: str) -> Path:
    """The folder of a split, train or val.

    Raises:
        DataError: it is missing, or has not one folder of images for each class.
    """
    check_folder(root, f"expected {split}/<class>/*.jpg below it")
    place = next((root / name for name in SPLITS[split] if (root / name).is_dir()), None)
    if place is None:
        raise DataError(f"{root}: there is no folder {split}; expected {split}/<class>/*.jpg below it")
    folders = sorted(path for path in place.iterdir() if path.is_dir())
    if not folders:
        raise DataError(f"{place}: no class folders; expected {split}/<class>/*.jpg (ImageNet's val is shipped flat)")
    for folder in folders:
        if not any(path.suffix.lower() in IMAGES for path in folder.rglob("*")):
            raise DataError(f"{folder}: a class folder without images; add images, or remove it from train and val")
    return place

"""Image folders, through timm's own dataset, transforms and loader.

    <root>/train/<class>/*.jpg     <root>/val/<class>/*.jpg       as ImageNet is laid out; grey and CMYK become RGB

Only what they leave out stands here: what is wrong with a folder is said before training, a file that cannot be decoded
is named instead of replaced by its neighbour, and an epoch resumed in its middle is the epoch that was left.
"""

import logging
import random
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import attnlab.torchvision_schemas  # noqa: F401  (before timm)

import numpy as np
import torch
from timm.data import ImageDataset, create_loader
from timm.data.readers import create_reader
from timm.data.readers.img_extensions import get_img_extensions
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from attnlab.data.base import Data
from attnlab.data.samples.images import sample_images
from attnlab.errors import ConfigError, DataError

log = logging.getLogger(__name__)

Batch = tuple[Tensor, Tensor]
SPLITS = {"train": ("train", "training"), "val": ("val", "valid", "validation", "eval", "evaluation")}


class ImageData(Data):
    """Training and validation images; the latter are the test set too, as everywhere on ImageNet.

    root: an image folder; None: the sample images. batch_size: of each process. repeats: times that an image is seen
    in an epoch, augmented anew (repeated augmentation; distributed training alone). The others are timm's own settings.
    """

    def __init__(
        self,
        root: str | None,
        cache_dir: str,
        seed: int,
        image_size: int = 224,
        batch_size: int = 64,
        eval_batch_size: int = 256,
        num_workers: int = 0,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        interpolation: str = "bicubic",
        crop_pct: float = 0.9,
        no_aug: bool = False,
        hflip: float = 0.5,
        color_jitter: float = 0.3,
        auto_augment: str | None = "rand-m9-mstd0.5-inc1",
        random_erase: float = 0.25,
        erase_mode: Literal["const", "rand", "pixel"] = "pixel",
        repeats: int = 0,
        sample_train: int = 150,
        sample_val: int = 40,
    ) -> None:
        super().__init__()
        if min(batch_size, eval_batch_size, image_size) < 1:
            raise ValueError("image_size, batch_size and eval_batch_size are at least 1")
        self.root, self.cache_dir, self.seed = root and Path(root), Path(cache_dir).expanduser(), seed
        self.image_size, self.num_workers = image_size, num_workers
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size
        self.repeats, self.sample_counts = repeats, (sample_train, sample_val)
        self.common: dict[str, Any] = {
            "input_size": (3, image_size, image_size),
            "mean": tuple(mean or (0.485, 0.456, 0.406)),
            "std": tuple(std or (0.229, 0.224, 0.225)),
            "interpolation": interpolation,
            "crop_pct": crop_pct,
            "num_workers": num_workers,
            "use_prefetcher": False,
            "persistent_workers": False,
        }
        self.augment: dict[str, Any] = {
            "no_aug": no_aug,
            "hflip": hflip,
            "color_jitter": color_jitter,
            "auto_augment": auto_augment,
            "re_prob": random_erase,
            "re_mode": erase_mode,
        }
        self.filtered, self.corpus = {}, ""

    def setup(self, stage: str | None = None) -> None:
        """Lists all images. DataError: what is wrong with the folder."""
        root = self.root or sample_images(self.cache_dir / "samples", self.seed, *self.sample_counts)
        places = {split: _place(root, split) for split in SPLITS}
        self.sets = {split: Images(place, self.seed) for split, place in places.items()}
        train, val = (self.sets[split].classes for split in SPLITS)
        if train != val:
            missing = sorted(set(train) ^ set(val))[0]
            has, lacks = ("train", "val") if missing in train else ("val", "train")
            raise DataError(f"{places[lacks]}: there is no class folder {missing!r}, which {places[has]} has")
        self.classes = list(train)
        sizes = f"train {len(self.sets['train'])}, val {len(self.sets['val'])} images, {len(self.classes)} classes"
        self.corpus = "sample" if self.root is None else f"image folder at {root}: {sizes}"
        self.location = root

    def train_dataloader(self) -> "Batches":
        epoch = self.trainer.current_epoch if self.trainer else 0
        dataset = self.sets["train"]
        dataset.epoch, dataset.rank = epoch, _rank()
        loader = create_loader(
            dataset,
            batch_size=self.batch_size,
            is_training=True,
            distributed=_world() > 1,
            num_aug_repeats=self.repeats if _world() > 1 else 0,
            **self.common,
            **self.augment,
        )
        if not len(loader):
            raise ConfigError(
                f"task.data.batch_size={self.batch_size}: the {len(dataset)} training images make no batch for each of "
                f"{_world()} process(es); take a smaller one"
            )
        sampler: Any = loader.sampler
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        else:
            sampler.generator = torch.Generator().manual_seed(hash((self.seed, epoch)) % 2**63)
        first = self.first_batch(epoch)
        return Batches(_skipping(loader, first) if first else loader)

    def val_dataloader(self) -> "Batches":
        return self._held_out(distributed=_world() > 1)

    def test_dataloader(self) -> "Batches":
        """All images in the order of the folder, also where several processes train: the first scores alone."""
        return self._held_out(distributed=False)

    def _held_out(self, distributed: bool) -> "Batches":
        return Batches(
            create_loader(
                self.sets["val"],
                batch_size=self.eval_batch_size,
                is_training=False,
                distributed=distributed,
                **self.common,
            )
        )


class Images(ImageDataset):
    """timm's dataset of an image folder, each image augmented as (seed, epoch, rank, index) say."""

    def __init__(self, root: Path, seed: int) -> None:
        logging.getLogger("timm.data.dataset").setLevel(logging.ERROR)  # it tells of skipped images; here none is
        super().__init__(str(root), reader=create_reader("", root=str(root), split=""))
        self.root, self.seed, self.epoch, self.rank = root, seed, 0, 0
        self._max_retries = 1
        self.classes: dict[str, int] = self.reader.class_to_idx

    def __getitem__(self, index: int) -> tuple[Any, int]:
        state = torch.get_rng_state(), random.getstate(), np.random.get_state()
        key = zlib.crc32(repr((self.seed, self.epoch, self.rank, index)).encode())
        torch.manual_seed(key)
        random.seed(key)
        np.random.seed(key)
        try:
            image, label = super().__getitem__(index)
        except (OSError, RuntimeError, ValueError, SyntaxError) as error:
            raise DataError(
                f"{self.filename(index, absolute=True)}: cannot be decoded as an image; replace it or take it away"
            ) from error
        finally:
            torch.set_rng_state(state[0])
            random.setstate(state[1])
            np.random.set_state(state[2])
        return image, label


class Batches:
    """A loader whose workers' errors arrive as the one line that they are."""

    def __init__(self, loader: DataLoader[Batch]) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        try:
            yield from self.loader
        except DataError as error:
            last = str(error).strip().splitlines()[-1]
            raise DataError(last.rpartition("attnlab.errors.DataError: ")[2]) from error


class _Rest(Sampler[list[int]]):
    """The batches of a sampler from `first` on; its length stays, for the trainer counts the others, too."""

    def __init__(self, batches: Any, first: int) -> None:
        self.batches, self.first = batches, first

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        for i, batch in enumerate(self.batches):
            if i >= self.first:
                yield batch


def _skipping(loader: DataLoader[Batch], first: int) -> DataLoader[Batch]:
    """The same loader without its first batches, whose images are not even read."""
    return DataLoader(
        loader.dataset,
        batch_sampler=_Rest(loader.batch_sampler, first),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
    )


def _place(root: Path, split: str) -> Path:
    """The folder of a split. DataError: missing, or not with one folder of images for each class."""
    if not root.is_dir():
        raise DataError(f"{root}: no such folder; expected train/<class>/*.jpg and val/<class>/*.jpg below it")
    place = next((root / name for name in SPLITS[split] if (root / name).is_dir()), None)
    if place is None:
        raise DataError(f"{root}: there is no folder {split}; expected {split}/<class>/*.jpg below it")
    folders = sorted(path for path in place.iterdir() if path.is_dir())
    if not folders:
        raise DataError(
            f"{place}: there are no class folders; expected {split}/<class>/*.jpg (ImageNet's val is shipped flat)"
        )
    kinds = get_img_extensions(as_set=True)
    for folder in folders:
        if not any(path.suffix.lower() in kinds for path in folder.rglob("*")):
            raise DataError(f"{folder}: a class folder without images; fill it, or take it away from train and val")
    return place


def _world() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0

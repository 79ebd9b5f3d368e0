"""Image folders, through timm's dataset, transforms and loader.

    <root>/train/<class>/*.jpg     <root>/val/<class>/*.jpg       as ImageNet is laid out; also in folders below a class

Added to timm: a folder is checked before training, a file that cannot be decoded is an error with its path, and an
update has the same images on any number of processes, also when a run is resumed in the middle of an epoch.
"""

import copy
import random
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import attnlab.torchvision_schemas  # noqa: F401  (before timm)

import numpy as np
import torch
from annotated_types import Ge, Gt, Le
from lightning.pytorch.utilities.seed import isolate_rng
from timm.data import create_loader, create_transform
from timm.utils.misc import natural_key
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from attnlab.config.batch import Share, share_equally
from attnlab.config.bounds import Size
from attnlab.data.base import Data, EpochBatches, Loader, Workers, ordered_batches
from attnlab.data.corpus import IMAGE_SPLITS, by_split, entries, image_folder
from attnlab.data.images.reading import read_rgb
from attnlab.data.report import FILES, Report, noted
from attnlab.data.samples.images import sample_images
from attnlab.data.table import report_unread
from attnlab.errors import ConfigError, DataError
from attnlab.run.record import embedded

LAYOUT = "attnlab.data.corpus.check_images"  # checks the files of data_root without torch
Batch = tuple[Tensor, ...]  # images and labels; of a test set, indices too


class ImageData(Data):
    """Training and validation images; the validation images are also the test set, as is usual for ImageNet.

    Order and augmentation of an epoch are pure functions of (seed, epoch, index): they do not depend on the number of
    processes.  Images that do not fill an update are left out of an epoch.

    Args:
        root: the directory of the images; None: the sample images.
        image_size: pixels of a side.
        update_images: images of an update, on all processes together.
        batch_size: the largest number of images in a batch of one process.
        mean, std: of each channel, for normalisation; None: ImageNet's.
        crop_pct: of held-out images.
        repeats: occurrences of an image in an epoch, each with another augmentation (repeated augmentation); the epoch
            then has fewer different images.  0: once.
        sample_train, sample_val: images of each class of the sample corpus.

    Attributes:
        paired: whether images are mixed in pairs.  Set by the task before training; see :class:`ImageUpdates`.
    """

    def __init__(
        self,
        root: str | None,
        cache_dir: str,
        seed: int,
        image_size: Size = 224,
        update_images: Annotated[int, Ge(1)] = 64,
        batch_size: Annotated[int, Ge(1)] = 64,
        eval_batch_size: Annotated[int, Ge(1)] = 256,
        num_workers: Workers = None,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        interpolation: Literal["bicubic", "bilinear", "nearest", "box", "hamming", "lanczos", "random"] = "bicubic",
        crop_pct: Annotated[float, Gt(0), Le(1)] = 0.9,
        no_aug: bool = False,
        hflip: Annotated[float, Ge(0), Le(1)] = 0.5,
        color_jitter: Annotated[float, Ge(0)] = 0.3,
        auto_augment: str | None = "rand-m9-mstd0.5-inc1",
        random_erase: Annotated[float, Ge(0), Le(1)] = 0.25,
        erase_mode: Literal["const", "rand", "pixel"] = "pixel",
        repeats: Annotated[int, Ge(0)] = 0,
        sample_train: Size = 150,
        sample_val: Size = 40,
    ) -> None:
        super().__init__()
        self.root, self.cache_dir, self.seed = root and Path(root), Path(cache_dir).expanduser(), seed
        self.image_size, self.num_workers = image_size, num_workers
        self.update_images, self.batch_size, self.eval_batch_size = update_images, batch_size, eval_batch_size
        self.paired = False
        self.repeats, self.sample_counts = repeats, (sample_train, sample_val)
        self.common: dict[str, Any] = {
            "input_size": (3, image_size, image_size),
            "mean": tuple(mean or (0.485, 0.456, 0.406)),
            "std": tuple(std or (0.229, 0.224, 0.225)),
            "interpolation": interpolation,
            "crop_pct": crop_pct,
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
        self.report, self.corpus = Report(), ""
        self.sets: dict[str, Images] = {}

    def setup(self, stage: str | None = None) -> None:
        """List all images.  Raises DataError where the folder is not a folder of images for each class."""
        if self.sets:
            return
        root = self.root or sample_images(self.cache_dir / "samples", self.seed, *self.sample_counts)
        places = {}
        for split in IMAGE_SPLITS:
            with self.report.of(FILES):
                places[split], paths = image_folder(root, split)
            with self.report.of(split) as size:
                self.sets[split] = Images(places[split], paths, self.seed)
                size.used, size.unit = len(paths), "images"
                if split == "train":
                    rest = size.used % self.update_images
                    noted("image at the end of an epoch, too few for an update (others in each epoch)", count=rest)
        if self.root:
            with self.report.of(FILES):
                report_unread(root, places.values())
                if "test" in by_split(path for path in entries(root) if path.is_dir()):
                    noted("folder of validation images, which are the test set", str(places["val"]))
        for split, other in (("train", "val"), ("val", "train")):
            if missing := sorted(self.sets[other].classes.keys() - self.sets[split].classes):
                raise DataError(f"{places[split]}: no class folder {missing[0]!r}, which {places[other]} has")
        self.classes = list(self.sets["train"].classes)
        sizes = f"train {len(self.sets['train'])}, val {len(self.sets['val'])} images, {len(self.classes)} classes"
        self.corpus = embedded("ImageNet") if self.root is None else f"{root.name} at {root}: {sizes}"
        self.location = root

    def share(self, processes: int) -> Share:
        return share_equally("images", self.update_images, self.batch_size, processes, paired=self.paired)

    def held_out_sizes(self, stage: str | None) -> dict[str, int]:
        return {"val": len(self.sets["val"])}

    def train_dataloader(self) -> Loader[Batch]:
        order = self.order()
        dataset = self.sets["train"]
        dataset.epoch = order["epoch"]
        updates = ImageUpdates(len(dataset), self.share(order["world_size"]), max(1, self.repeats), **order)
        if not len(updates):
            raise ConfigError(
                f"task.train.batch.images={self.update_images}: expected at most {len(dataset)}, all images"
            )
        return self._loader(dataset, updates, is_training=True, **self.augment)

    def val_dataloader(self) -> Loader[Batch]:
        return self._held_out(self.sets["val"])

    def test_dataloader(self) -> Loader[Batch]:
        """The same images, each with its index in the folder."""
        indexed = copy.copy(self.sets["val"])
        indexed.indexed = True
        return self._held_out(indexed)

    def calibration_dataloader(self, count: int = 512) -> Loader[Batch]:
        """About `count` training images, evenly spaced, prepared as held-out ones; the same on every process."""
        images = copy.copy(self.sets["train"])
        order = list(range(0, len(images), max(1, len(images) // count)))
        size = self.eval_batch_size
        return self._loader(images, [order[i : i + size] for i in range(0, len(order), size)], is_training=False)

    def transform(self) -> Callable[[Any], Tensor]:
        """timm's transform of held-out images, from a PIL image in RGB to (3, H, W)."""
        names = ("input_size", "mean", "std", "interpolation", "crop_pct")
        return cast(Callable[[Any], Tensor], create_transform(**{name: self.common[name] for name in names}))

    def _held_out(self, images: "Images") -> Loader[Batch]:
        """The images of this process; each image is in one batch of one process."""
        batches = ordered_batches([len(images)], self.eval_batch_size, **self.ranks())
        return self._loader(images, batches, is_training=False)

    def _loader(
        self, images: "Images", batches: Sampler[list[int]] | list[list[int]], **settings: Any
    ) -> Loader[Batch]:
        """A loader with timm's transforms, which `create_loader` gives to `images`, and collation."""
        made = create_loader(cast(Any, images), batch_size=1, num_workers=0, **self.common, **settings)
        return self.loader(images, batches, made.collate_fn)


class Images(Dataset[tuple[Any, ...]]):
    """The images `paths` below `root`, where the first folder is the class.  Both are in timm's natural order.

    Augmentation is a function of (seed, epoch, copy, image).  Where an image occurs several times in an epoch, copy
    c of image i has the index c * (number of images) + i.

    Attributes:
        transform: from a PIL image in RGB to (3, H, W); timm's `create_loader` sets it.
        indexed: whether an item has its index, after the class.
    """

    def __init__(self, root: Path, paths: Sequence[Path], seed: int) -> None:
        self.root, self.seed, self.epoch, self.indexed = root, seed, 0, False
        self.transform: Callable[[Any], Tensor] | None = None
        self.paths = sorted(paths, key=lambda path: natural_key(str(path)))
        names = [path.relative_to(root).parts[0] for path in self.paths]
        self.classes = {name: label for label, name in enumerate(sorted(sorted(set(names)), key=natural_key))}
        self.labels = [self.classes[name] for name in names]

    def __len__(self) -> int:
        return len(self.paths)

    def filename(self, index: int) -> str:
        """The path of an image below `root`."""
        return str(self.paths[index].relative_to(self.root))

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        """Image and class; with `indexed`, also the index."""
        copy, index = divmod(index, len(self))
        key = zlib.crc32(repr((self.seed, self.epoch, copy, index)).encode())
        image: Any = read_rgb(self.paths[index])
        with isolate_rng(include_cuda=False):
            torch.manual_seed(key)
            random.seed(key)
            np.random.seed(key)
            image = self.transform(image) if self.transform else image
        return (image, self.labels[index], index) if self.indexed else (image, self.labels[index])


class ImageUpdates(EpochBatches):
    """An update takes the next images of a random order.

    Its batches are made of pairs, the i-th image from the front with the i-th from the back: Mixup mixes a batch with
    its reverse, so that the same images are mixed with each other however the update is divided.

    `images` is the number of training images, each of which occurs `repeats` times, one copy after the other.
    """

    def __init__(
        self, images: int, share: Share, repeats: int, *, seed: int, epoch: int, world_size: int, **place: int
    ) -> None:
        order = torch.randperm(images, generator=torch.Generator().manual_seed(hash((seed, epoch)) % 2**63))
        if repeats > 1:
            copies = torch.arange(repeats) * images
            order = (order[: -(-images // repeats), None] + copies).flatten()
        self._order, self._size = order, share.size
        updates = images // (share.size * share.accumulate * world_size)
        super().__init__(updates, share.accumulate, world_size=world_size, **place)

    def batch(self, update: int, part: int) -> list[int]:
        images = self._size * self.accumulate * self.world_size
        chosen = self._order[update * images : (update + 1) * images]
        front, back = self._size - self._size // 2, self._size // 2
        first, last = part * front, images - part * back
        return cast(list[int], torch.cat([chosen[first : first + front], chosen[last - back : last]]).tolist())

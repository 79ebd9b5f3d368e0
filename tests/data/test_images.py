"""Image folders: what is read, what is refused, and that an epoch can be resumed in its middle."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from attnlab.config.batch import Share, share_equally
from attnlab.data.images.folder import ImageData, ImageUpdates
from attnlab.data.images.reading import read_rgb
from attnlab.data.samples.images import CLASSES, LAYOUTS, SHAPES, TEXTURES, sample_images
from attnlab.errors import ConfigError, DataError
from tests.data.conftest import attach

SETTINGS: dict[str, Any] = {"image_size": 16, "update_images": 2, "eval_batch_size": 3}
SETTINGS |= {"crop_pct": 1.0, "auto_augment": None, "random_erase": 0.0}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two classes, one with a space in its name, three images in each of train and val."""
    for split in ("train", "val"):
        for label, name in enumerate(("red apple", "sky")):
            folder = tmp_path / "set" / split / name
            folder.mkdir(parents=True)
            for i in range(3):
                Image.new("RGB", (20, 18), [(200, 10 * i, 10), (10, 10 * i, 200)][label]).save(folder / f"{i}.JPEG")
    return tmp_path / "set"


def data(root: Path | None, tmp_path: Path, **settings: Any) -> ImageData:
    dataset = ImageData(str(root) if root else None, str(tmp_path / "cache"), 1, **SETTINGS | settings)
    dataset.setup()
    return dataset


def test_a_folder(root: Path, tmp_path: Path) -> None:
    dataset = data(root, tmp_path)
    assert dataset.classes == ["red apple", "sky"]
    assert dataset.corpus == f"{root.name} at {root}: train 6, val 6 images, 2 classes"
    batches = list(dataset.test_dataloader())
    assert [tuple(images.shape) for images, *_ in batches] == 2 * [(3, 3, 16, 16)]
    assert torch.cat([labels for _, labels, _ in batches]).tolist() == [0, 0, 0, 1, 1, 1]
    red = batches[0][0][0]
    expected = (np.array([200, 0, 10]) / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    assert red.mean((1, 2)).tolist() == pytest.approx(expected.tolist(), abs=0.05)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_does_not_decode_is_named(workers: int, root: Path, tmp_path: Path) -> None:
    file = root / "train" / "sky" / "1.JPEG"
    file.write_bytes(file.read_bytes()[:150])
    with pytest.raises(DataError) as caught:
        list(data(root, tmp_path, num_workers=workers).train_dataloader())
    assert str(caught.value).startswith(f"{file}: cannot be decoded as an image (") and "\n" not in str(caught.value)


def test_what_is_wrong_with_a_folder_is_one_line(root: Path, tmp_path: Path) -> None:
    def error(place: Path) -> str:
        with pytest.raises(DataError) as caught:
            data(place, tmp_path)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "nowhere: no such directory; expected train/<class>/*.jpg" in error(tmp_path / "nowhere")
    assert "there is no folder train" in error(root / "train" / "sky")
    (root / "val" / "sea").mkdir()
    assert "sea: a class folder without images" in error(root)
    Image.new("RGB", (9, 9)).save(root / "val" / "sea" / "0.png")
    assert f"{root / 'train'}: no class folder 'sea', which {root / 'val'} has" in error(root)
    for place in sorted((root / "val").rglob("*"), reverse=True):
        place.unlink() if place.is_file() else place.rmdir()
    Image.new("RGB", (9, 9)).save(root / "val" / "ILSVRC2012_val_00000001.JPEG")
    assert "no class folders" in error(root)


def test_what_is_no_image_or_has_another_suffix(root: Path, tmp_path: Path) -> None:
    (root / "train").rename(root / "Training")
    (root / "val").rename(root / "EVAL")
    picture = Image.new("RGB", (9, 9))
    for i, suffix in enumerate(("webp", "bmp", "tif", "TIFF", "gif", "ppm", "jfif")):
        picture.save(root / "Training" / "sky" / f"more{i}.{suffix}")
    (root / "Training" / "sky" / "deep").mkdir()
    picture.save(root / "Training" / "sky" / "deep" / "0.png")  # of its class, not of one called deep
    system = ("sky/@eaDir/0.png", "sky/#recycle", "sky/lost+found", "$RECYCLE.BIN/S-1-5", "System Volume Information")
    for name in (".Trash-1000/x", "sky/.ipynb_checkpoints", "__MACOSX/sky", ".hidden", *system):
        (root / "Training" / name).mkdir(parents=True)
        picture.save(root / "Training" / name / "0.png")
    picture.save(root / "Training" / "sky" / "._0.png")
    picture.save(root / "Training" / "flat.png")
    (root / "Training" / "sky" / "notes.txt").write_text("x")
    (root / "Training" / "sky" / "photo.heic").write_text("x")
    dataset = data(root, tmp_path)
    dataset.setup()  # the second time nothing is counted again
    assert dataset.classes == ["red apple", "sky"] and len(dataset.sets["train"]) == 6 + 8
    assert dataset.sets["train"].labels == [0] * 3 + [1] * 11
    left_out = {reason: note.count for reason, note in dataset.report.splits["files"].left_out.items()}
    no_image = {f"file that is no image ({suffix})": 1 for suffix in (".txt", ".heic")}
    assert left_out == {"hidden file or folder": 10, "image outside the folders of classes": 1} | no_image
    shutil.copytree(root / "EVAL", root / "val")
    with pytest.raises(DataError, match="both EVAL and val; keep one of them"):
        data(root, tmp_path)


def test_what_lies_beside_the_folders_of_splits(root: Path, tmp_path: Path) -> None:
    for name in ("test", "more"):
        shutil.copytree(root / "train", root / name)
    for name in ("loose.png", "labels.csv", ".cache"):
        (root / name).write_text("x")
    files = data(root, tmp_path).report.splits["files"]
    assert {reason: note.count for reason, note in files.left_out.items()} == {
        "file in the folder test, which no split reads": 6,
        "file in the folder more, which no split reads": 6,
        "file that no split reads": 2,
        "hidden file or folder": 1,
    }
    (note,) = files.noted.values()
    assert note.example == str(root / "val")
    assert not data(None, tmp_path, sample_train=1, sample_val=1).report.splits["files"].left_out


def grey(bits: int) -> Any:
    """A row with every 17th part of the range from black to white."""
    values = np.arange(16) * ((2**bits - 1) / 15)
    return np.rint(np.tile(values, (16, 1)))


@pytest.mark.parametrize("name", ["grey.png", "grey.tif", "grey.pgm", "big.tif"])
def test_grey_of_16_bits_keeps_its_brightness(name: str, tmp_path: Path) -> None:
    """In training and for predictions, which both read with `read_rgb`."""
    path = tmp_path / "set" / "train" / "a" / name
    path.parent.mkdir(parents=True)
    values = grey(16).astype(np.uint16)
    if name == "big.tif":
        Image.frombytes("I;16B", (16, 16), values.byteswap().tobytes()).save(path)
    else:
        Image.fromarray(values.astype(np.int32) if name.endswith("pgm") else values).save(path)
    shutil.copytree(tmp_path / "set" / "train", tmp_path / "set" / "val")
    expected = np.repeat(grey(8)[..., None], 3, axis=2)
    assert np.array_equal(np.asarray(read_rgb(path)), expected)
    dataset = data(tmp_path / "set", tmp_path, no_aug=True, interpolation="nearest", mean=[0.0] * 3, std=[1.0] * 3)
    for images, *_ in (*dataset.val_dataloader(), *dataset.calibration_dataloader()):
        assert torch.allclose(images[0].permute(1, 2, 0), torch.from_numpy(expected).float() / 255)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr"])
def test_other_modes_are_as_pillow_converts_them(mode: str, tmp_path: Path) -> None:
    picture = Image.fromarray(np.random.default_rng(1).integers(0, 256, (8, 8, 3), dtype=np.uint8)).convert(mode)
    path = tmp_path / f"a.{'tif' if mode in ('CMYK', 'YCbCr') else 'png'}"
    picture.save(path)
    assert np.array_equal(np.asarray(read_rgb(path)), np.asarray(Image.open(path).convert("RGB")))


@pytest.mark.parametrize(
    ("dtype", "told"), [("int32", "32 bits with a sign"), ("float32", "32 bits"), ("uint16", "16 bits with a sign")]
)
def test_grey_whose_range_is_not_known_is_refused(dtype: str, told: str, tmp_path: Path) -> None:
    picture = Image.fromarray(grey(16).astype(dtype))
    picture.save(tmp_path / "a.tif", tiffinfo={339: 2} if dtype == "uint16" else {})
    with pytest.raises(DataError, match=f"a.tif: grey of {told}, whose white is not known; save it with 8 or 16 bits"):
        read_rgb(tmp_path / "a.tif")


def test_a_resumed_epoch_is_the_epoch_that_was_left(root: Path, tmp_path: Path) -> None:
    """Augmented images too; and the next epoch has another order and other crops."""
    settings = {"auto_augment": "rand-m9-mstd0.5-inc1", "random_erase": 0.5, "color_jitter": 0.4}
    dataset = data(root, tmp_path, **settings)
    complete = list(dataset.train_dataloader())
    torch.rand(3)  # draws in between do not count
    dataset.resume_at = (0, 2)
    rest = list(dataset.train_dataloader())
    assert len(complete) == 3 and len(rest) == 1
    assert torch.equal(rest[0][0], complete[2][0]) and torch.equal(rest[0][1], complete[2][1])
    with pytest.raises(ConfigError, match="images=7: expected at most 6"):
        data(root, tmp_path, update_images=7).train_dataloader()
    dataset.check_held_out(6, None)
    with pytest.raises(ConfigError, match="7 processes cannot share the val split, which has 6 items; use at most 6,"):
        dataset.check_held_out(7, "test")


@pytest.mark.parametrize(("world_size", "limit"), [(1, 4), (2, 8), (2, 2), (4, 2)])
def test_an_update_is_mixed_alike_on_any_number_of_processes(world_size: int, limit: int) -> None:
    """Its images are the same, and each has the partner with which timm's Mixup mixes it."""

    def pairs(world_size: int, share: Share) -> list[set[frozenset[int]]]:
        ranks = [
            list(ImageUpdates(21, share, 1, seed=3, epoch=1, rank=rank, world_size=world_size, start=0))
            for rank in range(world_size)
        ]
        updates: list[set[frozenset[int]]] = []
        for first in range(0, len(ranks[0]), share.accumulate):
            batches = [batch for dealt in ranks for batch in dealt[first : first + share.accumulate]]
            updates.append({frozenset(pair) for batch in batches for pair in zip(batch, batch[::-1], strict=True)})
        return updates

    alone = pairs(1, Share(8, 1))
    assert [len(update) for update in alone] == [4, 4]
    assert pairs(world_size, share_equally("images", 8, limit, world_size, paired=True)) == alone


def test_a_copy_of_an_image_is_augmented_anew(root: Path, tmp_path: Path) -> None:
    updates = ImageUpdates(20, Share(6, 1), 3, seed=3, epoch=1, rank=0, world_size=1, start=0)
    indices = [i for batch in updates for i in batch]
    assert len(indices) == 18 and len({i % 20 for i in indices}) == 6
    assert sorted(Counter(i // 20 for i in indices).items()) == [(0, 6), (1, 6), (2, 6)]
    dataset = data(root, tmp_path, repeats=2, color_jitter=0.4)
    dataset.train_dataloader()
    images, size = dataset.sets["train"], len(dataset.sets["train"])
    assert images[1][1] == images[1 + size][1]
    assert not torch.equal(images[1][0], images[1 + size][0])


def test_each_held_out_image_is_counted_once(root: Path, tmp_path: Path) -> None:
    dataset = data(root, tmp_path, eval_batch_size=4)
    indices = []
    for rank in range(2):
        attach(dataset, global_rank=rank, world_size=2)
        indices += [i for _, _, index in dataset.test_dataloader() for i in index.tolist()]
    assert sorted(indices) == list(range(6))


def test_sample_images_are_made_once_and_alike(tmp_path: Path) -> None:
    first = sample_images(tmp_path / "a", 1, 2, 1)
    second = sample_images(tmp_path / "b", 1, 2, 1)
    files = sorted(path.relative_to(first) for path in first.rglob("*.png"))
    assert len(files) == 3 * len(CLASSES) == 3 * len(SHAPES) * len(TEXTURES) * len(LAYOUTS)
    assert all((first / file).read_bytes() == (second / file).read_bytes() for file in files)
    dataset = data(None, tmp_path, image_size=32, sample_train=2, sample_val=1)
    assert dataset.corpus.startswith("embedded sample") and dataset.classes == sorted(CLASSES)

"""Pictures as RGB with 8 bits a channel, alike in training and for predictions.

Pillow converts, as for timm and torchvision: grey, palettes and CMYK become RGB, transparency is dropped, EXIF's
orientation is not applied, an animation is its first frame.  Grey of 16 bits is scaled, where Pillow cuts it at 255.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

from attnlab.errors import DataError

SIXTEEN_BITS = ("PNG", "PPM")  # formats whose mode I holds at most 16 bits


def rgb(picture: Image.Image, name: object = "an image") -> Image.Image:
    """The picture in RGB; `name`: the file, for errors.  DataError: grey of unknown range, of 32 bits or signed."""
    mode = picture.mode
    tags = getattr(picture, "tag_v2", {})  # of TIFF
    if mode == "F" or (mode == "I" and picture.format not in SIXTEEN_BITS):
        bits = f"{tags.get(258, (32,))[0]} bits{' with a sign' * (tags.get(339) == (2,))}"
        raise DataError(f"{name}: grey of {bits}, whose white is not known; save it with 8 or 16 bits without a sign")
    if mode == "I" or mode.startswith("I;16"):
        bits = tags.get(258, (16,))[0]  # TIFF may have 12
        grey = np.asarray(picture).astype(np.float64) * (255 / (2**bits - 1))
        picture = Image.fromarray(np.rint(grey).clip(0, 255).astype(np.uint8))
    return picture.convert("RGB")


def read_rgb(path: Path | str) -> Image.Image:
    """The picture of a file in RGB.  DataError: it cannot be decoded."""
    with _opened(path) as picture:
        return rgb(picture, path)


def check_image(path: Path) -> None:
    """Raise DataError where the header of a file is not that of an image."""
    with _opened(path):
        pass


@contextmanager
def _opened(path: Path | str) -> Iterator[Image.Image]:
    try:
        with Image.open(path) as picture:
            yield picture
    except DataError:
        raise
    except Exception as error:  # decoders raise many classes for damaged files
        why = " ".join(str(error).replace(f" {str(path)!r}", "").split())[:160]
        raise DataError(f"{path}: cannot be decoded as an image ({why}); replace or remove it") from error

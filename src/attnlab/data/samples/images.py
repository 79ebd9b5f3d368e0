"""Sample images whose class is a composition: a shape, a texture and a layout.

The class depends on all three, so a model must combine distant parts of the image. Position, size, colours and noise
are random. The same seed gives the same bytes.
"""

from itertools import product
from pathlib import Path

import numpy as np
from PIL import Image

from attnlab.data.corpus import sample_corpus
from attnlab.run.console import each

SIZE = 32  # pixels
SHAPES = ("disc", "square", "triangle")
TEXTURES = ("plain", "stripes")
LAYOUTS = ("beside", "above")  # of two copies
CLASSES = ["_".join(names) for names in product(SHAPES, TEXTURES, LAYOUTS)]

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def sample_images(cache_dir: Path, seed: int, train: int = 150, val: int = 40) -> Path:
    """The directory with {train,val}/<class>/*.png, written unless it exists; both count images of a class."""
    counts = {"train": train, "val": val}

    def write(root: Path) -> None:
        places = [(split, label, i) for split, n in counts.items() for label in range(len(CLASSES)) for i in range(n)]
        for split, label, i in each("drawing the sample images", places):
            place = root / split / CLASSES[label]
            place.mkdir(parents=True, exist_ok=True)
            random = np.random.default_rng([seed, split == "val", label, i])
            draw(CLASSES[label], random).save(place / f"{i:04d}.png")

    return sample_corpus(cache_dir, "images", [seed, counts], write)


def draw(name: str, random: np.random.Generator) -> Image.Image:
    """An image of size SIZE x SIZE of the class `name`, one of CLASSES."""
    shape, texture, layout = name.split("_")
    back, front, other = _colours(random)
    canvas = np.broadcast_to(back, (SIZE, SIZE, 3)).copy()
    radius = random.uniform(5, 6.5)
    gap, drift = random.uniform(13, 17), random.uniform(-1, 1)
    middle = random.uniform(SIZE / 2 - 2, SIZE / 2 + 2, size=2)
    offset = np.array([drift, gap / 2] if layout == "beside" else [gap / 2, drift])
    paint = _texture(texture, front, other, random)
    for centre in (middle - offset, middle + offset):
        mask = _mask(shape, centre, radius)[..., None]
        canvas = canvas * (1 - mask) + paint * mask
    canvas += random.normal(0, 0.03, canvas.shape)
    return Image.fromarray((canvas.clip(0, 1) * 255).round().astype(np.uint8))


def _grid() -> tuple[Floats, Floats]:
    y, x = np.mgrid[0:SIZE, 0:SIZE] + 0.5
    return y, x


def _mask(shape: str, centre: Floats, radius: float) -> Floats:
    """(SIZE, SIZE): 1 inside the shape, 0 outside, linear over one pixel at its border."""
    y, x = _grid()
    y, x = y - centre[0], x - centre[1]
    if shape == "disc":
        distance = np.hypot(y, x) - radius
    elif shape == "square":
        distance = np.maximum(abs(y), abs(x)) - 0.9 * radius
    else:
        distance = np.maximum(y - 0.8 * radius, abs(x) * 0.87 - y * 0.5 - 0.6 * radius)
    return (0.5 - distance).clip(0, 1)


def _texture(texture: str, front: Floats, other: Floats, random: np.random.Generator) -> Floats:
    y, x = _grid()
    on = (x + random.integers(4)) % 4 < 2 if texture == "stripes" else np.zeros_like(y, dtype=bool)
    return np.where(on[..., None], other, front)


def _colours(random: np.random.Generator) -> Floats:
    """(3, 3): background and two paints in RGB, each of another brightness."""
    brightness = random.permutation([0.2, 0.5, 0.85])[:, None]
    return (brightness + random.uniform(-0.12, 0.12, size=(3, 3))).clip(0, 1)

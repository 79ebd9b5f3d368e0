"""Figures, each drawn from a table of numbers that is saved beside it as CSV."""

import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from attnlab.report.grid import Grid
from attnlab.run.files import write_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEY = "Data"  # of the PNG's own text: the SHA-256 of the CSV that it was drawn from


def write(stem: Path, data: Grid, draw: Callable[[Grid], "Figure"]) -> list[Path]:
    """Write `stem`.csv, and `stem`.png unless it was drawn from the same CSV already.

    Pictures of one figure differ between versions of matplotlib and fonts; their numbers do not.

    Args:
        stem: the path without suffix.
        data: everything that `draw` reads.
        draw: the figure of a table.

    Returns:
        Both paths.
    """
    text = data.csv().encode()
    digest = hashlib.sha256(text).hexdigest()
    table, picture = stem.with_name(f"{stem.name}.csv"), stem.with_name(f"{stem.name}.png")
    write_bytes(table, text)
    if drawn_from(picture) != digest:
        write_bytes(picture, png(draw(data), digest))
    return [table, picture]


def drawn_from(picture: Path) -> str | None:
    """The SHA-256 of the CSV that a PNG was drawn from; None if there is no such file or it names none.

    Args:
        picture: the path of the PNG.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(picture) as image:
            return image.info.get(KEY)
    except (OSError, UnidentifiedImageError):
        return None


def png(figure: "Figure", digest: str = "") -> bytes:
    """A figure as PNG, with the digest of its data in it.

    Args:
        figure: of matplotlib.
        digest: SHA-256 of the CSV that it was drawn from; empty: none is stored.
    """
    file = io.BytesIO()
    figure.savefig(file, dpi=150, format="png", metadata={KEY: digest} if digest else None)
    return file.getvalue()

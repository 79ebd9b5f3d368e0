"""The calibration texts: where they come from, and their way through a decoder. Text that is scored is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn

from attnlab.attention import Attention
from attnlab.errors import DataError
from attnlab.models.decoder import Decoder, DecoderBlock

if TYPE_CHECKING:
    from attnlab.data.text.corpora import Split
    from attnlab.data.text.language_modelling import LanguageModellingData

HELD_OUT: tuple[Split, ...] = ("validation", "test")
LONGEST = 32  # characters of a token at most: bounds how much of a text file is read


@dataclass(frozen=True)
class Calibration:
    """Texts whose statistics decide what a conversion leaves out.

    Args:
        tokens: of the training split, from its beginning.
        window: tokens of a text, which is read by itself.
    """

    tokens: Annotated[int, Ge(2)] = 65536
    window: Annotated[int, Ge(2), Le(1_048_576)] = 512
    file: str | None = None


def calibration_tokens(settings: Calibration, data: LanguageModellingData) -> tuple[Tensor, str]:
    """The tokens of the calibration texts (windows, positions), and a name of the text.

    Raises:
        DataError: the text is shorter than one window, or it is held-out text.
    """
    vocabulary = data.vocabulary
    if settings.file is None:
        ids = data.beginning("train", settings.tokens).tolist()
        where, name = "the training split", f"the training split of {data.source.name}"
    else:
        path = Path(settings.file).expanduser()
        where, name = f"convert.calibration.file={path}", path.name
        _refuse_files(path, where, data)
        try:
            with path.open(encoding="utf-8") as file:
                text = file.read(LONGEST * settings.tokens)
        except (OSError, ValueError) as error:
            raise DataError(f"{where}: cannot be read as UTF-8 text ({error})") from error
        ids = vocabulary.ids(text)[: settings.tokens]
    windows = len(ids) // settings.window
    if not windows:
        raise DataError(
            f"{where}: the calibration text has {len(ids)} tokens, less than one text of "
            f"convert.calibration.window={settings.window}"
        )
    tokens = torch.tensor(ids[: windows * settings.window]).view(windows, settings.window)
    return tokens, f"the first {len(ids)} tokens of {name}"


def scale_tokens(data: LanguageModellingData) -> Tensor:
    """The first texts of the training split (windows, positions), on which a teacher's layers are measured."""
    ids = torch.from_numpy(data.beginning("train", 16 * data.window))
    size = min(data.window, len(ids))
    return ids[: len(ids) // size * size].view(-1, size)


def _refuse_files(path: Path, where: str, data: LanguageModellingData) -> None:
    assert data.root is not None
    train = data.source.files(data.root, "train")
    for split in HELD_OUT:
        for file in data.source.files(data.root, split):
            if file.exists() and file.samefile(path) and file not in train:
                raise DataError(f"{where}: that is the {split} split, which is scored")


# --- on their way through a decoder ------------------------------------------------------------------------------


class Texts:
    """What enters the present block, and what is known already of its attention's outputs, in pieces of batches.

    Pieces have numbers from 0 on.

    Args:
        tokens: (windows, positions).
        batch: windows of a batch, a multiple of `piece`.
        piece: windows of a piece, B.

    Attributes:
        hidden: what enters the present block, (B, T, d).
        originals: what the output projection of the block's original attention reads, (B, T, H D), where it is known.
        outputs: the same of the attention with which the texts pass through the block.
    """

    def __init__(self, decoder: Decoder, tokens: Tensor, batch: int, piece: int) -> None:
        self.positions, self._count, self._pieces = tokens.numel(), -(-len(tokens) // piece), batch // piece
        self.hidden = {i: decoder.embed(rows, 0) for i, rows in enumerate(tokens.split(piece))}
        self.originals: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}

    def some(self, every: int = 1) -> list[int]:
        """Numbers of the pieces of each `every`-th batch."""
        return [i for i in range(self._count) if i // self._pieces % every == 0]

    def first(self, batches: int) -> range:
        """Numbers of the pieces of the first batches."""
        return range(min(batches * self._pieces, self._count))

    def inputs(self, block: DecoderBlock, numbers: Iterable[int] | None = None) -> Iterator[Tensor]:
        """What enters the attention of the present block, (B, T, d) for each of these pieces; None: all."""
        return (block.attention_norm(self.hidden[i]) for i in (range(self._count) if numbers is None else numbers))

    def original(self, number: int, x: Tensor, attention: Attention) -> Tensor:
        """What the original attention puts out, (B, T, d).

        Args:
            x: what enters the attention, (B, T, d).
        """
        return output_of(attention, x, number, self.originals)

    def enter(
        self,
        block: DecoderBlock,
        numbers: Iterable[int] | None = None,
        seen: Callable[[int, Tensor, Tensor], None] | None = None,
    ) -> None:
        """Pass through a block: the next one is then the present one.

        Args:
            block: the present one, with the attention to use.
            numbers: of the pieces; for the others the block is the last. None: all.
            seen: called with the number of each piece, what enters the attention and what it puts out.
        """
        attention = block.attention

        def attend(number: int, x: Tensor) -> Tensor:
            out = output_of(attention, x, number, self.outputs)
            if seen is not None:
                seen(number, x, out)
            return out

        for i in range(self._count) if numbers is None else numbers:
            self.hidden[i] = block(self.hidden[i], partial(attend, i))
        self.originals.clear()
        self.outputs.clear()


def output_of(attention: Attention, x: Tensor, number: int, known: dict[int, Tensor]) -> Tensor:
    """attention(x), where possible from what its output projection reads.

    Args:
        x: (B, T, d).
        known: what the projection reads, (B, T, H D), by the number of the piece.
    """
    if number not in known:
        out: Tensor = attention(x)
        return out
    assert isinstance(attention.out, nn.Linear)
    return attention.out(known[number])

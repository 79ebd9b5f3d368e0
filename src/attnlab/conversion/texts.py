"""The calibration texts on their way through a decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType

from torch import Tensor, nn

from attnlab.attention import Attention
from attnlab.conversion.scratch import Scratch
from attnlab.models.decoder import Decoder, DecoderBlock


class Texts:
    """What enters the present block, and what is known already of its attention's outputs, in pieces of batches.

    All of it is in files; as a context, it removes them. Pieces have numbers from 0 on.

    Args:
        decoder: whose embeddings are looked up.
        tokens: (windows, positions).
        folder: of the files; None: the system's folder for temporary files.
        batch: windows of a batch, a multiple of `piece`.
        piece: windows of a piece, B.

    Attributes:
        positions: of all texts together.
        hidden: what enters the present block, (B, T, d).
        originals: what the output projection of the block's original attention reads, (B, T, H D), where it is known.
        outputs: the same of the attention with which the texts pass through the block.
    """

    def __init__(self, decoder: Decoder, tokens: Tensor, folder: Path | None, batch: int, piece: int) -> None:
        self.hidden, self.originals, self.outputs = (Scratch(folder) for _ in range(3))
        self.positions, self._count, self._pieces = tokens.numel(), -(-len(tokens) // piece), batch // piece
        for i, rows in enumerate(tokens.split(piece)):
            self.hidden[i] = decoder.embed(rows, 0)

    def __enter__(self) -> Texts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for held in (self.hidden, self.originals, self.outputs):
            held.close()

    def some(self, every: int = 1) -> list[int]:
        """Numbers of the pieces of batches at equal distances.

        Args:
            every: of so many batches one.
        """
        return [i for i in range(self._count) if i // self._pieces % every == 0]

    def first(self, batches: int) -> range:
        """Numbers of the pieces of the first batches.

        Args:
            batches: how many.
        """
        return range(min(batches * self._pieces, self._count))

    def inputs(self, block: DecoderBlock, numbers: Iterable[int] | None = None) -> Iterator[Tensor]:
        """What enters the attention of the present block, (B, T, d) each.

        Args:
            block: the present one.
            numbers: of the pieces; None: all.
        """
        return (block.attention_norm(self.hidden[i]) for i in (range(self._count) if numbers is None else numbers))

    def original(self, number: int, x: Tensor, attention: Attention) -> Tensor:
        """What the original attention puts out, (B, T, d).

        Args:
            number: of the piece.
            x: what enters the attention, (B, T, d).
            attention: the original of the present block.
        """
        return _output(attention, x, number, self.originals)

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
            seen: called with the number of each piece, what enters the attention and what it puts out; None: nobody.
        """
        attention = block.attention

        def attend(number: int, x: Tensor) -> Tensor:
            out = _output(attention, x, number, self.outputs)
            if seen is not None:
                seen(number, x, out)
            return out

        for i in range(self._count) if numbers is None else numbers:
            self.hidden[i] = block(self.hidden[i], partial(attend, i))
        self.originals.clear()
        self.outputs.clear()


def _output(attention: Attention, x: Tensor, number: int, known: Scratch) -> Tensor:
    """attention(x), where possible from what its output projection reads."""
    if number not in known:
        found: Tensor = attention(x)
        return found
    assert isinstance(attention.out, nn.Linear)
    return attention.out(known[number])

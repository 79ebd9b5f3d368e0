"""The calibration texts on their way through a decoder."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor, nn

from attnlab.attention import Attention
from attnlab.errors import WriteError
from attnlab.models.decoder import Decoder, DecoderBlock


class Scratch:
    """Tensors by number in a file, each read anew whenever it is asked for.

    The file has no name, so that nothing of it is left when the process ends, however that happens. It is read and
    written, not mapped: pages of a mapped file count as memory of the process.

    Args:
        folder: where the file is; None: the system's folder for temporary files (TMPDIR).

    Raises:
        WriteError: the file cannot be made, written or read again, as on a full disk.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = Path(tempfile.gettempdir()) if folder is None else folder
        self._places: dict[int, tuple[int, torch.Size, torch.dtype]] = {}
        self._end = 0
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(buffering=0, dir=self._folder)  # noqa: SIM115  closed by :meth:`close`
        except OSError as error:
            raise self._failed(error) from error

    def __setitem__(self, number: int, value: Tensor) -> None:
        data = _bytes(value.detach().cpu().contiguous())
        known = self._places.get(number)
        place = known[0] if known is not None and known[1:] == (value.shape, value.dtype) else self._end
        try:
            self._file.seek(place)
            rest = data
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise self._failed(error) from error
        self._places[number] = place, value.shape, value.dtype
        self._end = max(self._end, place + data.nbytes)

    def __getitem__(self, number: int) -> Tensor:
        place, shape, dtype = self._places[number]
        value = torch.empty(shape, dtype=dtype)
        rest = _bytes(value)
        try:
            self._file.seek(place)
            while rest:
                read = self._file.readinto(rest)
                if not read:
                    raise OSError("what was written is not there any more")
                rest = rest[read:]
        except OSError as error:
            raise self._failed(error) from error
        return value

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def clear(self) -> None:
        """Forget all; the file keeps its size, for the next ones."""
        self._places.clear()
        self._end = 0

    def close(self) -> None:
        """Remove the file."""
        self._file.close()

    def _failed(self, error: OSError) -> WriteError:
        reason = error.strerror or str(error)
        return WriteError(error.errno, f"hidden states of the calibration texts: {reason}", str(self._folder))


def _bytes(value: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return value.view(-1).view(torch.uint8).numpy().data


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
        for scratch in (self.hidden, self.originals, self.outputs):
            scratch.close()

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
            attention: the present block's original.
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
            seen: called with the number of each piece, what enters the attention and what it puts out.
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
        out: Tensor = attention(x)
        return out
    assert isinstance(attention.out, nn.Linear)
    return attention.out(known[number])

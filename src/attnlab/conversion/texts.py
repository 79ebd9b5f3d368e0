"""The calibration texts: where they come from, and their way through a decoder. Text that is scored is refused."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn

from attnlab.attention import Attention
from attnlab.config.bounds import bounded
from attnlab.errors import DataError, WriteError
from attnlab.models.decoder import Decoder, DecoderBlock

if TYPE_CHECKING:
    from attnlab.data.text.corpora import Split
    from attnlab.data.text.language_modelling import LanguageModellingData

HELD_OUT: tuple[Split, ...] = ("validation", "test")
LONGEST = 32  # characters of a token at most: bounds how much of a text file is read
COMPARED = 200  # lines of a held-out split that are looked for in the text
SHARED = 0.05  # the largest share of lines that a calibration text may share with a held-out split
LINE = 80  # characters of a line that is too long to be the same by chance


@bounded
@dataclass(frozen=True)
class Calibration:
    """Texts whose statistics decide what a conversion leaves out.

    Args:
        tokens: of the training split, from its beginning.
        window: tokens of a text, which is read by itself.
        file: a text file in place of the training split; None: none.
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
    _refuse_lines(vocabulary.text(ids), where, data)
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


def _refuse_lines(text: str, where: str, data: LanguageModellingData) -> None:
    """Refuse a text that shares more than a few lines with a held-out split, wherever its lines break."""
    unbroken, lines = " ".join(text.split()), set(_lines(text))
    for split in HELD_OUT:
        scored = list(dict.fromkeys(_lines(data.text(split))))
        compared = scored[:: max(1, len(scored) // COMPARED)]
        inside, shared = sum(line in unbroken for line in compared), len(lines.intersection(scored))
        if inside > SHARED * len(compared) or shared > SHARED * len(lines):
            raise DataError(
                f"{where}: it has text of the {split} split, which is scored ({inside} of {len(compared)} compared "
                f"lines of that split, {shared} of {len(lines)} calibration lines); give another "
                "convert.calibration.file"
            )


def _lines(text: str) -> list[str]:
    """The long lines, with single spaces."""
    lines = (" ".join(line.split()) for line in text.splitlines())
    return [line for line in lines if len(line) > LINE]


# --- on their way through a decoder ------------------------------------------------------------------------------


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
        with self._reported():
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115  closed by :meth:`close`

    def __setitem__(self, number: int, value: Tensor) -> None:
        data = _bytes(value.detach().cpu().contiguous())
        known = self._places.get(number)
        place = known[0] if known is not None and known[1:] == (value.shape, value.dtype) else self._end
        with self._reported():
            self._file.seek(place)
            self._file.write(data)
            self._file.flush()
        self._places[number] = place, value.shape, value.dtype
        self._end = max(self._end, place + data.nbytes)

    def __getitem__(self, number: int) -> Tensor:
        place, shape, dtype = self._places[number]
        value = torch.empty(shape, dtype=dtype)
        with self._reported():
            self._file.seek(place)
            if self._file.readinto(_bytes(value)) < value.nbytes:
                raise OSError("what was written is not there any more")
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

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            text = f"hidden states of the calibration texts: {reason}"
            raise WriteError(error.errno, text, str(self._folder)) from error


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

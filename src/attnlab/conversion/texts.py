"""Calibration texts: their source, and their pass through a decoder. Text that is scored is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import torch
from annotated_types import Ge, Le
from safetensors.torch import load, save
from torch import Tensor, nn

from attnlab.attention import Attention
from attnlab.data.text.facts import with_facts
from attnlab.data.text.windows import begun
from attnlab.errors import DataError
from attnlab.models.decoder import Decoder, DecoderBlock
from attnlab.run.files import writing

if TYPE_CHECKING:
    from attnlab.data.text.corpora import Split
    from attnlab.data.text.language_modelling import LanguageModellingData

HELD_OUT: tuple[Split, ...] = ("validation", "test")
SEED = 5  # of facts
SCALED = 8192  # tokens for the scales of a teacher's layers, at most
LONGEST = 32  # characters of a token, at most: a bound for reading a text file


@dataclass(frozen=True)
class Calibration:
    """Texts for the statistics of a conversion.

    Args:
        tokens: number of tokens from the beginning of the training split, or of `file`.
        window: number of tokens of each separate text.
        facts: share of the texts with facts, sentences with an invented name and a number, most of them repeated: the
            statistics then have queries that retrieve. No name and no number is one of the needle's.
    """

    tokens: Annotated[int, Ge(2)] = 65536
    window: Annotated[int, Ge(2), Le(1_048_576)] = 512
    file: str | None = None
    facts: Annotated[float, Ge(0), Le(1)] = 0.5


def calibration_tokens(settings: Calibration, data: LanguageModellingData) -> tuple[Tensor, str]:
    """The tokens of the calibration texts (windows, positions), and a name of the text.

    Each begins with what the tokenizer of the model puts before a text.

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
        ids = vocabulary.given(text)[: settings.tokens]
    windows = len(ids) // settings.window
    if not windows:
        window = f"convert.calibration.window={settings.window}"
        raise DataError(f"{where}: the calibration text has {len(ids)} tokens, less than one text of {window}")
    tokens = torch.tensor(ids[: windows * settings.window]).view(windows, settings.window)
    draw, many = np.random.default_rng(SEED), round(settings.facts * windows)
    for i in draw.permutation(windows)[:many].tolist():
        tokens[i] = torch.tensor(with_facts(tokens[i].tolist(), vocabulary, draw))
    about = f", {many} of {windows} texts with facts" if many else ""
    return begun(tokens, vocabulary), f"the first {len(ids)} tokens of {name}{about}{vocabulary.begins}"


def scale_tokens(data: LanguageModellingData) -> Tensor:
    """The first texts of the training split (windows, positions), for the scales of a teacher's layers.

    They have at most `SCALED` tokens, or are one window.
    """
    count = max(1, min(16, SCALED // data.window))
    ids = torch.from_numpy(data.beginning("train", count * data.window))
    size = min(data.window, len(ids))
    return begun(ids[: len(ids) // size * size].view(-1, size), data.vocabulary)


def _refuse_files(path: Path, where: str, data: LanguageModellingData) -> None:
    assert data.root is not None
    train = data.source.files(data.root, "train")
    for split in HELD_OUT:
        for file in data.source.files(data.root, split):
            if file.exists() and file.samefile(path) and file not in train:
                raise DataError(f"{where}: that is the {split} split, which is scored")


# --- the pass through a decoder ----------------------------------------------------------------------------------


class Texts:
    """Inputs of a block, and known inputs of its output projection, in numbered pieces of batches.

    The block's inputs are files, because those of all texts may be larger than the model.

    Args:
        tokens: (windows, positions).
        batch: windows of a batch, a multiple of `piece`.
        piece: windows of a piece, B.
        folder: for the files. WriteError: the disk is full, for example.
        keep_files: whether the files of earlier blocks stay, so that `number` can be set back.

    Attributes:
        number: of the current block.
        originals: known inputs of the original attention's output projection, (B, T, H D), by piece.
        outputs: the same of the attention in the block.
    """

    def __init__(
        self, decoder: Decoder, tokens: Tensor, batch: int, piece: int, folder: str, *, keep_files: bool = False
    ) -> None:
        self.positions, self._count, self._pieces = tokens.numel(), -(-len(tokens) // piece), batch // piece
        self._folder, self._keep_files, self.number = Path(folder), keep_files, 0
        for i, rows in enumerate(tokens.split(piece)):
            self._write(i, 0, decoder.embed(rows, 0))
        self.originals: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}

    def _write(self, piece: int, number: int, x: Tensor) -> None:
        with writing(self._folder):
            (self._folder / f"{number}-{piece}").write_bytes(save({"x": x.contiguous()}))

    def hidden(self, piece: int) -> Tensor:
        """Inputs of the current block, (B, T, d)."""
        return load((self._folder / f"{self.number}-{piece}").read_bytes())["x"]

    def some(self, every: int = 1) -> list[int]:
        """Numbers of the pieces of every `every`-th batch."""
        return [i for i in range(self._count) if i // self._pieces % every == 0]

    def first(self, batches: int) -> range:
        """Numbers of the pieces of the first batches."""
        return range(min(batches * self._pieces, self._count))

    def inputs(self, block: DecoderBlock, numbers: Iterable[int] | None = None) -> Iterator[Tensor]:
        """Inputs of the current block's attention, (B, T, d) for each of these pieces; None: all."""
        return (block.attention_norm(self.hidden(i)) for i in (range(self._count) if numbers is None else numbers))

    def original(self, number: int, x: Tensor, attention: Attention) -> Tensor:
        """The original attention's output (B, T, d) for its input x (B, T, d)."""
        return output_of(attention, x, number, self.originals)

    def enter(
        self,
        block: DecoderBlock,
        numbers: Iterable[int] | None = None,
        seen: Callable[[int, Tensor, Tensor], None] | None = None,
    ) -> None:
        """Pass through the current block, with its present attention.

        Args:
            numbers: of the pieces to pass, which ends the others; None: all.
            seen: called with the number of each piece, and the attention's input and output.
        """
        attention = block.attention

        def attend(number: int, x: Tensor) -> Tensor:
            out = output_of(attention, x, number, self.outputs)
            if seen is not None:
                seen(number, x, out)
            return out

        for i in range(self._count) if numbers is None else numbers:
            self._write(i, self.number + 1, block(self.hidden(i), partial(attend, i)))
            if not self._keep_files:
                (self._folder / f"{self.number}-{i}").unlink()
        self.number += 1
        self.originals.clear()
        self.outputs.clear()


def output_of(attention: Attention, x: Tensor, number: int, known: dict[int, Tensor]) -> Tensor:
    """attention(x) of x (B, T, d), from `known` inputs of its output projection, (B, T, H D) by piece, if possible."""
    if number not in known:
        out: Tensor = attention(x)
        return out
    assert isinstance(attention.out, nn.Linear)
    return attention.out(known[number])

"""Token ids on disk: written once for each corpus and vocabulary, and read through memory maps.

Built ids are a folder `<name>-<key>` with `tokens.bin`, the ids one after the other, and `index.json`: their number and
type, the numbers of texts and words, a checksum.  The key is a hash of the corpus and the vocabulary.
A shard is a file of another program: uint16 ids, with or without the 1,024-byte header of the T6 system.
"""

import logging
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from attnlab.data.corpus import reading
from attnlab.data.report import Report, restore
from attnlab.errors import DataError
from attnlab.run.cache import Damaged, read_index, stored, write_index
from attnlab.run.console import progress

log = logging.getLogger(__name__)

Ids = npt.NDArray[np.int64]

EAGER = 1 << 28  # bytes; the checksum of a larger file is not compared, only its size is

MAGIC, HEADER = 20240520, 256  # int32 words: magic, version, number of ids, zeros


class TokenFile:
    """Token ids on disk.

    Args:
        ids: (n,) ids, a memory map.
        vocab_size: the number of ids that are allowed.
        words: the number of words that the ids encode; 0: not known.
        texts: the number of texts that they encode; 0: not known.
    """

    def __init__(self, path: Path, ids: npt.NDArray[Any], vocab_size: int, words: int = 0, texts: int = 0) -> None:
        self.path, self.words, self.texts = path, words, texts
        self._ids, self._limit = ids, vocab_size

    def __len__(self) -> int:
        return len(self._ids)

    def read(self, start: int, stop: int) -> Ids:
        """The ids from `start` to `stop` (exclusive), (n,) int64.  DataError: an id is outside the vocabulary."""
        ids = self._ids[start:stop].astype(np.int64)
        if len(ids) and int(ids.max()) >= self._limit:
            at = int(ids.argmax())
            raise DataError(
                f"{self.path}: id {ids[at]} at position {start + at} is outside the vocabulary of {self._limit}; "
                "see task.data.vocab_size"
            )
        return ids

    def half(self, which: int) -> "TokenFile":
        """The first half (`which` = 0) or the second one (1) of a shard."""
        middle = len(self._ids) // 2
        return TokenFile(self.path, self._ids[middle:] if which else self._ids[:middle], self._limit)


def open_shard(path: Path, vocab_size: int) -> TokenFile:
    """Open a shard of uint16 ids, with the header of the T6 system or without a header (nanoGPT).

    Raises:
        DataError: the file cannot be read, is empty, has an odd length or another header.
    """
    with reading(path, "a shard of uint16 ids"):
        size, head = path.stat().st_size, np.fromfile(path, dtype="<i4", count=HEADER)
    if size == 0 or size % 2:
        raise DataError(f"{path}: {size} bytes; expected uint16 ids")
    begin = head[:3].tolist()
    if MAGIC not in begin[:1] and (len(head) < HEADER or head[3:].any()):  # ids are rarely zero
        return TokenFile(path, np.memmap(path, dtype="<u2", mode="r"), vocab_size)
    expected = [MAGIC, 1, (size - 4 * HEADER) // 2]
    if len(head) < HEADER or begin != expected or size == 4 * HEADER:
        raise DataError(f"{path}: the header is {begin}; expected magic, version and ids {expected}, or no header")
    return TokenFile(path, np.memmap(path, dtype="<u2", mode="r", offset=4 * HEADER), vocab_size)


def build(folder: Path, batches: Iterable[tuple[Sequence[Sequence[int]], int]], vocab_size: int) -> TokenFile:
    """The stored ids of a corpus; they are written first where they are missing or damaged.

    Args:
        batches: the ids of each text of a batch, and the number of words of the batch; read only to write.

    Raises:
        DataError: the disk is full, or the texts have no tokens.
    """
    dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<i4")
    return stored(folder, lambda path: _open(path, vocab_size), lambda partial: _write(partial, folder, batches, dtype))


def _open(folder: Path, vocab_size: int) -> TokenFile:
    path, index = folder / "tokens.bin", read_index(folder)
    ids = np.memmap(path, dtype=index["dtype"], mode="r")
    if len(ids) != index["count"] or (ids.nbytes <= EAGER and zlib.crc32(ids.tobytes()) != index["crc32"]):
        raise Damaged("its ids are not those that were written")
    restore(index.get("notes", {}))
    return TokenFile(path, ids, vocab_size, index["words"], index["texts"])


def _write(
    partial: Path, folder: Path, batches: Iterable[tuple[Sequence[Sequence[int]], int]], dtype: np.dtype[Any]
) -> None:
    count = texts = words = check = 0
    progressing = progress(f"encoding {folder.name}, texts", None)
    with (partial / "tokens.bin").open("wb") as out, Report().of("texts") as notes, progressing as advance:
        for batch, more_words in batches:
            ids = np.fromiter((i for text in batch for i in text), dtype=dtype)
            count, texts, words = count + len(ids), texts + len(batch), words + more_words
            check = zlib.crc32(ids.tobytes(), check)
            out.write(ids.tobytes())
            advance(len(batch))
    if not count:
        raise DataError(f"{folder.name}: the texts give no tokens")
    index = {"count": count, "dtype": dtype.str, "texts": texts, "words": words, "crc32": check}
    write_index(partial, index | {"notes": notes.plain()})
    log.info("%s: %d ids of %d texts", folder.name, count, texts)

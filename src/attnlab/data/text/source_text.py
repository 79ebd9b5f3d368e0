"""Text as input: the pieces of the one vocabulary that source and target share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Ge, Le

from attnlab.data.corpus import Kind, Utterance
from attnlab.data.text.tokenizer import Tokenizer
from attnlab.data.text.tokens import Ids


@dataclass(frozen=True)
class SourceText:
    """The source text as piece ids that end in </s>.

    Args:
        max_tokens: the largest number of ids, at least 2.  A longer text is cut to its first `max_tokens` - 1 pieces
            and </s>, and counted in `TextInputs.truncated`.
    """

    max_tokens: Annotated[int, Ge(2), Le(1_048_576)] = 1024

    kind: ClassVar[Kind] = "text"

    def open(self, utterances: Sequence[Utterance], tokenizer: Tokenizer) -> "TextInputs":
        return self.texts([x.source for x in utterances], tokenizer)

    def texts(self, texts: Sequence[str], tokenizer: Tokenizer) -> "TextInputs":
        """The ids of texts that are no utterances."""
        return TextInputs(tokenizer.encode_all(texts), self.max_tokens)


class TextInputs:
    """(T,) int64 ids of each text.

    Args:
        pieces: the ids of each text, without </s>.
        max_tokens: the largest number of ids, </s> included.

    Attributes:
        truncated: the number of texts that were cut.
        lengths: (n,) int64, the number of ids of each text.
    """

    def __init__(self, pieces: Sequence[Sequence[int]], max_tokens: int) -> None:
        self._ids = [np.asarray([*x[: max_tokens - 1], Tokenizer.eos], dtype=np.int64) for x in pieces]
        self.truncated = sum(len(x) > max_tokens - 1 for x in pieces)
        self.lengths = np.asarray([len(x) for x in self._ids], dtype=np.int64)

    def __getitem__(self, i: int) -> Ids:
        return self._ids[i]

"""The tokenizer of a pretrained model as a vocabulary."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from attnlab.config.model import SAMPLE
from attnlab.data.text.corpora import TextCorpus
from attnlab.data.text.vocabulary import END_OF_TEXT, BytePairVocabulary, Ends
from attnlab.errors import ConfigError


class PretrainedTokens:
    """The tokens of a pretrained model.

    Args:
        source: a local folder or a name of the hub, or "sample": bytes.
        ends: the place of the mark between texts, which is the tokenizer's end token.
    """

    def __init__(self, source: str, ends: Ends = "after") -> None:
        self.source, self.ends = source, ends

    def build(self, corpus: TextCorpus, root: Path, cache_dir: Path, vocab_size: int) -> BytePairVocabulary:
        """As :meth:`vocabulary`; it does not depend on the corpus."""
        return self.vocabulary(vocab_size)

    def vocabulary(self, vocab_size: int) -> BytePairVocabulary:
        """The vocabulary of a model with `vocab_size` ids in its table.

        Raises:
            DataError: the tokenizer cannot be read.
            ConfigError: it does not belong to the model, or has no end token.
        """
        if self.source == SAMPLE:
            return BytePairVocabulary(byte_tokenizer().to_str(), vocab_size, self.ends)
        from attnlab.pretrained import huggingface

        words: Any = huggingface.tokenizer(self.source)
        if words.eos_token is None:
            raise ConfigError(f"model={self.source}: its tokenizer has no end token, which stands between texts")
        backend = getattr(words, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(f"model={self.source}: its tokenizer has no fast form; save it with tokenizer.json")
        try:
            return BytePairVocabulary(backend.to_str(), vocab_size, self.ends, words.eos_token)
        except ValueError as error:
            raise ConfigError(f"model={self.source}: the tokenizer does not belong to the model: {error}") from error


def byte_tokenizer() -> Tokenizer:
    """Bytes as tokens 0 to 255, and the mark between texts as 256."""
    plain = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(_letters())}, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    return plain


def _letters() -> list[str]:
    """The letter that byte-level tokenizers write for each byte, in the order of the bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    return [letters[byte] for byte in range(256)]

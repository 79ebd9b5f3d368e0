"""The vocabulary of a language model as a tokenizer of transformers."""

import logging
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from attnlab.data.text.vocabulary import BytePairVocabulary, Vocabulary, WordVocabulary
from attnlab.pretrained import hub

log = logging.getLogger(__name__)


def tokenizer_of(vocabulary: Vocabulary, longest: int) -> Any | None:
    """A `PreTrainedTokenizerFast` that gives the ids of `vocabulary`; None, with a warning, where there is none.

    It puts the mark between texts before a text, as mode=generate does, unless called with `add_special_tokens=False`.
    That mark is its padding too, on the left, where attention masks hide it.

    Raises:
        ConfigError: transformers is not installed.
    """
    if isinstance(vocabulary, BytePairVocabulary):
        tokenizer, mark = Tokenizer.from_str(vocabulary.json), _piece(vocabulary)
    elif isinstance(vocabulary, WordVocabulary):
        tokenizer, mark = _of_words(vocabulary), vocabulary.words[vocabulary.end]
    else:
        log.warning("%s has no form as a tokenizer of transformers; none is written", type(vocabulary).__name__)
        return None
    marks = [(mark, vocabulary.end)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{mark} $A", pair=f"{mark} $A {mark} $B", special_tokens=marks
    )
    fast = hub.transformers().PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=mark,
        pad_token=mark,
        padding_side="left",
        model_max_length=longest,
        clean_up_tokenization_spaces=False,
    )
    if wrong := _difference(fast, vocabulary):
        log.warning("%r has other ids in a tokenizer of transformers than in this vocabulary; none is written", wrong)
        return None
    return fast


def _piece(vocabulary: BytePairVocabulary) -> str:
    piece = vocabulary.tokenizer.id_to_token(vocabulary.end)
    assert piece is not None  # the vocabulary has found its id by its text
    return piece


def _of_words(vocabulary: WordVocabulary) -> Tokenizer:
    numbers = {word: i for i, word in enumerate(vocabulary.words)}
    known = {"unk_token": vocabulary.unknown} if vocabulary.unknown in numbers else {}
    tokenizer = Tokenizer(models.WordLevel(numbers, **known))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="\n", cleanup=False)  # a space before all that begins otherwise
    if vocabulary.lower:
        tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


def _difference(tokenizer: Any, vocabulary: Vocabulary) -> str | None:
    """A text of the vocabulary that the tokenizer splits in another way; None: there is none among those tried."""
    if isinstance(vocabulary, WordVocabulary):
        texts = [word for i, word in enumerate(vocabulary.words) if i != vocabulary.end]
    else:
        ids = [i for i in range(vocabulary.num_ids) if i != vocabulary.end]
        texts = [vocabulary.text(ids[i : i + 50]) for i in range(0, len(ids), 50)]
    ids_by_text = tokenizer(texts, add_special_tokens=False, verbose=False).input_ids
    return next((text for text, ids in zip(texts, ids_by_text, strict=True) if ids != vocabulary.ids(text)), None)

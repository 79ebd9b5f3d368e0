"""Words of texts in any script, and the language that a script tells."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Literal

# How Unicode's names of letters begin, by language. Chinese is written with ideographs alone, Japanese with kana too.
SCRIPTS = {
    "ja": ("HIRAGANA", "KATAKANA", "HALFWIDTH KATAKANA", "COMBINING KATAKANA"),
    "zh": ("CJK UNIFIED", "CJK COMPATIBILITY", "IDEOGRAPHIC", "BOPOMOFO"),
    "th": ("THAI",),
    "lo": ("LAO",),
    "km": ("KHMER",),
    "my": ("MYANMAR",),
}
UNSPACED = tuple(start for starts in SCRIPTS.values() for start in starts)  # no blanks stand between words
OTHERS = {"ko": ("HANGUL", "HALFWIDTH HANGUL"), "bo": ("TIBETAN",)}  # of a tokenizer of their own, with blanks or marks
CODES = {  # of ISO 639-2 and -3, and of languages that are written as one of SCRIPTS and OTHERS
    "zh": "zho chi cmn yue wuu nan hak lzh", "ja": "jpn", "ko": "kor", "th": "tha", "lo": "lao", "km": "khm",
    "my": "mya bur shn", "bo": "bod tib dzo dz",
}  # fmt: skip
IGNORED = (  # nothing is seen, or a line that makes a word longer
    "VARIATION SELECTOR", "COMBINING GRAPHEME JOINER", "MONGOLIAN FREE VARIATION SELECTOR", "ARABIC TATWEEL",
)  # fmt: skip
APOSTROPHES = re.compile("[\u2019\u02bc]")  # as typesetting and some alphabets write them
INSIDE = re.compile(r"(?<=\w)[\u2019\u02bc](?=\w)")  # where a text has quotations in single marks
KANA = 0.05  # least share of kana in a Japanese text

Kind = Literal["letter", "mark", "unspaced", "ignored", "other"]


@cache
def kind(char: str) -> Kind:
    """What a character is in a text: a letter or digit, a mark that belongs to the letter before it, a letter or mark
    of a script without blanks, a sign that is no part of a word's spelling (joiners, direction marks, soft hyphens,
    tatweel), or another sign."""
    category, name = unicodedata.category(char), unicodedata.name(char, "")
    if category == "Cf" or name.startswith(IGNORED):
        return "ignored"
    if not (char.isalnum() or category[0] == "M"):
        return "other"
    if name.startswith(UNSPACED):
        return "unspaced"
    return "letter" if char.isalnum() else "mark"


class _Table(dict[int, str]):
    """For `str.translate`: a blank in place of what separates words, and around what is a word alone.

    Args:
        signs: part of a word beside letters.
    """

    def __init__(self, signs: str) -> None:
        super().__init__({ord(sign): sign for sign in signs})

    def __missing__(self, code: int) -> str:
        char = chr(code)
        self[code] = {"unspaced": f" {char} ", "ignored": "", "other": " "}.get(kind(char), char)
        return self[code]


_TABLES: dict[str, _Table] = {}


def lower(text: str) -> str:
    """A text in lower case, composed (NFC), without signs that are not seen and tatweel.

    A dotted capital I becomes i, as in Turkish; a capital I does too, as in all other languages.
    """
    text = unicodedata.normalize("NFC", text).lower()
    if text.isascii():
        return text
    text = "".join(char for char in text if kind(char) != "ignored")
    return unicodedata.normalize("NFC", text.replace("i\u0307", "i"))


def words(text: str, signs: str = "") -> list[str]:
    """The words of a text in lower case: letters, digits and combining marks, and these signs.

    With the sign ' typographic apostrophes (U+2019, U+02BC) are that sign. In a text with an opening mark (U+2018) they
    are so inside words alone, because the mark that closes a quotation is the same character.

    Other signs and blanks separate words. In scripts without blanks (Chinese, Japanese, Thai, Lao, Khmer, Burmese)
    every character is a word, beside words of other scripts: `ja 東京 2024` gives ja, 東, 京 and 2024. Korean has
    blanks, and its words are what stands between them.
    """
    table = _TABLES.setdefault(signs, _Table(signs))
    if "'" in signs and not text.isascii():
        text = (INSIDE if "\u2018" in text else APOSTROPHES).sub("'", text)
    parts = lower(text).translate(table).split()
    return parts if text.isascii() else [part for part in parts if any(kind(char) != "mark" for char in part)]


def in_characters(texts: Iterable[Sequence[str]]) -> bool:
    """Whether most words of texts, as :func:`words` gives them, are characters of scripts without blanks."""
    kinds = Counter(len(word) == 1 and kind(word) == "unspaced" for text in texts for word in text)
    return kinds[True] > kinds[False]


def language_of(texts: Iterable[str]) -> str | None:
    """The language of most words of these texts, as far as its script tells: a key of SCRIPTS or OTHERS, or None."""
    firsts = Counter(word[0] for text in texts for word in words(text))
    counts: Counter[str] = Counter()
    for char, count in firsts.items():
        name = unicodedata.name(char, "")
        counts[next((code for code, starts in {**SCRIPTS, **OTHERS}.items() if name.startswith(starts)), "")] += count
    if counts["ja"] >= KANA * (counts["ja"] + counts["zh"]):
        counts["ja"] += counts.pop("zh", 0)
    code, count = max(counts.items(), key=lambda item: item[1], default=("", 0))
    return code if code and 2 * count > counts.total() else None


def language(code: str | None) -> str | None:
    """The key of SCRIPTS or OTHERS for a code such as zh, zh-TW, zho_Hans or jpn; None for other languages."""
    first = re.split("[-_]", (code or "").lower())[0]
    return next((key for key, others in CODES.items() if first in (key, *others.split())), None)


def share_beyond_ascii(texts: Iterable[str]) -> float:
    """The share of letters, digits and marks in these texts that are not ASCII, from 0 to 1."""
    counts = Counter(char for text in texts for char in unicodedata.normalize("NFC", text))
    letters = {char: count for char, count in counts.items() if kind(char) in ("letter", "mark", "unspaced")}
    return sum(count for char, count in letters.items() if not char.isascii()) / max(1, sum(letters.values()))

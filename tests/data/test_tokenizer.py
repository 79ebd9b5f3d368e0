import itertools
import re
from pathlib import Path

import pytest

from attnlab.data.text.tokenizer import Kind, Tokenizer
from attnlab.errors import ConfigError, DataError

WORDS = ["eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "null"]
LINES = [" ".join(words) for words in itertools.permutations(WORDS, 3)]


@pytest.mark.parametrize(("kind", "size"), [("unigram", 32), ("bpe", 60), ("char", 23)])
def test_text_comes_back(kind: Kind, size: int) -> None:
    tokenizer = Tokenizer.train(LINES, size, kind)
    assert tokenizer.size == size
    ids = tokenizer.encode_all(["sieben fünf null"])[0]
    assert min(ids) > Tokenizer.unk
    assert max(ids) < size
    assert tokenizer.decode(ids) == "sieben fünf null"


def test_training_is_deterministic_and_load_gives_the_same(tmp_path: Path) -> None:
    a, b = Tokenizer.train(LINES, 32), Tokenizer.train(iter(LINES), 32)
    a.save(tmp_path / "a.model")
    assert a.fingerprint == b.fingerprint == Tokenizer.load(tmp_path / "a.model").fingerprint
    assert Tokenizer.train(LINES, 31).fingerprint != a.fingerprint


@pytest.mark.parametrize("kind", ["unigram", "bpe", "char"])
def test_too_large_names_the_largest_that_works(kind: Kind, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as error:
        Tokenizer.train(LINES, 8000, kind)
    message = str(error.value)
    assert "vocab_size=8000" in message and "\n" not in message
    largest = max(int(number) for number in re.findall(r"\d+", message) if number != "8000")
    assert Tokenizer.train(LINES, largest, kind).size == largest
    with pytest.raises(ConfigError):
        Tokenizer.train(LINES, largest + 1, kind)
    assert capfd.readouterr().err == ""  # SentencePiece's own log stays silent


@pytest.mark.parametrize("kind", ["unigram", "bpe", "char"])
def test_without_a_hard_limit_a_small_text_gets_what_it_allows(tmp_path: Path, kind: Kind) -> None:
    soft = Tokenizer.train(LINES, 8000, kind, hard_limit=False)
    assert soft.decode(soft.encode_all(["sieben fünf null"])[0]) == "sieben fünf null"
    assert Tokenizer.cached(LINES, tmp_path, 8000, kind, [], False).fingerprint == soft.fingerprint
    with pytest.raises(ConfigError):
        Tokenizer.cached(LINES, tmp_path, 8000, kind, [], True)


def test_broken_files_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.model", tmp_path / "junk.model"):
        if path.stem == "junk":
            path.write_bytes(b"junk")
        with pytest.raises(DataError, match=f"{path.name}: .*SentencePiece model") as error:
            Tokenizer.load(path)
        assert "\n" not in str(error.value)


def test_cached_by_content(tmp_path: Path) -> None:
    first = Tokenizer.cached(LINES, tmp_path, 32, "unigram", [], True)
    (model,) = tmp_path.glob("unigram*/vocabulary")
    written = model.stat().st_mtime_ns
    assert Tokenizer.cached(LINES, tmp_path, 32, "unigram", [], True).fingerprint == first.fingerprint
    assert model.stat().st_mtime_ns == written
    Tokenizer.cached(LINES[1:], tmp_path, 32, "unigram", [], True)
    Tokenizer.cached(LINES, tmp_path, 31, "unigram", [], True)
    assert len(list(tmp_path.glob("unigram*/vocabulary"))) == 3


@pytest.mark.parametrize("kind", ["unigram", "bpe", "char"])
def test_a_long_text_counts_as_any_other(kind: Kind) -> None:
    words = [str(i) for i in range(100, 2100)]
    tokenizer = Tokenizer.train([" ".join(words), "\u2585 a, b. c\0d"], 60, kind, hard_limit=False)
    for text in ("1204. 777", "a, b. c d"):
        assert tokenizer.decode(tokenizer.encode_all([text])[0]) == text


WRITTEN = {  # texts of a language, by whether NFKC changes them
    "Korean": ("\u1112\u1161\u11ab\u1100\u1173\u11af", True),
    "Vietnamese": ("Tie\u0302\u0301ng Vie\u0323\u0302t", True),
    "fractions": ("1½ ﬁ x²", True),
    "joiners": ("نمی\u200cخواهم क\u094d\u200dष", True),
    "wide": ("ＡＢＣ　", True),
    "ellipsis": ("a… №", True),
    "Hindi": ("हिन्दी में", False),
    "emoji": ("ok \U0001f469\U0001f3fd", False),
    "Thai": ("ภาษาไทย", False),
}


@pytest.mark.parametrize(("text", "changes"), WRITTEN.values(), ids=WRITTEN)
def test_texts_come_back_as_they_are_without_normalisation(text: str, changes: bool) -> None:
    text = " ".join(text.split())
    for normalisation, same in (("identity", True), ("nmt_nfkc", not changes)):
        tokenizer = Tokenizer.train([text], 60, "bpe", hard_limit=False, normalisation=normalisation)  # type: ignore[arg-type]
        assert (tokenizer.decode(tokenizer.encode_all([text])[0]) == text) == same


def test_texts_that_normalisation_deletes_are_an_error() -> None:
    with pytest.raises(ConfigError, match="no letters that task.data.normalisation=nmt_nfkc leaves"):
        Tokenizer.train(["\u200b", "\u200b\u200b"], 10, hard_limit=False)

"""Published layouts, what is wrong with them, and vocabularies."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from attnlab.data import BillionWords, BytePairs, FineWebEdu, PennTreebank, TextFiles, WikiText, WikiTextRaw, Words
from attnlab.data.samples import markov
from attnlab.data.samples.markov import Source
from attnlab.data.text.corpora import SPLITS, TextCorpus
from attnlab.data.text.language_modelling import LanguageModellingData, write_sample
from attnlab.data.text.vocabulary import BytePairVocabulary, Vocabulary, read_vocabulary
from attnlab.errors import ConfigError, DataError
from tests.data.test_tokens import write_shard

CORPORA: list[Callable[[], TextCorpus]] = [PennTreebank, WikiText, BillionWords, lambda: FineWebEdu("F", 50)]


@pytest.mark.parametrize("make", CORPORA)
def test_the_sample_is_read_back(
    make: Callable[[], TextCorpus], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(markov, "LINES", {"train": 500, "validation": 60, "test": 60})
    corpus, source = make(), Source()
    root = write_sample(tmp_path, corpus)
    for split in SPLITS:
        lines = [line.strip() for text in corpus.texts(root, split) for line in text.split("\n")]
        assert lines == list(source.lines(split))
        assert corpus.files(root, split) and not corpus.shards(root, split, 300)


def test_wikitext_may_be_packed_or_be_named_as_in_other_copies(tmp_path: Path) -> None:
    (tmp_path / "wikitext-2").mkdir()
    (tmp_path / "wikitext-2" / "wiki.train.tokens.gz").write_bytes(gzip.compress(" = A = \n\n a \u2028 b\n".encode()))
    (tmp_path / "valid.txt").write_text("c\n")
    (tmp_path / "test.txt").write_text("d")
    assert list(WikiText().texts(tmp_path, "train")) == [" = A = ", "", " a \u2028 b"]
    assert [list(WikiText().texts(tmp_path, split)) for split in SPLITS[1:]] == [["c"], ["d"]]
    (tmp_path / "simple-examples" / "data").mkdir(parents=True)
    (tmp_path / "simple-examples" / "data" / "ptb.valid.txt").write_text(" a <unk> \n")
    assert list(PennTreebank().texts(tmp_path, "validation")) == [" a <unk> "]
    with pytest.raises(DataError, match=r"ptb.train.txt: no such file .*Penn Treebank; experiment=own/text"):
        PennTreebank().files(tmp_path, "train")


def test_raw_text_is_joined_as_the_rows_of_the_data_set_are(tmp_path: Path) -> None:
    """The same text from wiki.*.raw and from Parquet files, whose rows have their line ends."""
    lines = [" = A = \n", " \n", " a b \n"]
    (tmp_path / "wiki.test.raw").write_text("".join(lines))
    (raw,) = WikiTextRaw().texts(tmp_path, "test")
    assert raw == " = A = \n\n\n\n\n a b \n"
    (tmp_path / "wiki.test.raw").unlink()
    folder = tmp_path / "wikitext-2-raw-v1"
    folder.mkdir()
    rows = [line if line.strip() else "" for line in lines]
    for part, texts in enumerate((rows[:2], rows[2:])):
        parquet.write_table(pyarrow.table({"text": texts}), folder / f"test-0000{part}-of-00002.parquet")
    assert list(WikiTextRaw().texts(tmp_path, "test")) == [raw]
    for path in folder.iterdir():
        path.unlink()
    (tmp_path / "wiki.test.tokens").write_text("".join(lines).replace("a", "<unk>"))
    assert list(WikiTextRaw().texts(tmp_path, "test")) == [raw.replace("a", "<unk>")]  # joined in the same way


def test_lm1b_is_not_tested_on_what_checkpoints_are_chosen_by(tmp_path: Path) -> None:
    corpus = BillionWords()
    base = tmp_path / "1-billion-word-language-modeling-benchmark-r13output"
    for name in (corpus.TRAIN, corpus.HELD):
        (base / name).mkdir(parents=True)
    with pytest.raises(DataError, match="train shards of the one billion word benchmark"):
        corpus.files(tmp_path, "train")
    for i in range(3):
        (base / corpus.HELD / f"news.en.heldout-{i:05}-of-00050").write_text(f"held {i}\n")
    assert list(corpus.texts(tmp_path, "test")) == ["held 0"]
    assert list(corpus.texts(tmp_path, "validation")) == ["held 1", "held 2"]
    (base / corpus.HELD / "news.en.heldout-00000-of-00050").unlink()
    with pytest.raises(DataError, match="no test shards"):
        corpus.files(tmp_path, "test")


def test_fineweb_documents_are_held_out_from_its_first_file(tmp_path: Path) -> None:
    for name, numbers in (("a/000_00000.parquet", range(5)), ("a/000_00001.parquet", range(5, 8))):
        (tmp_path / "a").mkdir(exist_ok=True)
        texts = {"text": [f"document {i}" for i in numbers], "score": [3.0 for _ in numbers]}
        parquet.write_table(pyarrow.table(texts), tmp_path / name)
    last = {split: [text[-1] for text in FineWebEdu("F", 2).texts(tmp_path, split)] for split in SPLITS}
    assert last == {"train": ["4", "5", "6", "7"], "validation": ["0", "1"], "test": ["2", "3"]}
    for split in ("train", "test"):
        with pytest.raises(DataError, match=rf"no document is left for {split}: 2 x 8 .*held_out_documents"):
            list(FineWebEdu("F", 8).texts(tmp_path, split))


def test_fineweb_files_may_be_of_some_splits(tmp_path: Path) -> None:
    for name, numbers in (("data/train-0", range(6)), ("data/validation-0", range(6, 8)), ("x/test/0", range(8, 9))):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pyarrow.table({"text": [str(i) for i in numbers]}), tmp_path / f"{name}.parquet")
    corpus = FineWebEdu("F", 2)
    assert ["".join(corpus.texts(tmp_path, split)) for split in SPLITS] == ["012345", "67", "8"]
    (tmp_path / "x" / "test" / "0.parquet").unlink()
    assert ["".join(corpus.texts(tmp_path, split)) for split in SPLITS] == ["2345", "67", "01"]
    (tmp_path / "data" / "validation-0.parquet").unlink()
    assert ["".join(corpus.texts(tmp_path, split)) for split in SPLITS] == ["45", "01", "23"]
    for name, ids in (("train", [1]), ("x_val_0", [2, 3]), ("x_test_0", [4, 5])):
        write_shard(tmp_path / f"{name}.bin", ids)
    shards = [FineWebEdu().shards(tmp_path, split, 10)[0] for split in SPLITS]
    assert [file.read(0, len(file)).tolist() for file in shards] == [[1], [2, 3], [4, 5]]


def test_fineweb_shards_are_read_without_their_headers(tmp_path: Path) -> None:
    write_shard(tmp_path / "fineweb_val_000000.bin", [1, 2, 3, 4])
    write_shard(tmp_path / "fineweb_train_000002.bin", [7])
    write_shard(tmp_path / "fineweb_train_000001.bin", [5, 6])
    files = {split: FineWebEdu().shards(tmp_path, split, 10) for split in SPLITS}
    ids = {split: [file.read(0, len(file)).tolist() for file in shards] for split, shards in files.items()}
    assert ids == {"train": [[5, 6], [7]], "validation": [[1, 2]], "test": [[3, 4]]}
    with pytest.raises(ConfigError, match=r"task.data.vocabulary.file=<GPT-2's tokenizer.json>"):
        BytePairs().build(FineWebEdu(), tmp_path, tmp_path, 300)


# --- vocabularies -----------------------------------------------------------------------------------------------


@pytest.fixture
def wikitext(tmp_path: Path) -> Path:
    (tmp_path / "wiki.train.tokens").write_text("b a a\n\nc a b <unk>\n")
    (tmp_path / "wiki.valid.tokens").write_text("a d\n")
    (tmp_path / "wiki.test.tokens").write_text("B\n")
    return tmp_path


def make(root: Path, size: int = 100, **settings: object) -> Vocabulary:
    return Words(**settings).build(WikiText(), root, root / "cache", size)  # type: ignore[arg-type]


def test_words_by_frequency(wikitext: Path) -> None:
    vocabulary = make(wikitext)
    assert vocabulary.plain()["words"] == ["a", "<eos>", "b", "c", "<unk>"]
    assert vocabulary.marked(["a d b", ""]) == [[0, 4, 2, 1], [1]]
    assert vocabulary.text([0, 2, 1, 1, 0]) == "a b\n\na"
    assert (vocabulary.size, vocabulary.num_ids, vocabulary.unit) == (5, 5, "word")


def test_words_left_out_become_unknown(wikitext: Path) -> None:
    assert make(wikitext, 4).plain()["words"] == ["a", "<eos>", "b", "<unk>"]
    assert make(wikitext, 3).plain()["words"] == ["a", "<eos>", "<unk>"]
    frequent = make(wikitext, min_count=2, unknown="<UNK>", end="<S>", ends="around")
    assert frequent.plain()["words"] == ["<S>", "a", "b", "<UNK>"]
    assert frequent.marked(["a c"]) == [[0, 1, 3, 0]]
    assert make(wikitext, of=["train", "test"], lower=True).ids("B a") == [1, 2]
    words = wikitext / "words.txt"
    words.write_text("b 12\na 3\n")
    of_file = make(wikitext, file=str(words))
    assert set(of_file.plain()["words"]) == {"b", "a", "<eos>", "<unk>"}
    assert of_file.text(of_file.ids("b c")) == "b <unk>"
    words.write_text("b\nb\n")
    with pytest.raises(DataError, match=r"words.txt: 'b' occurs twice"):
        make(wikitext, file=str(words))
    (wikitext / "wiki.train.tokens").write_text("a b\n")
    with pytest.raises(DataError, match=r"'d' is not in the vocabulary of 3"):
        make(wikitext).ids("a d")


def test_vocabularies_are_saved_and_read_back(wikitext: Path) -> None:
    pieces = BytePairs().build(WikiText(), wikitext, wikitext / "cache", 300)
    for number, vocabulary in enumerate((make(wikitext), pieces)):
        path = wikitext / f"{number}.json"
        vocabulary.save(path)
        again = read_vocabulary(path)
        assert again.fingerprint == vocabulary.fingerprint and type(again) is type(vocabulary)
        assert again.marked(["a b"]) == vocabulary.marked(["a b"])
        path.write_text(path.read_text()[:-9])
        with pytest.raises(DataError, match="expected a vocabulary"):
            read_vocabulary(path)


def test_byte_pairs_are_learned_and_lossless(tmp_path: Path) -> None:
    corpus = FineWebEdu("F", 50)
    root = write_sample(tmp_path, corpus)
    vocabulary = BytePairs().build(corpus, root, tmp_path, 400)
    assert vocabulary.size == 400 and vocabulary.num_ids <= 400 and vocabulary.unit == "token"
    text = "baba  dödo\n\tτ\n"
    ids = vocabulary.ids(text)
    assert vocabulary.text(ids) == text and max(ids) < vocabulary.num_ids
    assert vocabulary.marked([text]) == [[vocabulary.end, *ids]]
    padding = vocabulary.size - 1 if vocabulary.num_ids < 400 else 0
    assert vocabulary.text([*vocabulary.ids("ba"), vocabulary.end, padding, *vocabulary.ids("do")])
    line = next(iter(Source().lines("train")))
    assert len(vocabulary.ids(line)) < 2.5 * len(line.split())
    assert BytePairs().build(corpus, root, tmp_path, 400).fingerprint == vocabulary.fingerprint


@pytest.mark.parametrize("change", ["column", "hold_out", "own file"])
def test_what_is_stored_of_a_corpus_follows_its_settings_and_files(change: str, tmp_path: Path) -> None:
    """Ids, words and byte pairs of one cache are those of an empty one."""
    root = tmp_path / "data"
    root.mkdir()
    rows = (json.dumps({"title": f"t{i % 9} on", "body": f"b{i} c{i} was b{i} and"}) for i in range(60))
    (root / "train.jsonl").write_text("\n".join(rows))

    def stored(cache: Path, corpus: TextFiles) -> list[Any]:
        pieces = BytePairs().build(corpus, root, cache, 290)
        values: list[Any] = [pieces.json]
        for vocabulary in (Words(min_count=2), Words(of=["train", "test"], min_count=2)):
            data = LanguageModellingData(str(root), str(cache), corpus, vocabulary, 300, 4, 4, 1)
            data.setup()
            values += [data.vocabulary.plain(), *(data.beginning(split, 999).tolist() for split in SPLITS)]
        return values

    first = stored(tmp_path / "shared", TextFiles("title"))
    if change == "own file":
        (root / "test.jsonl").write_bytes((root / "train.jsonl").read_bytes())
    corpus = TextFiles("body" if change == "column" else "title", hold_out=5 if change == "hold_out" else 20)
    again = stored(tmp_path / "shared", corpus)
    assert again == stored(tmp_path / "fresh", corpus) != first


def test_a_tokenizer_file(wikitext: Path) -> None:
    learned = BytePairs().build(WikiText(), wikitext, wikitext / "cache", 300)
    assert isinstance(learned, BytePairVocabulary)
    path = wikitext / "tokenizer.json"
    path.write_text(learned.json)

    def build(size: int = 300) -> BytePairVocabulary:
        return BytePairs(str(path)).build(WikiText(), wikitext, wikitext / "cache", size)

    assert build().fingerprint == learned.fingerprint
    with pytest.raises(DataError, match=r"tokenizer.json: .* has \d+ pieces, more than the 9 ids of .*task.data.voc"):
        build(9)
    path.write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer.json: expected a tokenizer.json"):
        build()
    path.write_text(learned.json.replace("<|endoftext|>", "<end>"))
    with pytest.raises(DataError, match=r"has no <\|endoftext\|>"):
        build()
    path.unlink()
    with pytest.raises(DataError, match="tokenizer.json: cannot be read"):
        build()


# --- the real WikiText-2 ----------------------------------------------------------------------------------------


def test_wikitext2_has_its_published_size(corpora: Path, tmp_path: Path) -> None:
    root, corpus = corpora / "lm_wikitext2", WikiText()
    vocabulary = Words().build(corpus, root, tmp_path, 33278)
    assert vocabulary.size == 33278
    counts = {split: sum(len(line.split()) + 1 for line in corpus.texts(root, split)) for split in SPLITS}
    assert counts == {"train": 2_088_628, "validation": 217_646, "test": 245_569}
    assert np.mean(
        [i == vocabulary.ids("<unk>")[0] for line in corpus.texts(root, "test") for i in vocabulary.ids(line)]
    )

"""Data of one's own: tables with named columns, folders of recordings, text files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import soundfile
from pyarrow import parquet

from attnlab.config.check import check_present, compose
from attnlab.data import BillionWords, FineWebEdu, Parallel, Table, TextFiles, WikiText, WikiTextRaw, XSum
from attnlab.data.corpus import Reader, Segment
from attnlab.data.report import Report, Split
from attnlab.data.text.corpora import SPLITS as LANGUAGE_SPLITS
from attnlab.errors import ConfigError, DataError
from tests.data.layouts import RATE, audio, write


def write_table(path: Path, examples: list[dict[str, str]]) -> None:
    if path.suffix == ".jsonl":
        write(path, *map(json.dumps, examples))
        return
    sign, mark = ("\t", "") if path.suffix == ".tsv" else (",", '"')
    lines = (sign.join(f"{mark}{x}{mark}" for x in example.values()) for example in examples)
    write(path, sign.join(examples[0]), *lines)


def pairs(count: int, first: int = 0) -> list[dict[str, str]]:
    numbers = range(first, first + count)
    return [{"article": f"text  {i}, long", "headline": f"title {i}", "key": f"k{i}"} for i in numbers]


def split(reader: Reader, root: Path, name: str) -> list[str]:
    reader.check(root, [name], reader.kinds[0])
    return [example.target for example in reader.read(root, name, reader.kinds[0], False)]


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "tsv"])
def test_three_files_with_named_columns(suffix: str, tmp_path: Path) -> None:
    for i, name in enumerate(("train", "valid", "test")):
        write_table(tmp_path / f"{name}.{suffix}", pairs(3, 10 * i))
    reader = Table("article", "headline", id="key")
    assert split(reader, tmp_path, "train") == ["title 0", "title 1", "title 2"]
    assert split(reader, tmp_path, "dev") == ["title 10", "title 11", "title 12"]
    first = reader.read(tmp_path, "test", "text", False)[0]
    assert (first.id, first.source) == ("k20", "text 20, long")
    assert reader.name == tmp_path.name


def test_a_wrong_column_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    write_table(tmp_path / "train.csv", pairs(3))
    words = ("experiment=own/translation", f"data_root='{tmp_path}'", "task.data.reader.source=article")
    with pytest.raises(ConfigError, match=r"train.csv: the column 'title' is missing .*task.data.reader.target"):
        check_present(compose(*words, "task.data.reader.target=title"))
    check_present(compose(*words, "task.data.reader.target=headline"))


@pytest.mark.parametrize("name", ["data", "train", "my own"])
def test_one_file_is_divided(name: str, tmp_path: Path) -> None:
    write_table(tmp_path / f"{name}.jsonl", pairs(12))
    reader = Table("article", "headline", hold_out=5)
    targets = {part: split(reader, tmp_path, part) for part in ("train", "dev", "test")}
    assert targets["test"] == ["title 0", "title 5", "title 10"]
    assert targets["dev"] == ["title 1", "title 6", "title 11"]
    assert sorted(sum(targets.values(), [])) == sorted(f"title {i}" for i in range(12))


def speak(path: Path, text: str) -> None:
    write(audio(path, 0.5).with_suffix(".txt"), text)


@pytest.mark.parametrize("divided", [False, True])
def test_recordings_with_texts_beside_them(divided: bool, tmp_path: Path) -> None:
    for i in range(12):
        part = ("train", "dev", "test")[i % 3] if divided else "speakers"
        speak(tmp_path / part / "a" / f"{i:02}.{'wav' if i % 2 else 'flac'}", f"word {i}")
    reader = Table("text", "text", "audio", hold_out=4)
    targets = {part: split(reader, tmp_path, part) for part in ("train", "dev", "test")}
    assert targets["dev"] == [f"word {i}" for i in ((1, 4, 7, 10) if divided else (1, 5, 9))]
    example = reader.read(tmp_path, "test", "audio", False)[0]
    assert isinstance(example, Segment) and (example.rate, example.num_samples) == (RATE, RATE // 2)


def test_a_manifest_and_a_long_document(tmp_path: Path) -> None:
    audio(tmp_path / "wav" / "one.wav")
    rows = [{"audio": "wav/one.wav", "text": "hello " * 30000, "de": "hallo"}] * 3
    write_table(tmp_path / "data.csv", rows)
    (example,) = Table("text", "de", "audio", hold_out=3).read(tmp_path, "dev", "audio", False)
    assert (len(example.source), example.target) == (179999, "hallo")


@pytest.mark.parametrize("kind", ["tables", "text", "pairs", "recordings"])
def test_names_of_splits_in_any_case_and_what_no_split_reads(kind: str, tmp_path: Path) -> None:
    for name in ("Training", "EVAL", "Test", "._mine", ".Trash-1000/mine", "notes"):
        if kind == "recordings":
            speak(tmp_path / name / "a.wav", name)
        elif kind == "pairs":
            for language in ("en", "de"):
                write(tmp_path / f"{name}.{language}", name)
        else:
            write(tmp_path / f"{name}.JSONL", json.dumps({"article": "text", "headline": name}))
    reader = {
        "tables": Table("article", "headline"), "recordings": Table("text", "text", "audio"), "pairs": Parallel()
    }.get(kind)  # fmt: skip
    corpus, report = TextFiles("headline"), Report()
    for name, expected in (("train", "Training"), ("dev", "EVAL"), ("test", "Test")):
        if reader:
            assert split(reader, tmp_path, name) == [expected]
        else:
            assert [*corpus.texts(tmp_path, "validation" if name == "dev" else name)] == [expected]  # type: ignore[arg-type]
    with report.of("files") as files:
        reader.check(tmp_path, reader.splits, reader.kinds[0]) if reader else corpus.check(tmp_path)
    other = "pair of files that no split reads" if kind == "pairs" else "table that no split reads"
    other = "file in the folder notes, which no split reads" if kind == "recordings" else other
    assert files.left_out[other].count == 1 + (kind == "recordings") and "notes" in files.left_out[other].example
    assert kind == "pairs" or files.left_out["hidden file or folder"].count == 2
    if kind == "recordings":
        speak(tmp_path / "val" / "a.wav", "x")
    else:
        for path in list(tmp_path.glob("EVAL.*")):
            path.with_name(f"val{path.suffix}").write_bytes(path.read_bytes())
    with pytest.raises(DataError, match="both EVAL.* and val.*; keep one of them"):
        split(reader, tmp_path, "dev") if reader else corpus.check(tmp_path)


@pytest.mark.parametrize("kind", ["tables", "text", "manifest"])
def test_files_of_folders_beside_a_table_are_counted(kind: str, tmp_path: Path) -> None:
    reader = Table("text", "text", "audio" if kind == "manifest" else None)
    row = json.dumps({"audio": "wav/a.wav", "text": "x"})
    write(tmp_path / ("a.txt" if kind == "text" else "train.jsonl"), row)
    for name in ("wav/a.wav", "train/b.wav"):  # the rows name them
        audio(tmp_path / name)
    for name in ("test/a", "test/b", "more/deep/x", ".hidden/x"):
        write(tmp_path / f"{name}.txt", "x")
    (tmp_path / "empty").mkdir()
    with Report().of("files") as files:
        TextFiles().check(tmp_path) if kind == "text" else reader.check(tmp_path, reader.splits, reader.kinds[0])
    names = {"hidden file or folder": 1}
    names |= {f"file in the folder {name}, which no split reads": i for name, i in (("more", 1), ("test", 2))}
    assert {reason: note.count for reason, note in files.left_out.items()} == names


NAMES = ("news-{}", "wiki.{}", "{}-00000-of-00001", "my_{}_2", "WMT {} set", "{}2019")  # of files of a split
SYNONYMS = (("train", "dev", "test"), ("Training", "valid", "Testing"), ("train", "Validation", "test"))


@pytest.mark.parametrize("names", SYNONYMS, ids="/".join)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["pairs", "txt", "jsonl", "table", "parquet"])
def test_a_split_is_a_word_of_a_file_s_name(kind: str, name: str, names: tuple[str, ...], tmp_path: Path) -> None:
    for word in names:
        path = tmp_path / f"{name.format(word)}.{'jsonl' if kind == 'table' else kind}"
        if kind == "pairs":
            for language in ("en", "de"):
                write(path.with_suffix(f".{language}"), word)
        elif kind == "parquet":
            parquet.write_table(pyarrow.table({"text": [word]}), path)
        else:
            write(path, word if kind == "txt" else json.dumps({"source": word, "target": word}))
    parts = ("train", "validation", "test") if kind in ("txt", "jsonl", "parquet") else ("train", "dev", "test")
    corpus = FineWebEdu() if kind == "parquet" else TextFiles("target")
    reader = {"pairs": Parallel(), "table": Table()}.get(kind)
    for part, word in zip(parts, names, strict=True):
        texts = split(reader, tmp_path, part) if reader else [*corpus.texts(tmp_path, part)]  # type: ignore[arg-type]
        assert texts == [word]


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("news-train-test", "b"), "news-train-test: the name is that of train and of test; rename it"),
        (("a-train", "b-train", "c-test"), "both a-train.* and b-train.*; keep one of them"),
        (("a-train", "b-val", "c-dev"), "both b-val.* and c-dev.*; keep one of them"),
    ],
)
def test_names_of_two_splits_or_two_files_of_one_are_refused(names: tuple[str, ...], told: str, tmp_path: Path) -> None:
    for name in names:
        for suffix in ("en", "de", "txt"):
            write(tmp_path / f"{name}.{suffix}", "a")
    for check in (lambda: TextFiles().check(tmp_path), lambda: Parallel().check(tmp_path, ("train",), "text")):
        with pytest.raises(DataError, match=told):
            check()


EXTRA = {"xsum": ("test.raw.source", "test2.source", "train.source.gz"), "wikitext": ("wiki.train.raw", "more/a.txt"),
    "parquet": ("b.jsonl", "a.parquet.gz", "x/a.txt"), "pairs": ("lonely.en", "train.fr", "x/train.en", "._train.en"),
    "lm1b": ("training-monolingual.tokenized.shuffled/news.en-00004-of-00100~", "x.txt")}  # fmt: skip


@pytest.mark.parametrize("kind", EXTRA)
def test_files_that_published_layouts_do_not_have_are_reported(kind: str, tmp_path: Path) -> None:
    corpus = {"wikitext": WikiText, "parquet": FineWebEdu, "lm1b": BillionWords}.get(kind)
    reader = {"xsum": XSum(), "pairs": Parallel()}.get(kind)
    for part in ("train", "valid", "test"):
        for suffix in {"xsum": ("source", "target"), "pairs": ("en", "de"), "wikitext": ("txt",)}.get(kind, ()):
            write(tmp_path / f"{part}.{suffix}", "a")
    if kind == "parquet":
        parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "train.parquet")
    if kind == "lm1b":
        write(tmp_path / BillionWords.TRAIN / "news.en-00001-of-00100", "a")
        for i in range(2):
            write(tmp_path / BillionWords.HELD / f"news.en.heldout-0000{i}-of-00050", "a")
    for name in EXTRA[kind]:
        write(tmp_path / name, "b")
    with Report().of("files") as files:
        corpus().check(tmp_path) if corpus else reader.check(tmp_path, reader.splits, "text")  # type: ignore[union-attr]
    assert sum(note.count for note in files.left_out.values()) == len(EXTRA[kind])
    if corpus is BillionWords:
        assert [*corpus().texts(tmp_path, "train")] == ["a"]


def test_two_layouts_of_one_split_are_refused(tmp_path: Path) -> None:
    for part in XSum.splits:
        write(tmp_path / f"{part}.source", "a")
        write(tmp_path / f"{part}.target", "a")
        write(tmp_path / f"wiki.{part.replace('validation', 'valid')}.raw", "a")
    write(tmp_path / "test.jsonl", json.dumps({"document": "b", "summary": "b"}))
    with pytest.raises(DataError, match="both test.jsonl and test.source; keep one of them"):
        XSum().check(tmp_path, XSum.splits, "text")
    parquet.write_table(pyarrow.table({"text": ["b"]}), tmp_path / "test-0.parquet")
    with pytest.raises(DataError, match="both wiki.test.raw and test-0.parquet; keep one of them"):
        WikiTextRaw().check(tmp_path)


@pytest.mark.parametrize("suffix", ["csv", "tsv", "pairs"])
def test_blank_lines_at_the_end_are_no_examples(suffix: str, tmp_path: Path) -> None:
    if suffix == "pairs":
        for language in ("en", "de"):
            write(tmp_path / f"a.{language}", *"abcd", "", " ", *[""] * (language == "de"))
        texts = [text for part in Parallel.splits for text in split(Parallel(hold_out=3), tmp_path, part)]
    else:
        write(tmp_path / f"a.{suffix}", "text", *"abcd", "", "")
        corpus = TextFiles(hold_out=3)
        texts = [text for part in LANGUAGE_SPLITS for text in corpus.texts(tmp_path, part)]
    assert sorted(texts) == list("abcd")


def test_a_file_alone_may_have_any_name(tmp_path: Path) -> None:
    write(tmp_path / "driving-test.txt", *map(str, range(9)))
    assert [*TextFiles(hold_out=3).texts(tmp_path, "test")] == ["0", "3", "6"]


def test_recordings_of_all_suffixes_and_what_is_none(tmp_path: Path) -> None:
    for i, suffix in enumerate(("wav", "FLAC", "mp3", "aiff", "ogg", "opus", "au", "w64", "caf", "sph")):
        path = tmp_path / f"{i}.{suffix}"
        form = {"sph": "NIST", "opus": "OGG"}.get(suffix)
        soundfile.write(path, np.zeros(RATE), RATE, "OPUS" if suffix == "opus" else None, format=form)
        write(path.with_suffix(".TXT" if i == 3 else ".txt"), f"word {i}")
    for name in ("x.m4a", "y.m4a", "alone.txt", ".DS_Store", "._0.wav", "__MACOSX/0.wav", "Thumbs.db"):
        write(tmp_path / name, "x")
    (tmp_path / "linked").symlink_to(tmp_path)
    reader = Table("text", "text", "audio", hold_out=5)
    with Report().of("files") as files:
        reader.check(tmp_path, reader.splits, "audio")
    assert {reason: note.count for reason, note in files.left_out.items()} == {
        "file that is no recording (.m4a)": 2,
        "file that is no recording (.db)": 1,
        "text without a recording": 1,
        "hidden file or folder": 3,
        "link to a folder that is read already": 1,
    }
    targets = [target for part in reader.splits for target in split(reader, tmp_path, part)]
    assert sorted(targets) == [f"word {i}" for i in range(10)]


ROW = {"audio": "two  blanks.wav", "text": "word"}


def manifest(root: Path, **times: Any) -> tuple[int, int]:
    """First sample and number of samples of a row's part of 3 seconds."""
    audio(root / ROW["audio"], 3)
    write(root / "data.jsonl", *[json.dumps(ROW | times)] * 3)
    with Report().of("dev"):
        (example,) = Table("text", "text", "audio", hold_out=3).read(root, "dev", "audio", False)
    assert isinstance(example, Segment)
    return example.start, example.num_samples


@pytest.mark.parametrize(
    ("times", "start", "end"),
    [
        ({}, 0, 3),
        ({"offset": 1, "duration": 0.5}, 1, 1.5),
        ({"offset": "1.0", "duration": "0.50"}, 1, 1.5),
        ({"Start": 0.5, "end": 2.5}, 0.5, 2.5),
        ({"begin_time": 0.5, "end_time": 2.5, "duration": 2}, 0.5, 2.5),
        ({"startTime": 0.5, "duration (s)": 1}, 0.5, 1.5),
        ({"onset": 2.5}, 2.5, 3),
        ({"end": 2}, 0, 2),
        ({"duration": 2.98}, 0, 3),  # it describes the recording
        ({"duration": 2}, 0, 2),
        ({"start": 1, "end": 3.02}, 1, 3),  # rounded
        ({"start": 1, "end": 2, "speaker": 7, "words": [{"word": "a", "start": 1}]}, 1, 2),
        ({"duration": 3.0, "speaker": 7, "length": 9}, 0, 3),
        ({"speaker": 7, "sentences": 3, "is_end": True, "bartender": "4", "stop": "word"}, 0, 3),
    ],
)
def test_times_in_a_manifest(times: dict[str, Any], start: float, end: float, tmp_path: Path) -> None:
    first, count = manifest(tmp_path, **times)
    assert (first, first + count) == (start * RATE, end * RATE)


@pytest.mark.parametrize(
    ("times", "told"),
    [
        ({"offset": 1, "duration": 2.5}, "a segment from 1.000 to 3.500 s; expected a part of the 3.000 s"),
        ({"start": 1500, "end": 2500}, "a segment from 1500.000"),
        ({"start": 2, "end": 1}, "a segment from 2.000 to 1.000 s"),
        ({"offset": -1, "duration": 1}, "'offset': -1, expected a number of seconds"),
        ({"offset": "00:00:01", "duration": 1}, "'offset': '00:00:01', expected a number"),
        ({"offset": None, "duration": 1}, "'offset': None, expected a number"),
        ({"offset": "", "duration": 1}, "'offset': '', expected a number"),
        ({"offset": "nan"}, "'offset': 'nan', expected a number"),
        ({"start": 0, "duration": 0}, "a segment from 0.000 to 0.000 s"),
        ({"offset": 1, "start": 1}, "'start': a second column of this meaning"),
        ({"start": 1, "end": 2, "duration": 2}, "1 s and duration 2 s do not end at 2 s"),
        ({"offset_ms": 1000}, "the column 'offset_ms' looks like a time, which is read from offset, start"),
        ({"duration[ms]": "900"}, r"the column 'duration\[ms\]' looks like a time"),
        ({"stop": 2}, "the column 'stop' looks like a time"),
        ({"endMs": 2}, "the column 'endMs' looks like a time"),
        ({"timestamp": [0.0, 1.5]}, "the column 'timestamp' looks like a time"),
        ({"time": {"start": 1}}, "the column 'time' looks like a time"),
        ({"frame_offset": 16000}, "the column 'frame_offset' looks like a time"),
        ({"start_ts": "1:02"}, "the column 'start_ts' looks like a time"),
        ({"t_begin": "3 s"}, "the column 't_begin' looks like a time"),
        ({"tmin": 1}, "the column 'tmin' looks like a time"),
        ({"begin": 1.0, "length": 2.0}, "the column 'length' looks like a time"),
        ({"onset": 1.0, "extent": [1, 2, 3]}, "the column 'extent' looks like a time"),
        ({"von": "1.0", "end": 2}, "the column 'von' looks like a time"),
        ({"skip": 1, "duration": 1}, "the column 'skip' looks like a time"),
        ({"starttime": 1, "endtime": 2}, "the column 'starttime' looks like a time"),
        *(
            ({name: 1.0}, f"the column '{name}' looks like")
            for name in ["from", "to_s", "t0", "in", "tc_in", "cue_out"]
        ),
        *(
            ({name: 1.0}, f"the column '{name}' looks like")
            for name in ["seek", "position", "first_sample", "EndFrame"]
        ),
        ({"interval": [1.0, 2.0]}, "the column 'interval' looks like a time"),
        ({"segment": "(1.0, 2.0)"}, "the column 'segment' looks like a time"),
        ({"segment": {"start": 1, "end": 2}}, "the column 'segment' looks like a time"),
    ],
)
def test_times_that_are_refused(times: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"data.jsonl line 2: {told}") as caught:
        manifest(tmp_path, **times)
    assert "\n" not in str(caught.value)


def test_columns_of_numbers_that_are_not_read_are_noted(tmp_path: Path) -> None:
    with Report().of("files"):
        manifest(tmp_path)
    write(tmp_path / "data.jsonl", *[json.dumps(ROW | {"von": "1.0", "speaker": "Eva", "vector": [1, 2, 3]})] * 3)
    with Report().of("dev") as dev:
        Table("text", "text", "audio", hold_out=3).read(tmp_path, "dev", "audio", False)
    notes = [f"numbers in the column '{name}', which is not read" for name in ("von", "vector")]
    assert [*dev.noted] == notes


def test_what_is_wrong_with_a_folder(tmp_path: Path) -> None:
    write_table(tmp_path / "train.jsonl", pairs(3))
    with pytest.raises(DataError, match="train.jsonl line 1: 'nope' is missing"):
        split(Table("article", "headline", id="nope"), tmp_path, "train")
    audio(tmp_path / "spoken" / "a.wav")
    with pytest.raises(DataError, match=r"a.txt is missing: the text of a.wav"):
        split(Table("text", "text", "audio"), tmp_path / "spoken", "train")
    for name in ("a.wav", "a.flac", "b.wav"):
        speak(tmp_path / "same" / name, "word")
    with pytest.raises(DataError, match="the id 'a' occurs twice"):  # it would be in two splits
        split(Table("text", "text", "audio", hold_out=3), tmp_path / "same", "train")
    for part in ("train", "dev", "val", "test"):
        speak(tmp_path / "two" / part / "a.wav", "word")
    with pytest.raises(DataError, match="both dev and val; keep one of them"):
        split(Table("text", "text", "audio"), tmp_path / "two", "train")


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_text_for_a_language_model(suffix: str, tmp_path: Path) -> None:
    texts = [f"line {i}" for i in range(8)]
    write(tmp_path / f"train.{suffix}", *(json.dumps({"body": x}) if suffix == "jsonl" else x for x in texts))
    corpus = TextFiles("body", hold_out=4)
    assert [*corpus.texts(tmp_path, "test")] == ["line 0", "line 4"]
    assert [*corpus.texts(tmp_path, "validation")] == ["line 1", "line 5"]
    assert len([*corpus.texts(tmp_path, "train")]) == 4 and corpus.name == tmp_path.name
    (tmp_path / "test.txt").write_text("other\n")
    assert [*corpus.texts(tmp_path, "test")] == ["other"]
    assert [*corpus.texts(tmp_path, "validation")] == ["line 0", "line 4"]
    (tmp_path / f"train.{suffix}").rename(tmp_path / f"chapter.{suffix}")
    assert [*corpus.texts(tmp_path, "validation")] == ["line 0", "line 4"]
    assert corpus.files(tmp_path, "train") == [tmp_path / f"chapter.{suffix}"]
    (tmp_path / "wav").mkdir()
    with pytest.raises(DataError, match=r"wav: no text file; data_root must hold .txt files"):
        corpus.files(tmp_path / "wav", "train")


BOOK = "".join(f"word {i} stands here\n" + "\n" * (i % 5 == 4) for i in range(200))


@pytest.mark.parametrize("form", ["lines", "one line", "no blanks", "two files", "windows", "long first line"])
def test_running_text_is_divided_into_parts_that_follow_each_other(form: str, tmp_path: Path) -> None:
    text = {"one line": " ".join(BOOK.split()), "no blanks": "ab" * 3000, "long first line": "\n" + "a b " * 2000}
    whole = text.get(form, BOOK)
    if form == "two files":
        (tmp_path / "a.txt").write_text(whole[:2000])
        (tmp_path / "b.TXT").write_text(whole[2000:])
    else:
        (tmp_path / "a.txt").write_bytes(whole.replace("\n", "\r\n" if form == "windows" else "\n").encode())
    corpus = TextFiles(documents="file")
    parts = {split: [*corpus.texts(tmp_path, split)] for split in LANGUAGE_SPLITS}
    joined = "".join(text for texts in parts.values() for text in texts)
    assert joined.replace("\n", "") == whole.replace("\n", "")  # in order, each character once
    sizes = [sum(map(len, texts)) / len(joined) for texts in parts.values()]
    assert sizes == pytest.approx([0.9, 0.05, 0.05], abs=0.02)
    if form in ("lines", "two files", "windows"):  # no line is cut
        assert all(text.startswith("word") and text.rstrip("\n").endswith("here") for text in parts["test"])
    assert "last 5 % of the text" in corpus.held_out and "a document is each file" in corpus.held_out


def test_what_a_document_of_running_text_is(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(f"\n \n{BOOK}\n")
    parts = [[*TextFiles(documents="blank").texts(tmp_path, split)] for split in LANGUAGE_SPLITS]
    assert [len(texts) for texts in parts] == [36, 2, 2] and sum(parts, []) == BOOK.strip().split("\n\n")
    assert [*TextFiles(documents="lines").texts(tmp_path, "test")][:2] == ["", BOOK.split("\n")[18]]
    (tmp_path / "test.txt").write_text("one\n\ntwo\nmore")
    for documents, expected in {"file": ["one\n\ntwo\nmore"], "blank": ["one", "two\nmore"]}.items():
        corpus = TextFiles(documents=documents)  # type: ignore[arg-type]
        assert [*corpus.texts(tmp_path, "test")] == expected
        train, validation = ("".join(corpus.texts(tmp_path, split)) for split in LANGUAGE_SPLITS[:2])
        assert len(validation) == pytest.approx(0.05 * len(BOOK), abs=80) and "word 199" in validation
        assert "word 0 " in train and "word 199" not in train
    (tmp_path / "test.txt").unlink()
    (tmp_path / "a.txt").write_text("one document\nof two lines\n")
    with pytest.raises(DataError, match=r"1 documents leave no text for test.*documents=file divides"):
        [*TextFiles(documents="blank").texts(tmp_path, "test")]
    (tmp_path / "a.txt").unlink()
    write(tmp_path / "a.jsonl", *(json.dumps({"text": f"{i}"}) for i in range(40)))
    assert [*TextFiles(documents="file").texts(tmp_path, "test")] == ["0", "20"]  # rows are documents


TSV, CSV = "source\ttarget\n", "source,target\n"
AWKWARD = {  # a test set and its examples
    "marks": ("tsv", TSV + '5" pipe\tx\n"open\ty\nz\tend"\n', [('5" pipe', "x"), ('"open', "y"), ("z", 'end"')]),
    "windows": ("tsv", "\ufeff" + TSV.replace("\n", "\r\n") + "a\tb\r\nc\td\r\n", [("a", "b"), ("c", "d")]),
    "other line ends": ("tsv", TSV + "a\u2028b\tc\u0085d\n", [("a b", "c d")]),
    "blank end": ("tsv", TSV + "a\tb\n\n\n", [("a", "b")]),
    "no end": ("tsv", TSV + "a\tb", [("a", "b")]),
    "quoted": ("csv", CSV + '5" pipe,x\n"a ""b"", c",y\n', [('5" pipe', "x"), ('a "b", c', "y")]),
    "blank before a quote": ("csv", CSV + 's1, "t1, u"\n "a ""b""",  c\n', [("s1", "t1, u"), ('a "b"', "c")]),
    "blanks in a header": ("csv", 'source, "target"\na, b\n', [("a", "b")]),
    "carriage returns": ("csv", "source,target\ra,b\r", [("a", "b")]),
    "long": ("csv", f'{CSV}"{"x, " * 99999}",y\n', [(("x, " * 99999).strip(), "y")]),
}  # fmt: skip
NOTED = {  # a test set, its examples, and what the report says
    "marks": ("tsv", TSV + '"a ""b"""\t"c"\n', [('"a ""b"""', '"c"')], "text in quotation marks, which are part of it"),
    "mac": ("tsv", TSV + "a\rb\tc\n", [("a b", "c")], "carriage return inside a line, read as white space"),
    "lines": ("csv", CSV + '"a\nb",c\n', [("a b", "c")], "row of several lines, whose texts are joined"),
    "blank": ("tsv", TSV + "a\tb\n\nc\td\n", [("a", "b"), ("c", "d")], "blank line, which is no row"),
    "blank csv": ("csv", CSV + "\na,b\n\n", [("a", "b")], "blank line, which is no row"),
}
REFUSED = {  # a test set, and its error
    "line end": ("tsv", TSV + '"a\nb"\tc\n', "line 2: expected 2 columns as in the header, not 1.*csv or .jsonl"),
    "tab": ("tsv", TSV + "a\tb\tc\n", "line 2: expected 2 columns as in the header, not 3"),
    "zero": ("tsv", TSV + "a\tb\na\0b\tc\n", "line 3: a zero byte"),
    "UTF-16": ("tsv", (TSV + "a\tb\n").encode("utf-16-le").decode(), "line 1: a zero byte.*UTF-16"),
    "blank header": ("tsv", "\n" + TSV, "a blank first line; expected a header"),
    "open": ("csv", CSV + '"open,x\nb,y\n', "line 2: unexpected end of data; .*quotation marks"),
    "merged": ("csv", CSV + 'c,d\n"Hello, he said,x\nb,"y"\n', "line 3: ',' expected"),
    "after a blank": ("csv", CSV + 'x, "Hello" he said\n', "line 2: ',' expected after"),
    "after": ("csv", CSV + '"Hello" he said,x\n', "line 2: ',' expected after"),
    "escaped zero": ("jsonl", '{"source": "a\\u0000b", "target": "b"}', "line 1: 'source' has a zero character"),
    "twice": ("jsonl", '{"source": "a", "source": "b", "target": "c"}', "line 1: .* 'source' occurs twice"),
    "number": ("jsonl", '{"source": 3, "target": "b"}', "line 1: 'source' is 3; expected str"),
    "NaN": ("jsonl", '{"source": NaN, "target": "b"}', "line 1: 'source' is nan"),
}


def examples_of(root: Path, suffix: str, text: str, drop_empty: bool = False) -> tuple[list[tuple[str, str]], Split]:
    (root / f"test.{suffix}").write_bytes(text.encode())
    write(root / "train.jsonl", '{"source": "a", "target": "b"}')
    reader = Table()
    with Report().of("test") as report:
        reader.check(root, ("test",), "text")
        examples = reader.read(root, "test", "text", drop_empty)
    return [(example.source, example.target) for example in examples], report


@pytest.mark.parametrize(("suffix", "text", "expected"), AWKWARD.values(), ids=AWKWARD)
def test_an_awkward_table(suffix: str, text: str, expected: list[tuple[str, str]], tmp_path: Path) -> None:
    assert examples_of(tmp_path, suffix, text) == (expected, Split())


@pytest.mark.parametrize(("suffix", "text", "expected", "note"), NOTED.values(), ids=NOTED)
def test_what_a_table_does_not_say_clearly(
    suffix: str, text: str, expected: list[tuple[str, str]], note: str, tmp_path: Path
) -> None:
    examples, report = examples_of(tmp_path, suffix, text)
    assert examples == expected and [*report.noted] == [note] and report.missing == 0


@pytest.mark.parametrize("kind", ["csv", "tsv", "pairs", "text"])
def test_what_is_noted_of_a_row_counts_for_the_split_that_has_it(kind: str, tmp_path: Path) -> None:
    """Of nine rows one for dev, one for test and one for training are not clear, and a blank line follows each."""
    rows = [f"s{i}\tt{i}" if i > 2 else f"s{i}\ra\tt{i}" for i in range(9)]
    if kind == "csv":
        rows = ['"{}","{}"'.format(*row.replace("\r", "\n").split("\t")) for row in rows]
    if kind == "pairs":
        write(tmp_path / "a.en", *(row.split("\t")[0] for row in rows))
        write(tmp_path / "a.de", *rows)
    elif kind == "text":
        write(tmp_path / "a.txt", *rows)
    else:
        write(tmp_path / f"a.{kind}", {"csv": CSV, "tsv": TSV}[kind], *(f"{row}\n" for row in rows))
    reader = Parallel(hold_out=4) if kind == "pairs" else Table(hold_out=4)
    for part in ("train", "dev", "test"):
        with Report().of(part) as report:
            if kind == "text":
                report.used = len([*TextFiles(hold_out=4).texts(tmp_path, {"dev": "validation"}.get(part, part))])  # type: ignore[arg-type]
            else:
                report.used = len(reader.read(tmp_path, part, "text", False))
        counts = {reason.split(",")[0]: note.count for reason, note in report.noted.items()}
        blank = counts.pop("blank line", report.used)
        assert list(counts.values()) == [2 if kind == "pairs" else 1]
        assert report.missing == 0 and abs(blank - report.used) <= 1


@pytest.mark.parametrize(("suffix", "text", "message"), REFUSED.values(), ids=REFUSED)
def test_a_broken_table(suffix: str, text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"test\.{suffix} {message}|test\.{suffix}: {message}"):
        examples_of(tmp_path, suffix, text)


EMPTY = [("", "b"), ("a", ""), (None, "b"), ("a", None), ("a", "b"), (" \t", "b"), ("a", "\u3000")]


def test_sources_and_targets_without_text_are_refused_by_one_key(tmp_path: Path) -> None:
    rows = [json.dumps({"source": source, "target": target}) for source, target in EMPTY]
    text = "\n".join([*rows, '{"source": "a"}', '{"target": "b"}'])
    with pytest.raises(DataError, match=r"test.jsonl line 1: empty text \(and 7 more\); task.data.drop_empty=true"):
        examples_of(tmp_path, "jsonl", text)
    examples, _ = examples_of(tmp_path, "jsonl", text, drop_empty=True)
    assert len(examples) == 9 and [x for x in examples if all(x)] == [("a", "b")]

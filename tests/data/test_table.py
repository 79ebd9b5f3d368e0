"""Data of one's own: tables with named columns, folders of recordings, text files."""

import json
from pathlib import Path

import pytest

from attnlab.config.check import check_present, compose
from attnlab.data import Table, TextFiles
from attnlab.data.corpus import Segment
from attnlab.errors import ConfigError, DataError
from tests.data.layouts import RATE, audio, write


def write_table(path: Path, examples: list[dict[str, str]]) -> None:
    if path.suffix == ".jsonl":
        write(path, *map(json.dumps, examples))
        return
    sign = "\t" if path.suffix == ".tsv" else ","
    write(path, sign.join(examples[0]), *(sign.join(f'"{x}"' for x in example.values()) for example in examples))


def pairs(count: int, first: int = 0) -> list[dict[str, str]]:
    numbers = range(first, first + count)
    return [{"article": f"text  {i}, long", "headline": f"title {i}", "key": f"k{i}"} for i in numbers]


def split(reader: Table, root: Path, name: str) -> list[str]:
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


def test_what_is_wrong_with_a_folder(tmp_path: Path) -> None:
    write_table(tmp_path / "train.jsonl", pairs(3))
    with pytest.raises(DataError, match="train.jsonl line 1: 'nope' is missing"):
        split(Table("article", "headline", id="nope"), tmp_path, "train")
    audio(tmp_path / "spoken" / "a.wav")
    with pytest.raises(DataError, match=r"a.txt is missing: the text of a.wav"):
        split(Table("text", "text", "audio"), tmp_path / "spoken", "train")
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
    with pytest.raises(DataError, match=r"wav: no text file; data_root must hold .txt files"):
        corpus.files(tmp_path / "wav", "train")

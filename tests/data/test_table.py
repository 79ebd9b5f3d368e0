"""Data of one's own: tables with named columns, folders of recordings, text files."""

import json
from pathlib import Path

import pytest

from attnlab.config.check import check_present, compose
from attnlab.data import Table, TextFiles
from attnlab.data.corpus import Segment
from attnlab.data.report import Report, Split
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


TSV, CSV = "source\ttarget\n", "source,target\n"
AWKWARD = {  # a test set and its examples
    "marks": ("tsv", TSV + '5" pipe\tx\n"open\ty\nz\tend"\n', [('5" pipe', "x"), ('"open', "y"), ("z", 'end"')]),
    "windows": ("tsv", "\ufeff" + TSV.replace("\n", "\r\n") + "a\tb\r\nc\td\r\n", [("a", "b"), ("c", "d")]),
    "other line ends": ("tsv", TSV + "a\u2028b\tc\u0085d\n", [("a b", "c d")]),
    "blank end": ("tsv", TSV + "a\tb\n\n\n", [("a", "b")]),
    "no end": ("tsv", TSV + "a\tb", [("a", "b")]),
    "quoted": ("csv", CSV + '5" pipe,x\n"a ""b"", c",y\n', [('5" pipe', "x"), ('a "b", c', "y")]),
    "carriage returns": ("csv", "source,target\ra,b\r", [("a", "b")]),
    "long": ("csv", f'{CSV}"{"x, " * 99999}",y\n', [(("x, " * 99999).strip(), "y")]),
}  # fmt: skip
NOTED = {  # a test set, its examples, and what the report says
    "marks": ("tsv", TSV + '"a ""b"""\t"c"\n', [('"a ""b"""', '"c"')], "text in quotation marks, which are part of it"),
    "mac": ("tsv", TSV + "a\rb\tc\n", [("a b", "c")], "carriage return inside a line, read as white space"),
    "lines": ("csv", CSV + '"a\nb",c\n', [("a b", "c")], "row of several lines, whose texts are joined"),
    "blank": ("tsv", TSV + "a\tb\n\nc\td\n", [("a", "b"), ("c", "d")], "blank line"),
    "blank csv": ("csv", CSV + "\na,b\n\n", [("a", "b")], "blank line"),
}
REFUSED = {  # a test set, and its error
    "line end": ("tsv", TSV + '"a\nb"\tc\n', "line 2: expected 2 columns as in the header, not 1.*csv or .jsonl"),
    "tab": ("tsv", TSV + "a\tb\tc\n", "line 2: expected 2 columns as in the header, not 3"),
    "zero": ("tsv", TSV + "a\tb\na\0b\tc\n", "line 3: a zero byte"),
    "UTF-16": ("tsv", (TSV + "a\tb\n").encode("utf-16-le").decode(), "line 1: a zero byte.*UTF-16"),
    "blank header": ("tsv", "\n" + TSV, "a blank first line; expected a header"),
    "open": ("csv", CSV + '"open,x\nb,y\n', "line 2: unexpected end of data; .*quotation marks"),
    "merged": ("csv", CSV + 'c,d\n"Hello, he said,x\nb,"y"\n', "line 3: ',' expected"),
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
    assert examples == expected and [*report.left_out, *report.noted] == [note]


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

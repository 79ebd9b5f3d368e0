"""What `input=` names: every wrong input is one line, before anything is computed."""

import json
from pathlib import Path

import pytest

from attnlab.data.inputs import InputKind, Inputs
from attnlab.errors import DataError

TEXT = InputKind("text", (), ("text", "source"))


def check(path: Path) -> None:
    if path.read_text() != "good":
        raise DataError(f"{path}: not a readable audio file")


SPEECH = InputKind("audio file", (".wav", ".flac"), ("audio", "path"), check)


def values_of(source: str | Path, kind: InputKind) -> list[str]:
    inputs = Inputs(source, kind)
    values = [item.value for item in inputs]
    assert len(inputs) == len(values)
    return values


def test_texts(tmp_path: Path) -> None:
    assert values_of("Guten Tag, Welt.", TEXT) == ["Guten Tag, Welt."]
    assert values_of("see a.txt or b.jsonl", TEXT) == ["see a.txt or b.jsonl"]
    assert values_of("x" * 5000, TEXT) == ["x" * 5000]
    file = tmp_path / "lines.txt"
    file.write_text("\ufeffone\n two \nthree", encoding="utf-8")
    assert values_of(str(file), TEXT) == values_of(file, TEXT) == ["one", " two ", "three"]
    rows = [{"id": 1, "source": "a\nb"}, {"text": "c", "source": "d"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    inputs = Inputs(tmp_path / "rows.jsonl", TEXT)
    assert inputs.form == "objects"
    assert [(item.value, item.fields) for item in inputs] == [("a\nb", rows[0]), ("c", rows[1])]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.csv", 'n,text\n1,"x, y"\n2,z\n', ["x, y", "z"]),
        ("a.CSV", 'text\nx\n"y\nz"\n', ["x", "y\nz"]),
        ("a.tsv", "source\tn\nx, y\t1\n\n", ["x, y"]),
        ("a.json", '[\n {"text": "a"},\n {"text": "b"}\n]', ["a", "b"]),
        ("a.json", '{"text": "a",\n"n": 1}', ["a"]),
        ("a.ndjson", '{"text": "a"}\n{"text": "b"}', ["a", "b"]),
        ("a.md", "# A\nb,c\n", ["# A", "b,c"]),
    ],
)
def test_rows_of_a_table_are_inputs(tmp_path: Path, name: str, content: str, expected: list[str]) -> None:
    (tmp_path / name).write_text(content)
    assert values_of(tmp_path / name, TEXT) == expected


def test_files(tmp_path: Path) -> None:
    for name in ("b.wav", "a.FLAC", "deep/c.wav", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("good")
    assert values_of(tmp_path, SPEECH) == [str(tmp_path / name) for name in ("a.FLAC", "b.wav", "deep/c.wav")]
    assert values_of(tmp_path / "b.wav", SPEECH) == [str(tmp_path / "b.wav")]
    (tmp_path / "deep" / "rows.jsonl").write_text('{"audio": "c.wav", "n": 1}')
    assert values_of(tmp_path / "deep" / "rows.jsonl", SPEECH) == [str(tmp_path / "deep" / "c.wav")]
    (tmp_path / "deep" / "c.wav").write_text("bad")
    with pytest.raises(DataError, match=r"c\.wav: not a readable audio file"):
        Inputs(tmp_path, SPEECH)


@pytest.mark.parametrize(
    ("name", "content", "kind", "told"),
    [
        ("gone.txt", None, TEXT, "gone.txt: no such file"),
        ("a.csv", b"x, y\n1,2\n", TEXT, r"line 2: 'text' is missing \(found: x, +y\)"),
        ("a.json", b'["a", "b"]', TEXT, "item 1: expected a JSON object, not str"),
        ("a.tsv", b"text\tn\na\n", TEXT, "line 2: expected 2 columns"),
        ("a.jsonl.gz", b"", TEXT, "a .gz table; unpack it, or convert it to a .jsonl file"),
        ("a.csv.ZIP", b"", TEXT, "a .zip table; unpack it"),
        ("a.parquet", b"", TEXT, "a .parquet table; unpack it, or convert"),
        ("gone", None, TEXT, "no such file; if it is a text, give"),
        ("gone.wav", None, SPEECH, "gone.wav: no such file"),
        ("empty.txt", b"", TEXT, "empty.txt: an empty file; expected a text"),
        ("key.jsonl", b'{"txt": "a"}\n', TEXT, r"line 1: 'text' is missing \(found: txt\)"),
        ("half.jsonl", b'{"text": "a\\ud800"}\n', TEXT, "line 1: invalid Unicode"),
        ("away.jsonl", b'{"audio": "x.wav"}\n', SPEECH, r"line 1: .*x\.wav: no such file"),
        ("", b"", SPEECH, "no audio file in this folder; expected .wav, .flac"),
        ("", b"", TEXT, "a folder; expected a text, a .txt file or a .jsonl file"),
    ],
)
def test_wrong_inputs(tmp_path: Path, name: str, content: bytes | None, kind: InputKind, told: str) -> None:
    if name and content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=told) as caught:
        Inputs(str(tmp_path / name), kind)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "told"),
    [(" ", "input= is empty; expected a text"), ("a\udcff", "not UTF-8 text"), ("a.csv", "no such file; if")],
)
def test_what_is_no_text(source: str, told: str) -> None:
    with pytest.raises(DataError, match=told):
        Inputs(source, TEXT)

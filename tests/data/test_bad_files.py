"""Files of a corpus or of the cache that are not what they should be: one line that names the file and its line."""

from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from attnlab.data.corpus import read_json, read_lines, read_text, rows
from attnlab.data.text.corpora import FineWebEdu, parquet_texts
from attnlab.data.text.pairs import SPLIT_FILE
from attnlab.errors import DataError
from tests.data.layouts import LAYOUTS, prompt, read

DEEP = "[" * 100_000


def refused(act: Callable[[], object], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        act()
    assert "\n" not in str(caught.value)


WORDS, TURNS = "words/ES2002a.B.words.xml", "segments/ES2002a.B.segments.xml"
AUDIO, MEETINGS = "ES2002a/audio/ES2002a.Headset-1.wav", "corpusResources/meetings.xml"
SPOKEN, AN4_TEXT, PAIR = "dataset/slurp/train.jsonl", "etc/an4_train.transcription", '"source": "a", "target": '
YAML, GERMAN, WAV = (f"en-de/data/train/{name}" for name in ("txt/train.yaml", "txt/train.de", "wav/ted_2.wav"))
TIMES = "train.yaml line 2: expected wav, offset and duration"

Change = None | str | bytes | tuple[str, str]


@pytest.mark.parametrize(
    ("layout", "file", "change", "message"),
    [  # change: (old, new) text, the file's new content, or None: the file is removed
        ("ami", WORDS, ('"0.8"', '"x"'), r"B\.words\.xml: expected .*starttime=.*'x'"),
        ("ami", TURNS, ('"3.5"', '"1.5"'), r"segments\.xml: expected .*segment 2 is from 2.5 to 1.5 s"),
        ("ami", TURNS, ('"5.0"', '"9.0"'), r"segments\.xml: a segment from 4\.000 to 9\.000 s"),
        ("ami", MEETINGS, ("ES2002a", "ES2002b"), r"meetings\.xml: no meeting ES2002a, which train needs"),
        ("kaldi", "train/text", "b ONE\nc TWO\n", "text line 2: c has no line in wav.scp"),
        ("kaldi", "train/text", "b ONE\nb ONE\n", "text line 2: expected one line for each id, not 'b ONE'"),
        ("kaldi", "train/wav.scp", "a sph2pipe a.sph |\nb b.wav\n", "wav.scp line 1: commands are not run"),
        ("kaldi", "train/wav.scp", "a a.wav\nb |cat b.wav\n", "wav.scp line 2: commands are not run"),
        ("kaldi", "train/wav.scp", "a wav.ark:12\nb b.wav\n", "wav.scp line 1: archives are not read"),
        ("kaldi", "train/segments", "a a 0 0.5\nb b 0.2 -2\n", "segments line 2: expected '<id> <recording"),
        ("kaldi", "train/segments", "a a 0 0.5\nb b 2.5 -1\n", "line 2: a segment from 2.500 to 2.000 s"),
        ("kaldi", "train/wav.scp", "a nowhere.wav\nb b.wav\n", "nowhere.wav: missing .* named in .*wav.scp line 1"),
        ("kaldi", "train/segments", "a a 0 0.5\nb b 1 0.5\n", "segments line 2: expected '<id> <recording"),
        ("kaldi", "train/segments", "a a 0 0.5\nb b 0.2 2.5\n", "line 2: a segment from 0.200 to 2.500 s"),
        ("an4", AN4_TEXT, "YES (u1-aa-b)\nNO (u3-bb-b)\n", r"an4_train.transcription line 2: .*'WORDS \(u2-bb-b\)'"),
        ("an4", AN4_TEXT, "YES (u1-aa-b)\n", "an4_train.transcription has 1 lines; expected 2 as in an4_train.fileids"),
        ("an4", "wav/bb/u2-bb-b.sph", None, "u2-bb-b.sph: missing recording, named in .*line 2"),
        ("slurp", SPOKEN, prompt(1, "a", "audio-12.flac") + '\n{"slurp_id": ', "train.jsonl line 2: malformed JSON"),
        ("slurp", SPOKEN, prompt(1, "a", "audio-99.flac"), "audio-99.flac: missing .*named in .*train.jsonl line 1"),
        ("slurp", SPOKEN, prompt(1, "a", "audio-12.flac", scenario=" "), "line 1: empty scenario; expected the class"),
        ("picovoice", "label.json", "{}", r"label\.json: expected .*slot coffeeDrink of a.wav"),
        ("mustc", YAML, ("offset: 100.2", "offset: 101.2"), "train.yaml line 1: a segment from 101.200 to 102.700 s"),
        *(("mustc", YAML, (old, new), TIMES) for old, new in (
            ("offset: 9.5", "offset: -9.5"), ("duration: 0.9", "duration: nan"), ("offset: 9.500000, ", ""))),
        ("mustc", YAML, ("wav: ted_1.wav", "wav: ted_9.wav"), "ted_9.wav: missing recording, named in .*line 1"),
        ("mustc", YAML, ("offset: 9.500000", "offset: [9, 5]"), TIMES),
        ("mustc", YAML, "[" * 100_000, "train.yaml: expected a YAML list of segments"),
        ("mustc", YAML, "- &a [*a]\n", r"train.yaml: expected a YAML list of segments.*\(line 1\)"),
        *(("mustc", YAML, f"- {{offset: &a 1, wav: b}}\n- {{{fields}}}\n", r"train.yaml: .*line 2: a reference, \*a")
          for fields in ("offset: *a", "<<: *a")),
        *(("mustc", YAML, f"- {{offset: 0, wav: {wav}, duration: 1, offset: 5}}\n", "line 1: .*'offset' occurs twice")
          for wav in ("ted_1.wav", "'ted_1.wav'")),
        ("mustc", YAML, "- !!python/object/apply:os.system [exit]\n", "train.yaml: expected a YAML list of segments"),
        ("mustc", GERMAN, ("zwei eins\n", "  \n"), "train.de line 3: empty text.*drop_empty"),
        ("mustc", GERMAN, None, "train.de is missing"),
        ("mustc", GERMAN, b"eins\nzw\xe4i\n", "train.de line 2: invalid continuation byte; expected UTF-8"),
        ("mustc", WAV, b"RIFF of something else", "ted_2.wav: expected a recording, named in .*train.yaml line 3"),
        ("xsum original", SPLIT_FILE, '{"train": {"a": 1}}', f"{SPLIT_FILE} line 1: 'train' is .*; expected list"),
        ("xsum original", "bbc-summary-data/7.summary", ("Line one.\n\nShare this with\nLine two.", ""), "7.summary"),
        ("xsum records", "train.json", '{"document": "a",\n"summary": 3}', "train.json line 1: 'summary'"),
        ("xsum pairs", "train.raw.target", "a\nb\n", "train.raw.source has 1 lines, train.raw.target 2"),
        ("xsum pairs", "train.raw.target", None, "train.raw.target is missing"),
        ("plain text", "train.de", None, r"train\.de is missing"),
        ("table", "train.jsonl", '{"source": "a"}\n', "train.jsonl: the column 'target' is missing .*reader.target"),
        ("table", "train.jsonl", f'{{{PAIR}"b"}}\n{{bad\n', "train.jsonl line 2: malformed JSON"),
        ("table", "train.jsonl", f'{{{PAIR}"\\ud800"}}\n', "train.jsonl line 1: invalid Unicode: lone surrogate"),
        ("table", "train.csv", "", "train.csv: an empty file; expected a header"),
        ("table", "train.csv", "source,target\na\n", "train.csv line 2: expected 2 columns"),
        ("table", "train.csv", "source,target,source\na,b,c\n", "train.csv: the header has the column 'source' twice"),
        ("table", "other.csv", "source,target\n", "other.csv: no examples; data_root must hold train, dev and test"),
    ],
)  # fmt: skip
def test_a_wrong_file_of_a_corpus(layout: str, file: str, change: Change, message: str, tmp_path: Path) -> None:
    build, reader, kind = LAYOUTS[layout]
    build(tmp_path)
    path = tmp_path / file
    if isinstance(change, tuple):
        text = path.read_text()
        assert change[0] in text
        change = text.replace(*change, 1)
    if change is None:
        path.unlink()
    elif isinstance(change, bytes):
        path.write_bytes(change)
    else:
        path.write_text(change)
    refused(lambda: read(reader(), tmp_path, "train", kind), message)


def test_a_parquet_file_that_is_none_or_has_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 nothing")
    refused(lambda: list(FineWebEdu().texts(tmp_path, "train")), r"a.parquet: expected a Parquet file")
    parquet.write_table(pyarrow.table({"content": ["a"]}), path)
    refused(lambda: list(FineWebEdu().texts(tmp_path, "train")), r"a.parquet: no column text \(found: content\)")
    refused(lambda: FineWebEdu().files(tmp_path / "nowhere", "train"), "nowhere: cannot be read")
    parquet.write_table(pyarrow.table({"text": [1, 2]}), path)
    refused(lambda: list(parquet_texts(path)), r"a\.parquet: the column `text` holds int; expected str")
    parquet.write_table(pyarrow.table({"text": ["one", None]}), path)
    assert list(parquet_texts(path)) == ["one", ""]


def test_a_directory_and_a_byte_order_mark(tmp_path: Path) -> None:
    refused(lambda: read_text(tmp_path), "a directory; expected a text file")
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\ntwo \xef\xbb\xbf\n")
    assert list(read_lines(tmp_path / "a.txt")) == ["one", "two \ufeff"]


def test_json_objects_of_several_lines(tmp_path: Path) -> None:
    path, text = tmp_path / "x.json", '{\n"a": 1\n} {\n"a": 2}\n\n{"a": 3}\n'
    path.write_text(text)
    assert [(row.number, row.values) for row in rows(path)] == [(1, {"a": 1}), (3, {"a": 2}), (6, {"a": 3})]
    path.write_text('[{"a": 1}, {"a": 2}]')
    assert [row.where for row in rows(path)] == [f"{path} item 1", f"{path} item 2"]
    for wrong, message in (
        (text + '{"a": 3\n', "line 7: malformed JSON"),
        ("3\n", "line 1: expected a JSON object, not int"),
        ('{"a": ' + DEEP, "line 1: malformed JSON"),
    ):
        path.write_text(wrong)
        refused(lambda: list(rows(path)), f"x.json {message}")
    refused(lambda: read_json(path), "x.json line 1: malformed JSON")

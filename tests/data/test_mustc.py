"""MuST-C's layout, and what is wrong with it: each error is one line with file and line."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import soundfile
import yaml

from attnlab.data.corpus import Segment
from attnlab.data.speech.mustc import MustC
from attnlab.errors import DataError
from tests.data.conftest import RATE, SEGMENTS, write_corpus

Edit = Callable[[str, str, str], Path]


def read(root: Path, split: str = "train", drop_empty: bool = False, **options: str) -> list[Segment]:
    return MustC(**options).read(root, split, "audio", drop_empty)  # type: ignore[arg-type]


def refused(act: Callable[[], object], *expected: str) -> None:
    with pytest.raises(DataError) as error:
        act()
    assert "\n" not in str(error.value)
    assert all(text in str(error.value) for text in expected), str(error.value)


@pytest.mark.parametrize("version", [1, 2])
def test_reads_both_published_forms(tmp_path: Path, version: int) -> None:
    segments = read(write_corpus(tmp_path, ("train",), version))
    ids = ["ted_1_2", "ted_1_0", "ted_2_0", "ted_1_1", "ted_2_1"]  # numerically: 9.5 < 100.2
    assert [s.id for s in segments] == ids
    assert [(s.source, s.target) for s in segments] == [s[3:] for s in SEGMENTS]
    assert [s.audio.name for s in segments] == [s[0] for s in SEGMENTS]
    assert [(s.start, s.num_samples) for s in segments] == [(int(s[1] * RATE), int(s[2] * RATE)) for s in SEGMENTS]
    assert {s.rate for s in segments} == {RATE}


def test_any_yaml_of_the_same_content_reads_the_same(corpus: Path) -> None:
    plain = read(corpus)
    path = corpus / "en-de/data/train/txt/train.yaml"
    items = yaml.load(path.read_text(), yaml.BaseLoader)
    path.write_text("# comment\n" + yaml.safe_dump(items, default_flow_style=False))
    assert read(corpus) == plain
    path.write_text(yaml.safe_dump(items, default_flow_style=True, width=10**9))  # one line, quoted strings
    assert read(corpus) == plain


def test_ids_do_not_depend_on_the_order_of_lines(corpus: Path) -> None:
    before = {s.id: (s.start, s.target) for s in read(corpus)}
    for name in ("yaml", "en", "de"):
        path = corpus / f"en-de/data/train/txt/train.{name}"
        path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    assert {s.id: (s.start, s.target) for s in read(corpus)} == before


def test_text_lines_end_at_newlines_only_and_begin_without_a_mark(corpus: Path, edit: Edit) -> None:
    path = edit("train.de", "sieben drei\n", "sieben\u2028drei\x85\r\n")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read(corpus)[0].target == "sieben\u2028drei"


def test_flac_and_other_rates(corpus: Path, edit: Edit) -> None:
    wav = corpus / "en-de/data/train/wav/ted_2.wav"
    samples, _ = soundfile.read(wav)
    soundfile.write(wav.with_suffix(".flac"), samples, 4000)  # the same samples, twice as long
    edit("train.yaml", "ted_2.wav", "ted_2.flac")
    assert (read(corpus)[2].rate, read(corpus)[2].num_samples) == (4000, int(1.1 * 4000))
    assert len({s.id for s in read(corpus)}) == 5  # one stem, two recordings


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("offset: 100.2", "offset: 101.2", "line 1: a segment from 101.200 to 102.700 s; expected a part of the 102.0"),
        ("offset: 100.2", "offset: 500.2", "line 1: a segment from 500.2"),
        ("offset: 100.200000", "offset: 100.511000", "line 1: a segment from 100.511 to 102.011 s"),
        ("1.500000, offset: 100.200000", "0.005000, offset: 102.000000", "line 1: a segment from 102.000 to 102.005"),
        ("duration: 0.9", "duration: 0.000019", "line 2: a segment from 9.500 to 9.500"),
        ("offset: 9.5", "offset: -9.5", "line 2: expected wav, offset and duration in seconds, found duration: 0.9"),
        ("duration: 0.9", "duration: 0.0", "line 2: expected wav, offset and duration in seconds"),
        ("duration: 0.9", "duration: nan", "line 2: expected wav, offset and duration in seconds"),
        ("offset: 9.500000", "offset: inf", "line 2: expected wav, offset and duration in seconds"),
        ("offset: 9.500000", "offset: soon", "line 2: expected wav, offset and duration in seconds"),
        ("offset: 9.500000, ", "", "line 2: expected wav, offset and duration in seconds"),
        ("wav: ted_1.wav", "wav: ted_9.wav", "ted_9.wav: missing recording, named in"),
        ("offset: 9.500000", "offset: [9, 5]", "line 2: expected plain 'key: value' pairs"),
        ("offset: 9.500000", "offset: 9: 5", "line 2: malformed YAML"),
        ("- {duration: 0.9", "- {{duration: 0.9", "line 3: malformed YAML"),
        ("- {duration: 0.900000, ", "- text # {", "line 2: expected a mapping"),
        ("- {duration: 1.5", "a: {duration: 1.5", "malformed YAML"),
    ],
)
def test_broken_yaml_is_one_line_with_its_place(corpus: Path, edit: Edit, old: str, new: str, expected: str) -> None:
    edit("train.yaml", old, new)
    refused(lambda: read(corpus), "train.yaml", expected)


def test_a_segment_may_end_a_frame_late_and_is_cut(corpus: Path, edit: Edit) -> None:
    edit("train.yaml", "offset: 100.200000", "offset: 100.509000")
    segment = read(corpus)[0]
    assert segment.start + segment.num_samples == 102 * RATE


@pytest.mark.parametrize(
    ("content", "expected"), [("", "0 segments"), ("a: 1\n", "expected a list"), ("\x00", "line 1: a zero byte")]
)
def test_yaml_that_is_no_list(corpus: Path, content: str, expected: str) -> None:
    (corpus / "en-de/data/train/txt/train.yaml").write_text(content)
    refused(lambda: read(corpus), expected)


def test_texts_that_do_not_fit(corpus: Path, edit: Edit) -> None:
    edit("train.de", "zwei eins\n", "  \n")
    refused(lambda: read(corpus), "train.de line 3: empty text")
    assert read(corpus, target="transcript")[2].target == "two one"
    edit("train.en", "one\n", "\n")
    refused(lambda: read(corpus, target="transcript"), "train.en line 2: empty text")
    assert len(read(corpus, drop_empty=True)) == 5
    path = edit("train.de", "drei\n", "")
    refused(lambda: read(corpus), "train.yaml: 5 segments", "5 lines of train.en", "4 lines of train.de")
    path.write_bytes(path.read_bytes().replace(b"zwei", b"zw\xe4i", 1))
    refused(lambda: read(corpus), "train.de line 4: invalid continuation byte; expected UTF-8")


def test_damaged_audio(corpus: Path) -> None:
    wav = corpus / "en-de/data/train/wav/ted_2.wav"
    wav.write_bytes(wav.read_bytes()[:20000])
    refused(lambda: read(corpus), "train.yaml line 5: a segment from 1.250 to 3.250 s; expected a part of the 1.2")
    wav.write_bytes(b"RIFF of something else")
    refused(lambda: read(corpus), "ted_2.wav: expected a recording, named in", "train.yaml line 3")


@pytest.mark.parametrize(
    ("root", "expected"),
    [
        ("nowhere", ("nowhere: no such directory", "must be the directory that holds en-de")),
        ("en-de/data/train/txt/train.de", ("is a file",)),
        ("en-de", ("; set data_root={corpus};",)),
        ("en-de/data/train/wav", ("; set data_root={corpus};",)),
        ("..", ("; set data_root={corpus};",)),
    ],
)
def test_a_wrong_root_names_the_right_one(corpus: Path, root: str, expected: tuple[str, ...]) -> None:
    reader = MustC()
    texts = [text.format(corpus=corpus) for text in expected]
    refused(lambda: reader.check(corpus / root, reader.splits, "audio"), *texts)


@pytest.mark.parametrize("part", ["dev/txt/dev.de", "train/txt/train.yaml", "tst-COMMON/wav", "dev"])
def test_a_part_is_missing(corpus: Path, part: str) -> None:
    reader, path = MustC(), corpus / "en-de/data" / part
    reader.check(corpus, reader.splits, "audio")
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    refused(lambda: reader.check(corpus, reader.splits, "audio"), str(path), "is missing")


def test_real_recorded_speech(corpora: Path) -> None:
    segments = read(corpora / "st_digits_en_de", "tst-COMMON")
    assert len(segments) == 240
    assert segments[0].source == "seven three four"
    assert re.fullmatch(r"ted_301_\d+", segments[0].id)
    assert len({s.id for s in segments}) == 240

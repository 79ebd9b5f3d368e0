import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import soundfile
import yaml

from attnlab.data.speech import mustc
from attnlab.data.speech.mustc import check_layout, read_split
from attnlab.errors import DataError
from tests.data.conftest import RATE, SEGMENTS, write_corpus

SPLITS = ("train", "dev", "tst-COMMON")
Edit = Callable[[str, str, str], Path]


def read(root: Path, split: str = "train", **options: str | None) -> list[mustc.Segment]:
    return read_split(root, split, "en", "de", **options)


def line_of(error: pytest.ExceptionInfo[DataError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("version", [1, 2])
def test_reads_both_published_forms(tmp_path: Path, version: int) -> None:
    segments = read(write_corpus(tmp_path, ("train",), version))
    assert [s.id for s in segments] == [
        "ted_1_2",
        "ted_1_0",
        "ted_2_0",
        "ted_1_1",
        "ted_2_1",
    ]  # numerically: 9.5 < 100.2
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


def test_text_lines_end_at_newlines_only(corpus: Path, edit: Edit) -> None:
    edit("train.de", "sieben drei\n", "sieben\u2028drei\x85\r\n")
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
        (
            "offset: 100.2",
            "offset: 101.2",
            "train.yaml line 1: the segment ends at 102.700 s, but ted_1.wav is 102.000",
        ),
        ("offset: 100.2", "offset: 500.2", "train.yaml line 1: the segment ends"),
        ("offset: 9.5", "offset: -9.5", "train.yaml line 2: negative offset -9.5"),
        ("duration: 0.9", "duration: 0.0", "train.yaml line 2: duration 0.000000 is not positive"),
        ("duration: 0.9", "duration: -0.9", "train.yaml line 2: duration -0.900000 is not positive"),
        ("duration: 0.9", "duration: 0.000019", "line 2: duration 1.9"),
        ("duration: 0.9", "duration: nan", "train.yaml line 2: duration is 'nan00000', not a number"),
        ("offset: 9.500000", "offset: inf", "train.yaml line 2: offset is 'inf', not a number"),
        ("offset: 9.500000", "offset: soon", "train.yaml line 2: offset is 'soon', not a number"),
        ("offset: 9.500000, ", "", "train.yaml line 2: no key 'offset' (found: duration, speaker_id, wav)"),
        ("wav: ted_1.wav", "wav: ted_9.wav", "ted_9.wav: missing recording, named in"),
        ("offset: 9.500000", "offset: [9, 5]", "train.yaml line 2: expected plain 'key: value' pairs"),
        ("offset: 9.500000", "offset: 9: 5", "train.yaml line 2: malformed YAML"),
        ("- {duration: 0.9", "- {{duration: 0.9", "train.yaml line 3: malformed YAML"),
        ("- {duration: 0.9", "  {duration: 0.9", "train.yaml line 2: malformed YAML"),
        ("- {duration: 0.900000, ", "- text # {", "train.yaml line 2: expected a mapping"),
        ("- {duration: 1.5", "a: {duration: 1.5", "malformed YAML"),
    ],
)
def test_broken_yaml_is_one_line_with_its_place(corpus: Path, edit: Edit, old: str, new: str, expected: str) -> None:
    edit("train.yaml", old, new)
    with pytest.raises(DataError) as error:
        read(corpus)
    assert expected in line_of(error)


def test_a_segment_may_end_a_frame_late_and_is_cut(corpus: Path, edit: Edit) -> None:
    edit("train.yaml", "offset: 100.200000", "offset: 100.509000")
    segment = read(corpus)[0]
    assert segment.start + segment.num_samples == 102 * RATE
    edit("train.yaml", "offset: 100.509000", "offset: 100.511000")
    with pytest.raises(DataError, match="line 1: the segment ends at 102.011 s"):
        read(corpus)


def test_a_segment_that_begins_at_the_end_is_refused_however_short(corpus: Path, edit: Edit) -> None:
    edit("train.yaml", "duration: 1.500000, offset: 100.200000", "duration: 0.005000, offset: 102.000000")
    with pytest.raises(DataError, match="line 1: the segment ends at 102.005 s"):
        read(corpus)


def test_unequal_counts_name_all_three(corpus: Path, edit: Edit) -> None:
    edit("train.de", "drei\n", "")
    with pytest.raises(DataError, match=r"train.yaml has 5 segments, train.en 5 lines, train.de 4 lines"):
        read(corpus)


@pytest.mark.parametrize(
    ("content", "expected"), [("", "0 segments"), ("a: 1\n", "expected a list"), ("\x00", "line 1: a zero byte")]
)
def test_yaml_that_is_no_list(corpus: Path, content: str, expected: str) -> None:
    (corpus / "en-de/data/train/txt/train.yaml").write_text(content)
    with pytest.raises(DataError, match=expected) as error:
        read(corpus)
    line_of(error)


def test_empty_text_names_file_and_line(corpus: Path, edit: Edit) -> None:
    edit("train.de", "zwei eins\n", "  \n")
    with pytest.raises(DataError, match=r"train\.de line 3: empty text"):
        read(corpus)
    assert read(corpus, required="source")[2].target == ""
    edit("train.en", "one\n", "\n")
    with pytest.raises(DataError, match=r"train\.en line 2: empty text"):
        read(corpus, required="source")
    assert len(read(corpus, required=None)) == 5


def test_a_byte_order_mark_is_no_text(corpus: Path) -> None:
    path = corpus / "en-de/data/train/txt/train.de"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert not read(corpus)[0].target.startswith("\ufeff")


def test_text_that_is_not_utf8(corpus: Path) -> None:
    path = corpus / "en-de/data/train/txt/train.de"
    path.write_bytes(path.read_bytes().replace(b"zwei", b"zw\xe4i", 1))
    with pytest.raises(DataError, match=r"train\.de line 3: not UTF-8"):
        read(corpus)


def test_unreadable_audio(corpus: Path) -> None:
    wav = corpus / "en-de/data/train/wav/ted_2.wav"
    wav.write_bytes(b"RIFF of something else")
    with pytest.raises(DataError, match=r"ted_2\.wav: unreadable audio .*named in .*train\.yaml line 3") as error:
        read(corpus)
    line_of(error)


def test_a_truncated_recording_is_refused_by_its_header(corpus: Path) -> None:
    wav = corpus / "en-de/data/train/wav/ted_2.wav"
    wav.write_bytes(wav.read_bytes()[:20000])
    with pytest.raises(DataError, match=r"train\.yaml line 5: the segment ends at 3.250 s, but ted_2.wav is 1.2"):
        read(corpus)


class TestLayout:
    def refuse(self, root: Path, *expected: str) -> None:
        with pytest.raises(DataError) as error:
            check_layout(root, SPLITS, "en", "de")
        for text in expected:
            assert text in line_of(error)

    def test_complete(self, corpus: Path) -> None:
        check_layout(corpus, SPLITS, "en", "de")

    def test_missing(self, corpus: Path) -> None:
        self.refuse(
            corpus / "nowhere", f"{corpus}/nowhere: no such directory", "must be the directory that holds en-de"
        )

    def test_file(self, corpus: Path) -> None:
        self.refuse(corpus / "en-de/data/train/txt/train.de", "is a file")

    @pytest.mark.parametrize("inside", ["en-de", "en-de/data", "en-de/data/train/wav"])
    def test_too_deep(self, corpus: Path, inside: str) -> None:
        self.refuse(corpus / inside, f"is inside en-de; set data_root={corpus}")

    def test_too_high(self, corpus: Path) -> None:
        self.refuse(corpus.parent, f"does not hold en-de, but {corpus} does")

    def test_another_pair(self, corpus: Path) -> None:
        (corpus / "en-de").rename(corpus / "en-fr")
        self.refuse(corpus, f"{corpus / 'en-de'} is missing (found en-fr)")

    @pytest.mark.parametrize("part", ["dev/txt/dev.de", "train/txt/train.yaml", "tst-COMMON/wav", "dev"])
    def test_half_there(self, corpus: Path, part: str) -> None:
        path = corpus / "en-de/data" / part
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.refuse(corpus, "is incomplete", f"{path}", "and 3 more" if part == "dev" else "MuST-C")


def test_real_recorded_speech(corpora: Path) -> None:
    segments = read(corpora / "st_digits_en_de", "tst-COMMON")
    assert len(segments) == 240
    assert segments[0].source == "seven three four"
    assert re.fullmatch(r"ted_301_\d+", segments[0].id)
    assert len({s.id for s in segments}) == 240

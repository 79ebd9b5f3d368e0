"""MuST-C's layout, and what is wrong with it: each error is one line with file and line."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

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


def test_rounded_offsets_and_unusual_line_ends(corpus: Path, edit: Edit) -> None:
    edit("train.yaml", "offset: 100.200000", "offset: 100.509000")  # ends a frame late, and is cut
    path = edit("train.de", "sieben drei\n", "sieben\u2028drei\x85\r\n")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    segment = read(corpus)[0]
    assert (segment.start + segment.num_samples, segment.target) == (102 * RATE, "sieben\u2028drei")


def test_the_target_s_texts_alone_must_not_be_empty(corpus: Path, edit: Edit) -> None:
    edit("train.de", "zwei eins\n", "  \n")
    assert read(corpus, target="transcript")[2].target == "two one"
    edit("train.en", "one\n", "\n")
    refused(lambda: read(corpus, target="transcript"), "train.en line 2: empty text")
    assert len(read(corpus, drop_empty=True)) == 5


def test_real_recorded_speech(corpora: Path) -> None:
    segments = read(corpora / "st_digits_en_de", "tst-COMMON")
    assert len(segments) == 240
    assert segments[0].source == "seven three four"
    assert re.fullmatch(r"ted_301_\d+", segments[0].id)
    assert len({s.id for s in segments}) == 240

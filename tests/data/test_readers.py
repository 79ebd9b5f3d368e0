"""Readers of speech, summaries and parallel text in their published layouts, and errors."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import yaml

from attnlab.data import AMI, AN4, SLURP, Kaldi, MustC, Parallel, Picovoice, SciTLDR, XSum
from attnlab.data.corpus import Kind, Reader, Segment, Stored
from attnlab.data.report import Report
from attnlab.data.speech.ami import DEV, EVAL, MAX_WORDS
from attnlab.data.text import pairs
from attnlab.errors import DataError
from tests.data.conftest import SEGMENTS, Edit, write_corpus
from tests.data.layouts import LAYOUTS, RATE, an4, prompt, read, texts, word, write


@pytest.mark.parametrize("reader", [AMI(), Kaldi(), AN4(), SLURP(), Picovoice(), XSum(), SciTLDR(), Parallel()])
def test_a_wrong_root_is_an_error_with_the_expected_layout(reader: Reader, tmp_path: Path) -> None:
    kind, split = reader.kinds[0], reader.splits[0]
    with pytest.raises(DataError, match=r"data_root=.*nowhere: no such directory; data_root must hold"):
        reader.check(tmp_path / "nowhere", [split], kind)
    with pytest.raises(DataError, match="data_root must hold") as error:
        reader.check(tmp_path, [split], kind)
    assert "\n" not in str(error.value)
    if reader.name in ("Kaldi directories", "AN4"):
        with pytest.raises(DataError, match="no sample corpus in the layout of .*: set data_root"):
            reader.sample(tmp_path)


@pytest.fixture
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The corpus whose layout begins the name of the test."""
    LAYOUTS[request.node.name.split("_")[1]][0](tmp_path)
    return tmp_path


# --- AMI -----------------------------------------------------------------------------------------------------------


def test_ami_as_the_recipes_prepare_it(root: Path) -> None:
    with pytest.raises(DataError, match="stored features need Kaldi directories"):
        read(AMI(), root, "train", "stored")
    with Report().of("train") as report:
        segments = read(AMI(), root, "train", "audio")
    assert texts(segments) == ["MM-HMM THE L. C. D ON OFF", "IT'S"]
    assert {text: note.count for text, note in (report.left_out | report.noted).items()} == {
        "segment without words": 1,
        "word that no segment has in full": 1,
        "word without times, which no segment has": 1,
    }
    assert segments[0].id == "AMI_ES2002a_H01_MEE042_0000050_0000200"
    assert (segments[0].start, segments[0].num_samples, segments[0].rate) == (4000, 12000, RATE)
    assert segments[0].audio.name == "ES2002a.Headset-1.wav"


def test_ami_s_published_partition_and_own_lists(root: Path) -> None:
    assert len(DEV.split()) == 18 and len(EVAL.split()) == 16
    assert [AMI().meetings(root, split) for split in AMI.splits] == [["ES2002a"], ["ES2011a"], ["EN2002a"]]
    write(root / "splits" / "split_train.orig", "EN2002a", "ES2011a", "", "EN2002a")
    assert AMI().meetings(root, "train") == ["EN2002a", "ES2011a"]


def test_ami_splits_long_segments_at_full_stops_then_commas(root: Path) -> None:
    words, time = [], 0.5
    for i in range(50):
        words.append(word(round(time, 3), round(time + 0.02, 3), f"w{i}"))
        time += 0.02
        if i in (19, 39, 44):
            words.append(word(round(time, 3), round(time, 3), "," if i == 44 else ".", ' punc="true"'))
    write(root / "words" / "ES2002a.B.words.xml", "<root>", *words, "</root>")
    segments = read(AMI(), root, "train", "audio")
    assert [len(text.split()) for text in texts(segments)] == [20, 20, 10]
    assert all(len(text.split()) <= MAX_WORDS for text in texts(segments))
    assert [x.start for x in segments] == [4000, 7200, 10400]


def test_real_ami_lists_and_audio(corpora: Path, tmp_path: Path) -> None:
    """The fixture's lists are the built-in partition."""
    fixture = corpora / "asr_ami_fixture"
    lists = {s: (fixture / "splits" / f"split_{s}.orig").read_text().split() for s in AMI.splits}
    assert [len(x) for x in lists.values()] == [137, 18, 16]
    assert sorted(lists["dev"]) == sorted(DEV.split()) and sorted(lists["eval"]) == sorted(EVAL.split())
    clip = fixture / "amicorpus" / "ES2011a" / "audio" / "ES2011a.Headset-0-40s-46s.wav"
    write(tmp_path / "kaldi" / "train" / "text", "one I'M ABIGAIL CLAFLIN", "two YOU CAN CALL ME ABBIE")
    write(tmp_path / "kaldi" / "train" / "wav.scp", f"rec {clip}")
    write(tmp_path / "kaldi" / "train" / "segments", "one rec 1.46 2.82", "two rec 3.36 4.36")
    cuts = read(AMI(), tmp_path / "kaldi", "train", "audio")
    assert [x.num_samples for x in cuts] == [21760, 16000]


# --- Kaldi ---------------------------------------------------------------------------------------------------------


def test_kaldi_directories(root: Path) -> None:
    segments = read(Kaldi(), root, "train", "audio")
    assert [(x.id, x.target, x.num_samples) for x in segments] == [("b", "ONE TWO", 16000), ("a", "THREE", 8000)]
    write(root / "train" / "segments", "a a 0 0.5", "b b 0.20 2.02")  # times are rounded
    assert [(x.start, x.num_samples) for x in read(Kaldi(), root, "train", "audio")][0] == (1600, 14400)
    write(root / "train" / "segments", "a a 0 0.5", "b b 0.20 -1", "", " ")  # -1: the end of the recording
    assert [(x.start, x.num_samples) for x in read(Kaldi(), root, "train", "audio")][0] == (1600, 14400)
    (root / "train" / "segments").unlink()
    (root / "a.wav").rename(root / "a  1.wav")
    write(root / "train" / "wav.scp", "a a  1.wav", "b b.wav")
    assert len(read(Kaldi(), root, "train", "audio")) == 2
    write(root / "train" / "reco2file_and_channel", "a a A", "b b B")
    assert len(read(Kaldi(), root, "train", "audio")) == 2  # each has one channel
    soundfile.write(root / "b.wav", np.zeros((RATE, 2)), RATE)
    with pytest.raises(DataError, match=r"reco2file_and_channel line 2: a channel of b.wav, which has 2"):
        read(Kaldi(), root, "train", "audio")
    (root / "train" / "reco2file_and_channel").unlink()
    (root / "train").rename(root / "ihm_train_sp")
    assert len(read(AMI(), root, "train", "audio")) == 2
    write(root / "ihm_train_sp" / "feats.scp", "a feats/a.npy", "b feats/b.npy")
    write(root / "ihm_train_sp" / "text", "b\tONE TWO", "a\t THREE")
    assert texts(read(AMI(), root, "train", "audio")) == ["ONE TWO", "THREE"]
    stored = read(AMI(), root, "train", "stored")
    assert isinstance(stored[0], Stored) and stored[0].path == root / "feats/b.npy"


# --- AN4 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["audio", "stored"])
def test_an4_holds_out_speakers(tmp_path: Path, kind: Kind) -> None:
    an4(tmp_path, kind, tuple(f"{s}/{u}-{s}-b" for s in ("aa", "bb", "cc", "dd") for u in ("u1", "u2")))
    ids = {split: [x.id for x in read(AN4(dev_every=2), tmp_path, split, kind)] for split in AN4.splits}
    assert ids["train"] == ["u1-aa-b", "u2-aa-b", "u1-cc-b", "u2-cc-b"]
    assert ids["dev"] == ["u1-bb-b", "u2-bb-b", "u1-dd-b", "u2-dd-b"] and ids["test"] == ["t1-zz-b"]
    assert texts(read(AN4(), tmp_path, "test", kind)) == ["YES"]


def test_real_an4(corpora: Path) -> None:
    root = corpora / "asr_an4_mfcc"
    train, dev, test = (read(AN4(), root, split, "stored") for split in AN4.splits)
    assert len(train) + len(dev) == 948 and len(test) == 130 and 40 < len(dev) < 120
    assert not {x.path.parent for x in train} & {x.path.parent for x in dev}
    assert test[0].target == "RUBOUT G M E F THREE NINE"
    mini = read(AN4(dev_every=3), corpora / "asr_an4_mini", "train", "audio")
    assert all(isinstance(x, Segment) and x.rate == 16000 for x in mini) and "<s>" not in " ".join(texts(mini))


# --- SLURP and Picovoice -------------------------------------------------------------------------------------------


def test_slurp(root: Path) -> None:
    reader = SLURP()
    train, devel, test = (read(reader, root, split, "audio") for split in SLURP.splits)
    assert [x.id for x in train] == ["slurp_FO-460_-11-headset", "slurp_MO-1_12", "slurp_unknown_13"]
    assert texts(train) == ["wake me at eight ok", "wake me at eight ok", "wake me"]
    assert {x.label for x in train} == {"alarm_set"}
    assert [(x.id, x.label) for x in devel] == [("slurp_unknown_14", "iot_hue_on")]  # 12 is training's
    assert texts(test) == ["bye"]
    assert [x.label for x in read(SLURP(train=["devel"]), root, "train", "text")] == ["iot_hue_on"]
    twice = [prompt(1, "one", "audio-12.flac"), prompt(2, "two", "audio-12.flac")]
    write(root / "dataset" / "slurp" / "train.jsonl", *twice)
    reader = SLURP()
    for _ in range(2):  # a recording counts once
        assert texts(read(reader, root, "train", "audio")) == ["one", "wake me"]


def test_slurp_s_held_out_part_is_no_training_data(tmp_path: Path) -> None:
    write(tmp_path / "dataset" / "slurp" / "devel.jsonl", *(prompt(i, f"word {i}") for i in range(7)))
    reader = SLURP(train=["devel"], dev_every=3)
    train, devel = (read(reader, tmp_path, split, "text") for split in ("train", "devel"))
    assert [x.target for x in devel] == ["word 2", "word 5"]
    assert sorted(x.target for x in [*train, *devel]) == [f"word {i}" for i in range(7)]


def test_real_slurp_annotations(corpora: Path) -> None:
    root = corpora / "slu_slurp_text"
    reader = SLURP(train=["devel"])
    devel, test = read(reader, root, "train", "text"), read(reader, root, "test", "text")
    assert (len(devel), len(test)) == (2033, 2974)
    assert (len({x.label for x in devel}), len({x.label for x in test})) == (59, 59)
    assert len({x.label for x in test} - {x.label for x in devel}) == 1
    assert devel[0].label == "qa_currency"


def test_real_picovoice_orders(corpora: Path) -> None:
    train, dev, test = (read(Picovoice(), corpora / "slu_picovoice_coffee", s, "audio") for s in Picovoice.splits)
    assert (len(train), len(dev), len(test)) == (32, 8, 10)
    assert len({x.label for x in test}) == 10 and not any(" " in x.label for x in train)
    assert {x.target for x in test} == {""}


# --- summaries -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["original", "records", "pairs"])
def test_xsum_s_three_layouts(layout: str, tmp_path: Path) -> None:
    LAYOUTS[f"xsum {layout}"][0](tmp_path)
    (document,) = read(XSum(), tmp_path, "train", "text")
    assert (document.source, document.target) == ("Line one. Line two.", "The summary.")
    if layout == "pairs":
        write(tmp_path / "val.source", "x", "")
        write(tmp_path / "val.target", "a", "b")
        examples = read(XSum(), tmp_path, "validation", "text", drop_empty=True)
        assert texts(examples) == ["a", "b"] and examples[1].source == ""  # the caller leaves it out


def test_real_summaries(corpora: Path, tmp_path: Path) -> None:
    (tmp_path / "test.json").write_bytes((corpora / "sum_xsum_sample10" / "sample.json").read_bytes())
    articles = read(XSum(), tmp_path, "test", "text")
    assert len(articles) == 10
    assert articles[0].target == "The Met Office has issued a yellow weather warning for ice across most of Wales."
    root = corpora / "sum_scitldr_a"
    sizes = [len(read(SciTLDR(), root, split, "text")) for split in SciTLDR.splits]
    assert sizes == [1992, 619, 618]
    assert any(x.others for x in read(SciTLDR(), root, "test", "text"))


# --- parallel text -------------------------------------------------------------------------------------------------


def test_parallel_text_in_each_layout(tmp_path: Path) -> None:
    google, raw, opennmt = tmp_path / "google", tmp_path / "raw", tmp_path / "opennmt"
    for lang, text in (("en", "the ba@@ by ’s"), ("de", "das Ba@@ by")):
        for name in ("train.tok.clean.bpe.32000", "newstest2013.tok.bpe.32000", "newstest2014.tok.bpe.32000"):
            write(google / f"{name}.{lang}", text)
    (pair,) = read(Parallel(), google, "test", "text")
    assert (pair.source, pair.target) == ("the baby 's", "das Baby")
    for name in ("europarl-v7", "commoncrawl", "news-commentary-v11"):
        for lang in ("en", "de"):
            write(raw / "training" / f"{name}.de-en.{lang}", f"{name} {lang}")
    for lang, side in (("en", "src"), ("de", "ref")):
        write(raw / "dev" / f"newstest2013.{lang}", lang)
        write(
            raw / "test-full" / f"newstest2014-deen-{side}.{lang}.sgm",
            '<doc><seg id="1">A &amp; b</seg>', '<seg id="2">', f"{lang} </seg></doc>",
        )  # fmt: skip
    assert len(read(Parallel(), raw, "train", "text")) == 3
    test = read(Parallel(), raw, "test", "text")
    assert [(x.source, x.target) for x in test] == [("A & b", "A & b"), ("en", "de")]
    for side in ("src", "tgt"):
        write(opennmt / f"{side}-train.txt", *(f"{side} &quot; {i}" for i in range(10)))
        write(opennmt / f"{side}-val.txt", "v")
    reader = Parallel(hold_out=4, unescape=True)
    assert [x.source for x in read(reader, opennmt, "test", "text")] == ['src " 0', 'src " 4', 'src " 8']
    assert len(read(reader, opennmt, "train", "text")) == 7
    for lang in ("en", "de"):
        write(tmp_path / "named" / f"letters.{lang}", *map(str, range(9)), *([" "] if lang == "de" else []))
    reader = Parallel(hold_out=3)
    assert [x.source for x in read(reader, tmp_path / "named", "dev", "text")] == list("036")
    assert reader.name == "named"


def sgml(path: Path, *segments: str) -> Path:
    return write(path, '<refset><DOC origlang="en" docid="d 1">', *segments, "</DOC></refset>")


def test_segments_are_paired_by_their_numbers(tmp_path: Path) -> None:
    source = sgml(tmp_path / "a.en.sgm", '<seg id="1">one</seg>', '<seg id="2">two</seg>', "<SEG id='3'/>")
    target = sgml(tmp_path / "a.de.sgm", '<seg id="2">zwei</seg>', "<seg id=3></seg>", '<seg id="1">eins</seg>')
    read = list(pairs.read_pairs(source, target, "test", True))
    assert [(x.id, x.source, x.target) for x in read[:2]] == [("test_1", "one", "eins"), ("test_2", "two", "zwei")]


@pytest.mark.parametrize(
    ("segments", "told"),
    [
        (['<seg id="1">eins</seg>'], "a.de.sgm: no segment 2"),
        (['<seg id="1">a</seg>', '<seg id="2">b</seg>', '<seg id="3">c</seg>'], "a.en.sgm: no segment 3"),
        (['<seg id="1">a</seg>', '<seg id="1">b</seg>'], "a.de.sgm: the segment 1 of .* occurs twice"),
        (['<seg id="1">a', '<seg id="2">b</seg>'], "a.de.sgm: the segment 1 of .* has no end"),
    ],
)
def test_segments_of_one_side_alone_are_refused(segments: list[str], told: str, tmp_path: Path) -> None:
    source = sgml(tmp_path / "a.en.sgm", '<seg id="1">one</seg>', '<seg id="2">two</seg>')
    with pytest.raises(DataError, match=told):
        list(pairs.read_pairs(source, sgml(tmp_path / "a.de.sgm", *segments), "test", True))


def test_apostrophes_that_are_changed_are_noted_for_their_split(tmp_path: Path) -> None:
    for lang in ("en", "de"):
        write(tmp_path / f"a.{lang}", "it’s", *"bcd", "I’m" if lang == "en" else "e")
    for split, count in (("test", 1), ("dev", 1), ("train", 0)):
        with Report().of(split) as report:
            texts = [x.source for x in Parallel(hold_out=3).read(tmp_path, split, "text", False)]
        assert [note.count for note in report.noted.values()] == [count] * bool(count)
        assert sum("'" in text for text in texts) == count


def test_marks_of_pieces_are_text_where_the_layout_has_none(tmp_path: Path) -> None:
    """Two German lines that hold `@@`, as in Multi30k."""
    german = ["@@", "Ein Schild mit der Aufschrift @@ hängt am Zaun ."]
    for name in ("train", "val", "test_2016_flickr"):
        write(tmp_path / f"{name}.en", "Two men .", "A sign hangs on the fence .")
        write(tmp_path / f"{name}.de", *german)
    for split in Parallel.splits:
        assert [x.target for x in read(Parallel(), tmp_path, split, "text")] == german


def test_real_parallel_text(corpora: Path) -> None:
    root = corpora / "nmt_wmt_en_de_10k"
    train, dev, test = (read(Parallel(unescape=True), root, s, "text", drop_empty=True) for s in Parallel.splits)
    assert (len(train) + len(test), len(dev), len(test)) == (10_000, 50, 100)
    assert not any("&quot;" in x.source for x in train)
    assert dev[0].target == "Keine befreiende Novelle für Tymoshenko durch das Parlament"


# --- MuST-C --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2])
def test_reads_both_published_forms(tmp_path: Path, version: int) -> None:
    segments = read(MustC(), write_corpus(tmp_path, ("train",), version), "train", "audio")
    ids = ["ted_1_2", "ted_1_0", "ted_2_0", "ted_1_1", "ted_2_1"]  # numerically: 9.5 < 100.2
    assert [s.id for s in segments] == ids
    assert [(s.source, s.target) for s in segments] == [s[3:] for s in SEGMENTS]
    assert [s.audio.name for s in segments] == [s[0] for s in SEGMENTS]
    assert [(s.start, s.num_samples) for s in segments] == [(int(s[1] * RATE), int(s[2] * RATE)) for s in SEGMENTS]
    assert {s.rate for s in segments} == {RATE}


@pytest.mark.parametrize(
    "write_yaml",
    [
        yaml.safe_dump,
        partial(yaml.safe_dump, default_flow_style=True),
        partial(json.dumps, indent=1),
        lambda items: "---\n" + "".join(f"- {json.dumps(x)}\n" for x in items) + "\n\n",
    ],
    ids=["block style", "flow style", "JSON", "quoted names"],
)
def test_other_forms_of_the_list_of_segments(corpus: Path, write_yaml: Callable[[Any], str]) -> None:
    folder = corpus / "en-de" / "data" / "train"
    expected = read(MustC(), corpus, "train", "audio")
    (folder / "wav" / "ted_1.wav").rename(folder / "wav" / "ted  'one'.wav")
    path = folder / "txt" / "train.yaml"
    names = {"ted_1.wav": "ted  'one'.wav", "ted_2.wav": "ted_2.wav"}
    items = [{"wav": names[x[0]], "offset": x[1], "duration": x[2], "speaker": {"a": [1]}} for x in SEGMENTS]
    path.write_text(write_yaml(items))
    for language in ("en", "de"):
        text = path.with_suffix(f".{language}")
        text.write_text(text.read_text() + "\n")  # a blank line at the end
    segments = read(MustC(), corpus, "train", "audio")
    assert [(x.start, x.num_samples, x.target) for x in segments] == [
        (x.start, x.num_samples, x.target) for x in expected
    ]
    assert segments[0].audio.name == "ted  'one'.wav"


def test_rounded_offsets_and_unusual_line_ends(corpus: Path, edit: Edit) -> None:
    edit("train.yaml", "offset: 100.200000", "offset: 100.509000")  # ends a frame late, and is cut
    path = edit("train.de", "sieben drei\n", "sieben\u2028drei\x85\r\n")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    segment = read(MustC(), corpus, "train", "audio")[0]
    assert (segment.start + segment.num_samples, segment.target) == (102 * RATE, "sieben\u2028drei")


def test_the_target_s_texts_alone_must_not_be_empty(corpus: Path, edit: Edit) -> None:
    edit("train.de", "zwei eins\n", "  \n")
    assert read(MustC(target="transcript"), corpus, "train", "audio")[2].target == "two one"
    edit("train.en", "one\n", "\n")
    with pytest.raises(DataError, match="train.en line 2: empty text"):
        read(MustC(target="transcript"), corpus, "train", "audio")
    assert len(read(MustC(), corpus, "train", "audio", drop_empty=True)) == 5


def test_real_recorded_speech(corpora: Path) -> None:
    segments = read(MustC(), corpora / "st_digits_en_de", "tst-COMMON", "audio")
    assert len(segments) == 240
    assert segments[0].source == "seven three four"
    assert re.fullmatch(r"ted_301_\d+", segments[0].id)
    assert len({s.id for s in segments}) == 240

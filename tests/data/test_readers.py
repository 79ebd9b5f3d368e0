"""Readers of AMI, Kaldi directories, AN4, SLURP, Picovoice, XSum, SciTLDR and parallel text: layouts and errors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from attnlab.data import AMI, AN4, SLURP, Kaldi, Parallel, Picovoice, SciTLDR, XSum
from attnlab.data.corpus import Kind, Reader, Segment, Stored, Utterance, statistics
from attnlab.data.speech.ami import DEV, EVAL, MAX_WORDS
from attnlab.errors import DataError

RATE = 8000


def write(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def audio(path: Path, seconds: float = 2.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(1).normal(0, 0.1, int(seconds * RATE))
    soundfile.write(path, noise, RATE, "PCM_16", format="NIST" if path.suffix == ".sph" else None)
    return path


def read(reader: Reader, root: Path, split: str, kind: Kind, drop_empty: bool = False) -> list[Any]:
    reader.check(root, [split], kind)
    return list(reader.read(root, split, kind, drop_empty))


def texts(found: list[Utterance]) -> list[str]:
    return [x.target for x in found]


@pytest.mark.parametrize("reader", [AMI(), Kaldi(), AN4(), SLURP(), Picovoice(), XSum(), SciTLDR(), Parallel()])
def test_a_wrong_root_is_an_error_with_the_expected_layout(reader: Reader, tmp_path: Path) -> None:
    kind, split = reader.kinds[0], reader.splits[0]
    with pytest.raises(DataError, match=r"data_root=.*nowhere: no such directory; data_root must hold"):
        reader.check(tmp_path / "nowhere", [split], kind)
    with pytest.raises(DataError, match="data_root must hold") as error:
        reader.check(tmp_path, [split], kind)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("reader", [Kaldi(), AN4(), Picovoice(), SciTLDR()])
def test_no_sample_corpus_is_made_up(reader: Reader, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no sample corpus in the layout of .*: set data_root"):
        reader.sample(tmp_path)


# --- AMI -----------------------------------------------------------------------------------------------------------


def word(start: float, end: float, text: str, mark: str = "") -> str:
    return f'<w starttime="{start}" endtime="{end}"{mark}>{text}</w>'


@pytest.fixture
def ami(tmp_path: Path) -> Path:
    for meeting in ("ES2002a", "ES2011a", "EN2002a"):
        audio(tmp_path / meeting / "audio" / f"{meeting}.Headset-1.wav", 6)
        write(
            tmp_path / "segments" / f"{meeting}.B.segments.xml",
            '<nite:root xmlns:nite="http://nite.sourceforge.net/">',
            '<segment transcriber_start="0.5" transcriber_end="2.0"/>',
            '<segment transcriber_start="2.5" transcriber_end="3.5"/>',
            '<segment transcriber_start="4.0" transcriber_end="5.0"/>',
            "</nite:root>",
        )
        write(
            tmp_path / "words" / f"{meeting}.B.words.xml",
            '<nite:root xmlns:nite="http://nite.sourceforge.net/">',
            word(0.5, 0.8, "Mm"), word(0.8, 1.0, "hmm"), word(1.0, 1.0, ",", ' punc="true"'),
            word(1.0, 1.6, "the L_C_D"),
            word(1.6, 2.0, "on-off", ' trunc="true"'), word(2.0, 2.0, ".", ' punc="true"'),
            '<vocalsound starttime="2.5" endtime="3.0" type="laugh"/>', word(2.6, 3.6, "outside"),
            word(4.1, 4.6, "it&apos;s"), "<w>timeless</w>", "</nite:root>",
        )  # fmt: skip
    meetings = [
        f'<meeting observation="{m}"><speaker nxt_agent="A" global_name="FEE041" channel="0"/>'
        '<speaker nxt_agent="B" global_name="MEE042" channel="1"/></meeting>'
        for m in ("ES2002a", "ES2011a", "EN2002a")
    ]
    write(tmp_path / "corpusResources" / "meetings.xml", "<meetings>", *meetings, "</meetings>")
    return tmp_path


def test_ami_as_the_recipes_prepare_it(ami: Path) -> None:
    found = read(AMI(), ami, "train", "audio")
    assert texts(found) == ["MM-HMM THE L. C. D ON OFF", "IT'S"]
    assert found[0].id == "AMI_ES2002a_H01_MEE042_0000050_0000200"
    assert (found[0].start, found[0].num_samples, found[0].rate) == (4000, 12000, RATE)
    assert found[0].audio.name == "ES2002a.Headset-1.wav"


def test_ami_s_published_partition_and_own_lists(ami: Path) -> None:
    assert len(DEV.split()) == 18 and len(EVAL.split()) == 16
    assert [AMI().meetings(ami, split) for split in AMI.splits] == [["ES2002a"], ["ES2011a"], ["EN2002a"]]
    write(ami / "splits" / "split_train.orig", "EN2002a", "ES2011a", "", "EN2002a")
    assert AMI().meetings(ami, "train") == ["EN2002a", "ES2011a"]


def test_ami_splits_long_segments_at_full_stops_then_commas(ami: Path) -> None:
    words, time = [], 0.5
    for i in range(50):
        words.append(word(round(time, 3), round(time + 0.02, 3), f"w{i}"))
        time += 0.02
        if i in (19, 39, 44):
            words.append(word(round(time, 3), round(time, 3), "," if i == 44 else ".", ' punc="true"'))
    write(ami / "words" / "ES2002a.B.words.xml", "<root>", *words, "</root>")
    found = read(AMI(), ami, "train", "audio")
    assert [len(text.split()) for text in texts(found)] == [20, 20, 10]
    assert all(len(text.split()) <= MAX_WORDS for text in texts(found))
    assert [x.start for x in found] == [4000, 7200, 10400]


WORDS, TURNS = "words/ES2002a.B.words.xml", "segments/ES2002a.B.segments.xml"
AUDIO, MEETINGS = "ES2002a/audio/ES2002a.Headset-1.wav", "corpusResources/meetings.xml"


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (WORDS, "</w>", "</v>", r"B\.words\.xml: expected an XML file \(mismatched tag: line 2"),
        (WORDS, '"0.8"', '"x"', r"B\.words\.xml: the word 'Mm' has the times \['0.5', 'x'\]"),
        (TURNS, '"3.5"', '"1.5"', r"segments\.xml: segment 2 is from 2.5 to 1.5 s"),
        (TURNS, '"5.0"', '"9.0"', r"segments\.xml: a segment from 4\.000 to 9\.000 s; expected a part of the 6\.000 s"),
        (TURNS, "", None, r"segments\.xml is missing"),
        (AUDIO, "", None, r"ES2002a\.Headset-1\.wav is missing: text without audio"),
        (MEETINGS, "", None, r"meetings\.xml is missing"),
        (MEETINGS, "ES2002a", "ES2002b", r"meetings\.xml: no meeting ES2002a, which train needs"),
    ],
)
def test_ami_s_errors(ami: Path, file: str, old: str, new: str | None, message: str) -> None:
    path = ami / file
    if new is None:
        path.unlink()
    else:
        path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(DataError, match=message):
        read(AMI(), ami, "train", "audio")


def test_ami_has_no_stored_features_of_its_own(ami: Path) -> None:
    with pytest.raises(DataError, match="stored features are read from Kaldi directories"):
        read(AMI(), ami, "train", "stored")


def test_real_ami_lists_and_audio(corpora: Path, tmp_path: Path) -> None:
    """The fixture's lists are the built-in partition; its words, put into XML, come back as they were."""
    fixture = corpora / "asr_ami_fixture"
    lists = {s: (fixture / "splits" / f"split_{s}.orig").read_text().split() for s in AMI.splits}
    assert [len(x) for x in lists.values()] == [137, 18, 16]
    assert sorted(lists["dev"]) == sorted(DEV.split()) and sorted(lists["eval"]) == sorted(EVAL.split())
    rows = [json.loads(line) for line in (fixture / "ES2011a_sups.jsonl").read_text().splitlines()]
    mine = [row for row in rows if row["speaker"] == "FEE041" and len(row["text"].split()) <= 20]
    segments, words = [], []
    for row in mine:
        start, each = row["start"], row["duration"] / len(row["text"].split())
        segments.append(f'<segment transcriber_start="{start}" transcriber_end="{start + row["duration"]}"/>')
        words += [
            word(start + i * each, min(start + (i + 1) * each, start + row["duration"]), text)
            for i, text in enumerate(row["text"].split())
        ]
    write(tmp_path / "segments" / "ES2011a.A.segments.xml", "<r>", *segments, "</r>")
    write(tmp_path / "words" / "ES2011a.A.words.xml", "<r>", *words, "</r>")
    speaker = '<speaker nxt_agent="A" global_name="FEE041" channel="0"/>'
    write(
        tmp_path / "corpusResources" / "meetings.xml",
        f'<r><meeting observation="ES2011a">{speaker}</meeting></r>',
    )
    audio(tmp_path / "ES2011a" / "audio" / "ES2011a.Headset-0.wav", max(r["start"] + r["duration"] for r in mine) + 1)
    found = read(AMI(), tmp_path, "dev", "audio")
    assert len(found) == len(mine) > 15
    said = [row["text"].replace("-", " ").replace("MM HMM", "MM-HMM").split() for row in mine]
    assert [x.split() for x in texts(found)] == said
    clip = fixture / "amicorpus" / "ES2011a" / "audio" / "ES2011a.Headset-0-40s-46s.wav"
    write(tmp_path / "kaldi" / "train" / "text", "one I'M ABIGAIL CLAFLIN", "two YOU CAN CALL ME ABBIE")
    write(tmp_path / "kaldi" / "train" / "wav.scp", f"rec {clip}")
    write(tmp_path / "kaldi" / "train" / "segments", "one rec 1.46 2.82", "two rec 3.36 4.36")
    cuts = read(AMI(), tmp_path / "kaldi", "train", "audio")
    assert [x.num_samples for x in cuts] == [21760, 16000]


# --- Kaldi ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def kaldi(tmp_path: Path) -> Path:
    write(tmp_path / "train" / "text", "b ONE TWO", "a THREE")
    write(tmp_path / "train" / "wav.scp", "a a.wav", f"b {audio(tmp_path / 'b.wav')}")
    audio(tmp_path / "a.wav", 1)
    return tmp_path


def test_kaldi_directories(kaldi: Path) -> None:
    found = read(Kaldi(), kaldi, "train", "audio")
    assert [(x.id, x.target, x.num_samples) for x in found] == [("b", "ONE TWO", 16000), ("a", "THREE", 8000)]
    (kaldi / "train").rename(kaldi / "ihm_train_sp")
    assert len(read(AMI(), kaldi, "train", "audio")) == 2
    write(kaldi / "ihm_train_sp" / "feats.scp", "a feats/a.npy", "b feats/b.npy")
    write(kaldi / "ihm_train_sp" / "text", "b\tONE TWO", "a\t THREE")
    assert texts(read(AMI(), kaldi, "train", "audio")) == ["ONE TWO", "THREE"]
    stored = read(AMI(), kaldi, "train", "stored")
    assert isinstance(stored[0], Stored) and stored[0].path == kaldi / "feats/b.npy"


@pytest.mark.parametrize(
    ("file", "lines", "message"),
    [
        ("text", ["b ONE", "c TWO"], r"text line 2: c has no line in wav.scp"),
        ("text", ["b ONE"], r"wav.scp line 1: a has no line in text; expected one for each id"),
        ("text", ["b ONE", "a"], r"text line 2 \(a\): empty text; task.data.drop_empty=true"),
        ("text", ["b ONE", "b ONE"], r"text line 2: b occurs twice"),
        ("wav.scp", ["a sph2pipe a.sph |", "b b.wav"], r"wav.scp line 1: a is a command"),
        ("wav.scp", ["a nowhere.wav", "b b.wav"], r"nowhere.wav: missing recording, named in .*wav.scp line 1"),
        ("segments", ["a a 0 0.5"], r"text line 1: b has no line in segments"),
        ("segments", ["a a 0 0.5", "b b 1 0.5"], r"segments line 2: expected '<id> <recording> <start> <end>'"),
        ("segments", ["a a 0 0.5", "b x 0 0.5"], r"segments line 2: recording x is not in wav.scp"),
        (
            "segments",
            ["a a 0 0.5", "b b 0.2 2.5"],
            r"line 2: a segment from 0\.200 to 2\.500 s",
        ),
        (
            "segments",
            ["a a 0 0.5", "b b 7 9"],
            r"line 2: a segment from 7\.000 to 9\.000 s; expected .* b.wav",
        ),
    ],
)
def test_kaldi_s_errors(kaldi: Path, file: str, lines: list[str], message: str) -> None:
    write(kaldi / "train" / file, *lines)
    with pytest.raises(DataError, match=message):
        read(Kaldi(), kaldi, "train", "audio")


def test_times_of_kaldi_s_segments_are_rounded(kaldi: Path) -> None:
    write(kaldi / "train" / "segments", "a a 0 0.5", "b b 0.20 2.02")
    (b, _) = read(Kaldi(), kaldi, "train", "audio")
    assert (b.start, b.num_samples) == (1600, 14400)


# --- AN4 -----------------------------------------------------------------------------------------------------------


def an4(root: Path, kind: str, training: list[str]) -> Path:
    for split, names in {"train": training, "test": ["an4test_clstk/zz/t1-zz-b"]}.items():
        write(root / "etc" / f"an4_{split}.fileids", *names)
        write(root / "etc" / f"an4_{split}.transcription", *(f"<s> YES </s> ({Path(n).name})" for n in names))
        for name in names:
            if kind == "audio":
                audio(root / "wav" / f"{name}.sph", 0.5)
            else:
                (root / "feat" / name).parent.mkdir(parents=True, exist_ok=True)
                (root / "feat" / f"{name}.mfc").write_bytes(b"")
    return root


@pytest.mark.parametrize("kind", ["audio", "stored"])
def test_an4_holds_out_speakers(tmp_path: Path, kind: Kind) -> None:
    names = [f"an4_clstk/{s}/{u}-{s}-b" for s in ("aa", "bb", "cc", "dd") for u in ("u1", "u2")]
    root, reader = an4(tmp_path, kind, names), AN4(dev_every=2)
    assert [x.id for x in read(reader, root, "train", kind)] == ["u1-aa-b", "u2-aa-b", "u1-cc-b", "u2-cc-b"]
    assert [x.id for x in read(reader, root, "dev", kind)] == ["u1-bb-b", "u2-bb-b", "u1-dd-b", "u2-dd-b"]
    assert texts(read(reader, root, "test", kind)) == ["YES"]


def test_an4_s_errors(tmp_path: Path) -> None:
    root = an4(tmp_path, "audio", ["an4_clstk/aa/u1-aa-b", "an4_clstk/bb/u2-bb-b"])
    write(root / "etc" / "an4_train.transcription", "YES (u1-aa-b)", "NO (u3-bb-b)")
    with pytest.raises(DataError, match=r"an4_train.transcription line 2: expected 'WORDS \(u2-bb-b\)'"):
        read(AN4(), root, "train", "audio")
    write(root / "etc" / "an4_train.transcription", "YES (u1-aa-b)")
    with pytest.raises(DataError, match=r"has 1 lines, an4_train.fileids 2"):
        read(AN4(), root, "train", "audio")
    write(root / "etc" / "an4_train.transcription", "YES (u1-aa-b)", "(u2-bb-b)")
    with pytest.raises(DataError, match=r"line 2: empty text"):
        read(AN4(), root, "train", "audio")
    write(root / "etc" / "an4_train.transcription", "YES (u1-aa-b)", "NO (u2-bb-b)")
    (root / "wav/an4_clstk/bb/u2-bb-b.sph").unlink()
    with pytest.raises(DataError, match=r"u2-bb-b.sph: missing recording, named in .*line 2"):
        read(AN4(), root, "train", "audio")
    with pytest.raises(DataError, match="feat is missing"):
        read(AN4(), root, "train", "stored")


def test_real_an4(corpora: Path) -> None:
    root = corpora / "asr_an4_mfcc"
    train, dev, test = (read(AN4(), root, split, "stored") for split in AN4.splits)
    assert len(train) + len(dev) == 948 and len(test) == 130 and 40 < len(dev) < 120
    assert not {x.path.parent for x in train} & {x.path.parent for x in dev}
    assert test[0].target == "RUBOUT G M E F THREE NINE"
    mini = read(AN4(dev_every=3), corpora / "asr_an4_mini", "train", "audio")
    assert all(isinstance(x, Segment) and x.rate == 16000 for x in mini) and "<s>" not in " ".join(texts(mini))


# --- SLURP and Picovoice -------------------------------------------------------------------------------------------


def prompt(id: int, sentence: str, *files: str, **more: Any) -> str:
    record = {"slurp_id": id, "sentence": sentence, "intent": "other", "scenario": "alarm", "action": "set"}
    return json.dumps(record | {"recordings": [{"file": file} for file in files]} | more)


@pytest.fixture
def slurp(tmp_path: Path) -> Path:
    folder = tmp_path / "dataset" / "slurp"
    write(folder / "train.jsonl", prompt(1, "wake me @ eight, ok.", "audio--11-headset.flac", "audio-12.flac"))
    write(folder / "train_synthetic.jsonl", prompt(2, "Wake ME", "audio-13.flac"))
    write(folder / "devel.jsonl", prompt(3, "hello", "audio-12.flac", "audio-14.flac", scenario="iot", action="hue on"))
    write(folder / "test.jsonl", prompt(4, "bye", "audio-15.flac"))
    people = {"1": {"recordings": {"audio--11-headset.flac": {"usrid": "FO-460"}, "audio-12.flac": {"usrid": "MO-1"}}}}
    write(folder / "metadata.json", json.dumps(people))
    for name in ("audio--11-headset", "audio-12", "audio-14", "audio-15"):
        audio(tmp_path / "audio" / "slurp_real" / f"{name}.flac", 0.5)
    audio(tmp_path / "audio" / "slurp_synth" / "audio-13.flac", 0.5)
    return tmp_path


def test_slurp(slurp: Path) -> None:
    reader = SLURP()
    train, devel, test = (read(reader, slurp, split, "audio") for split in SLURP.splits)
    assert [x.id for x in train] == ["slurp_FO-460_-11-headset", "slurp_MO-1_12", "slurp_unknown_13"]
    assert texts(train) == ["wake me at eight ok", "wake me at eight ok", "wake me"]
    assert {x.label for x in train} == {"alarm_set"}
    assert [(x.id, x.label) for x in devel] == [("slurp_unknown_14", "iot_hue_on")]  # 12 is training's
    assert texts(test) == ["bye"]
    assert [x.label for x in read(SLURP(train=["devel"]), slurp, "train", "text")] == ["iot_hue_on"]


def test_a_slurp_recording_counts_once(slurp: Path) -> None:
    twice = [prompt(1, "one", "audio-12.flac"), prompt(2, "two", "audio-12.flac")]
    write(slurp / "dataset" / "slurp" / "train.jsonl", *twice)
    reader = SLURP()
    for _ in range(2):
        assert texts(read(reader, slurp, "train", "audio")) == ["one", "wake me"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            [prompt(1, "a", "audio-12.flac"), '{"slurp_id": 5, "sentence": '],
            "line 2: malformed JSON",
        ),
        ([prompt(1, "a", "audio-12.flac"), prompt(2, "b")], "line 2: no recordings"),
        ([prompt(1, "a", "audio-99.flac")], r"audio-99.flac: missing recording, named in .*train.jsonl line 1"),
        ([prompt(1, "a", "audio-12.flac", scenario=None)], "line 1: 'scenario' is None; expected str"),
        ([prompt(1, "a", "audio-12.flac", scenario=" ")], "line 1: empty scenario; expected the class"),
        ([prompt(1, ".,", "audio-12.flac")], "line 1: empty sentence"),
    ],
)
def test_slurp_s_errors(slurp: Path, lines: list[str], message: str) -> None:
    write(slurp / "dataset" / "slurp" / "train.jsonl", *lines)
    with pytest.raises(DataError, match=message):
        read(SLURP(), slurp, "train", "audio")


def test_slurp_without_a_file(slurp: Path) -> None:
    (slurp / "dataset" / "slurp" / "train_synthetic.jsonl").unlink()
    with pytest.raises(DataError, match=r"train_synthetic.jsonl is missing"):
        read(SLURP(), slurp, "train", "audio")


def test_slurp_s_held_out_part_is_no_training_data(tmp_path: Path) -> None:
    folder = tmp_path / "dataset" / "slurp"
    folder.mkdir(parents=True)
    prompts = [{"slurp_id": i, "sentence": f"word {i}", "scenario": "a", "action": "b"} for i in range(7)]
    (folder / "devel.jsonl").write_text("".join(f"{json.dumps(prompt)}\n" for prompt in prompts))
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


def test_picovoice_s_errors(tmp_path: Path) -> None:
    write(tmp_path / "label.json", json.dumps({"a.wav": {"slots": {"coffeeDrink": "iced coffee"}}}))
    write(tmp_path / "selection.tsv", "file\tclass\tsplit", "a.wav\ticed coffee\ttest", "b.wav\tmocha\ttest")
    audio(tmp_path / "speech" / "a.wav", 0.5)
    with pytest.raises(DataError, match=r"label.json: expected an object with the slot coffeeDrink of b.wav"):
        read(Picovoice(), tmp_path, "test", "audio")
    write(tmp_path / "selection.tsv", "file\tcoffeeDrink\tsplit", "a.wav\tmocha\ttest")
    with pytest.raises(DataError, match=r"selection.tsv line 2: a.wav is 'mocha', but 'iced coffee' in label.json"):
        read(Picovoice(), tmp_path, "test", "audio")
    write(tmp_path / "label.json", "{", '"a": }')
    with pytest.raises(DataError, match=r"label.json line 2: malformed JSON"):
        read(Picovoice(), tmp_path, "test", "audio")


# --- summaries -----------------------------------------------------------------------------------------------------


def original(root: Path, body: str = "Line one.\n\nShare this with\nLine two.") -> None:
    write(
        root / "bbc-summary-data" / "7.summary",
        f"[SN]URL[SN]\nx\n\n[SN]TITLE[SN]\nT\n\n[SN]FIRST-SENTENCE[SN]\nThe summary.\n\n[SN]RESTBODY[SN]\n{body}",
    )
    ids = {"train": ["7"], "validation": [], "test": []}
    write(root / "XSum-TRAINING-DEV-TEST-SPLIT-90-5-5.json", json.dumps(ids))


def records(root: Path) -> None:
    write(root / "train.json", json.dumps({"document": "Line one.\nLine two.", "summary": "The  summary."}, indent=1))


def pairs(root: Path) -> None:
    write(root / "train.raw.source", "Line one.  Line two.")
    write(root / "train.raw.target", "The summary.")


@pytest.mark.parametrize("layout", [original, records, pairs])
def test_xsum_s_three_layouts(layout: Callable[[Path], None], tmp_path: Path) -> None:
    layout(tmp_path)
    (found,) = read(XSum(), tmp_path, "train", "text")
    assert (found.source, found.target) == ("Line one. Line two.", "The summary.")


def test_xsum_s_spellings_of_validation(tmp_path: Path) -> None:
    for name in ("val", "validation"):
        write(tmp_path / f"{name}.source", name)
        write(tmp_path / f"{name}.target", "y")
        assert read(XSum(), tmp_path, "validation", "text")[0].source == name


def test_xsum_s_errors(tmp_path: Path) -> None:
    pairs(tmp_path)
    write(tmp_path / "train.raw.target", "a", "b")
    with pytest.raises(DataError, match=r"train.raw.source has 1 lines, train.raw.target 2"):
        read(XSum(), tmp_path, "train", "text")
    write(tmp_path / "train.raw.source", "x", "")
    with pytest.raises(DataError, match=r"train.raw.source line 2: empty document; task.data.drop_empty=true"):
        read(XSum(), tmp_path, "train", "text")
    assert texts(read(XSum(), tmp_path, "train", "text", drop_empty=True)) == ["a", ""]  # the caller leaves it out
    (tmp_path / "train.raw.target").unlink()
    with pytest.raises(DataError, match="train.raw.target is missing"):
        read(XSum(), tmp_path, "train", "text")
    with pytest.raises(DataError, match=r"test.source is missing \(found train.raw.source\)"):
        read(XSum(), tmp_path, "test", "text")
    write(tmp_path / "train.json", '{"document": "a",', '"summary": 3}')
    with pytest.raises(DataError, match=r"train.json line 1: 'summary' is 3; expected str"):
        read(XSum(), tmp_path, "train", "text")
    original(tmp_path, body="")
    with pytest.raises(DataError, match=r"7.summary: empty document"):
        read(XSum(), tmp_path, "train", "text")


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
    write(opennmt / "tgt-train.txt", "one")
    with pytest.raises(DataError, match="src-train.txt has 10 lines, tgt-train.txt 1"):
        read(Parallel(), opennmt, "train", "text")


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


# --- statistics ----------------------------------------------------------------------------------------------------


def spoken(id: str, target: str, samples: int, speed: float = 1.0) -> Segment:
    return Segment(
        id=id, source=target.upper(), target=target, label="a_b", audio=Path("x.wav"), rate=8000, start=0,
        num_samples=samples, speed=speed,
    )  # fmt: skip


def test_hours_words_and_classes() -> None:
    assert statistics([spoken("a", "one two", 8000 * 1800), spoken("b", "", 8000 * 3600, 2.0)]) == {
        "utterances": 2, "hours": 1.0, "source_words": 2, "target_words": 2, "mean_source_words": 1.0,
        "mean_target_words": 1.0, "classes": 1,
    }  # fmt: skip


def test_texts_have_neither_hours_nor_classes() -> None:
    found = statistics([Utterance(id="a", source="three words here", target="one")])
    assert found == {
        "utterances": 1, "source_words": 3, "target_words": 1, "mean_source_words": 3.0, "mean_target_words": 1.0,
    }  # fmt: skip

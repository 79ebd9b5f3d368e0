"""Readers of the AMI meeting corpus, headset audio: the published layout, and Kaldi-style directories of any corpus.

<root>/words/<MEETING>.<A..E>.words.xml          <w starttime= endtime= [punc="true"]>word</w>, among other elements
<root>/segments/<MEETING>.<A..E>.segments.xml    <segment transcriber_start= transcriber_end=>
<root>/corpusResources/meetings.xml              <meeting observation=> <speaker nxt_agent= channel= global_name=>
<root>/<MEETING>/audio/<MEETING>.Headset-<channel>.wav    (or amicorpus/, wav_db/ between)
<root>/splits/split_{train,dev,eval}.orig        meetings, one per line; without them the full-corpus-ASR partition

<root>/<split>/text             <id> WORDS
<root>/<split>/wav.scp          <recording> <path>      with segments: <id> <recording> <start> <end>; end -1: its end
<root>/<split>/feats.scp        <id> <path of .npy or .mfc>
"""

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import soundfile

from attnlab.data.corpus import (
    Kind,
    Reader,
    Segment,
    Stored,
    Utterance,
    contents,
    excerpt,
    inspect_audio,
    read_lines,
    reading,
    recording,
    refuse_empty,
    spoken_sample,
    trimmed,
)
from attnlab.data.report import left_out, noted
from attnlab.errors import DataError

# The full-corpus-ASR partition, as the published recipes have it: all other meetings are for training.
DEV = "ES2011a ES2011b ES2011c ES2011d IB4001 IB4002 IB4003 IB4004 IB4010 IB4011 IS1008a IS1008b IS1008c IS1008d TS3004a TS3004b TS3004c TS3004d"  # noqa: E501
EVAL = "EN2002a EN2002b EN2002c EN2002d ES2004a ES2004b ES2004c ES2004d IS1009a IS1009b IS1009c IS1009d TS3003a TS3003b TS3003c TS3003d"  # noqa: E501

BEYOND = 1.0  # seconds that a segment may end after its recording
ROUNDED = 0.05  # the same in Kaldi's `segments`, whose times are written with two digits
MAX_WORDS = 30  # longer segments are split at full stops, then at commas


Table = dict[str, tuple[str, str]]


class _Word(NamedTuple):
    text: str
    start: float
    end: float
    punctuation: bool


class AMI(Reader):
    """AMI IHM for recognition: each speaker's headset, the transcribed segments, text as ESPnet and Kaldi prepare it.

    Texts are in upper case; "-" becomes a space and "_" becomes ". "; MM HMM and UH HUH are joined; segments without
    words are left out.  Ids are AMI_<meeting>_H0<channel>_<speaker>_<start>_<end>, times in hundredths of a second.  A
    root with <split>/text is read as Kaldi directories.
    """

    name = "AMI IHM"
    splits = ("train", "dev", "eval")
    kinds = ("audio", "stored")
    layout = (
        "data_root must hold words/, segments/, corpusResources/meetings.xml and <MEETING>/audio/*.wav, "
        "or Kaldi directories train, dev, eval with text and wav.scp or feats.scp"
    )

    def find(self, root: Path, split: str, kind: Kind) -> None:
        if not (root / "words").is_dir():
            Kaldi().find(root, split, kind)
            return
        if kind == "stored":
            raise DataError(f"data_root={root}: stored features need Kaldi directories with text and feats.scp")
        self.need(root / "corpusResources" / "meetings.xml", folders=[root / "segments"])
        self.meetings(root, split)

    def read(self, root: Path, split: str, kind: Kind, drop_empty: bool) -> Sequence[Utterance]:
        if not (root / "words").is_dir():
            return Kaldi().read(root, split, kind, drop_empty)
        path = root / "corpusResources" / "meetings.xml"
        speakers = _speakers(path)
        segments: list[Segment] = []
        for meeting in self.meetings(root, split):
            if meeting not in speakers:
                raise DataError(f"{path}: no meeting {meeting}, which {split} needs")
            for agent, (channel, name) in sorted(speakers[meeting].items()):
                segments += self._read_speaker(root, meeting, agent, channel, name)
        if not segments:
            raise DataError(f"{root}: {split} has no words")
        return segments

    def meetings(self, root: Path, split: str) -> list[str]:
        """The meetings of splits/split_<split>.orig; without it, of the partition.  DataError: none has files."""
        path = root / "splits" / f"split_{split}.orig"
        if path.is_file():
            return list(dict.fromkeys(name for line in read_lines(path) if (name := line.strip())))
        meetings = sorted({path.name.partition(".")[0] for path in (root / "words").glob("[!.]*.words.xml")})
        partition = {"dev": DEV.split(), "eval": EVAL.split()}
        if split in partition:
            chosen = [meeting for meeting in partition[split] if meeting in meetings]
        else:
            chosen = [meeting for meeting in meetings if meeting not in partition["dev"] + partition["eval"]]
        if not chosen:
            raise DataError(f"{root / 'words'}: no meeting of {split} (there: {contents(root / 'words')})")
        return chosen

    def _read_speaker(self, root: Path, meeting: str, agent: str, channel: int, name: str) -> Iterator[Segment]:
        path = root / "segments" / f"{meeting}.{agent}.segments.xml"
        words_path = root / "words" / f"{meeting}.{agent}.words.xml"
        if not path.is_file() and not words_path.is_file():
            return  # a speaker without words
        self.need(path, words_path)
        words = _words(words_path)
        whole = [
            (first, last, [w for w in words if w.start >= first and w.end <= last]) for first, last in _segments(path)
        ]
        outside = {w for w in words if not w.punctuation} - {w for _, _, inside in whole for w in inside}
        noted("word that no segment has in full", str(words_path), len(outside))
        parts = [
            (start, end, clean(part))
            for first, last, inside in whole
            for start, end, part in split_long(inside, first, last)
        ]
        texts = [part for part in parts if part[2]]
        left_out("segment without words", str(path), len(parts) - len(texts))
        if not texts:
            return
        audio = self._audio(root, meeting, channel)
        header = rate, _ = inspect_audio(audio, f"{meeting}, speaker {agent}")
        for start, end, text in texts:
            id = f"AMI_{meeting}_H{channel:02d}_{name}_{round(start * 100):07d}_{round(end * 100):07d}"
            part = excerpt(audio, header, round(start * rate), round(end * rate), str(path), BEYOND)
            yield Segment(id=id, source=text, target=text, **part)

    def _audio(self, root: Path, meeting: str, channel: int) -> Path:
        tail = Path(meeting) / "audio" / f"{meeting}.Headset-{channel}.wav"
        for folder in (root, root / "amicorpus", root / "wav_db"):
            if (folder / tail).is_file():
                return folder / tail
        raise DataError(f"{root / tail} is missing: text without audio ({meeting}, channel {channel}); {self.layout}")

    def sample(self, cache_dir: Path) -> Path:
        return spoken_sample(cache_dir, "meetings")


class Kaldi(Reader):
    """Kaldi-style directories: of train also train_sp, and each also with ihm_ before its name."""

    name = "Kaldi directories"
    splits = ("train", "dev", "eval")
    kinds = ("audio", "stored")
    layout = (
        "data_root must hold train, dev and eval, each with text and wav.scp (audio) or feats.scp (stored features)"
    )

    def folder(self, root: Path, split: str) -> Path:
        """The folder of a split.  Raises DataError where it is missing."""
        names = [split, f"ihm_{split}", *([f"{split}_sp", f"ihm_{split}_sp"] if split == "train" else [])]
        for name in names:
            if (root / name / "text").is_file():
                return root / name
        self.missing(root / split / "text")

    def find(self, root: Path, split: str, kind: Kind) -> None:
        folder = self.folder(root, split)
        self.need(folder / ("wav.scp" if kind == "audio" else "feats.scp"))

    def read(self, root: Path, split: str, kind: Kind, drop_empty: bool) -> Sequence[Utterance]:
        folder = self.folder(root, split)
        texts = table(folder / "text")
        refuse_empty((f"{where} ({id})" for id, (where, text) in texts.items() if not text), drop_empty)
        audio_path, cuts_path = folder / ("feats.scp" if kind == "stored" else "wav.scp"), folder / "segments"
        audio = table(audio_path)
        cuts = table(cuts_path) if kind == "audio" and cuts_path.is_file() else None
        places = audio if cuts is None else cuts
        for id, (where, _) in (texts | places).items():
            if (id in texts) != (id in places):
                lacking = "text" if id in places else (audio_path if cuts is None else cuts_path).name
                raise DataError(f"{where}: {id} has no line in {lacking}; expected one for each id")
        if kind == "stored":
            paths = {id: root / _file(*line) for id, line in audio.items()}
            return [Stored(id=id, source=text, target=text, path=paths[id]) for id, (_, text) in texts.items()]
        if (channels := folder / "reco2file_and_channel").is_file():
            self._refuse_channels(root, table(channels), audio)
        headers: dict[str, tuple[int, int]] = {}
        segments = []
        for id, (_, text) in texts.items():
            where, rest = places[id]
            if cuts is None:
                part = recording(root / _file(where, rest), where)
            else:
                try:
                    name, first, last = rest.split()
                    start, end = float(first), float(last)
                    named_in, wav = audio[name]
                except (LookupError, ValueError):
                    start = math.nan
                if not (0 <= start < math.inf and (start < end < math.inf or end == -1)):
                    raise DataError(f"{where}: expected '<id> <recording of wav.scp> <start> <end>' in seconds")
                if name not in headers:
                    headers[name] = inspect_audio(root / _file(named_in, wav), named_in)
                rate, length = headers[name]
                last_sample = length if end == -1 else round(end * rate)
                part = excerpt(root / wav, headers[name], round(start * rate), last_sample, where, ROUNDED)
            segments.append(Segment(id=id, source=text, target=text, **part))
        return segments

    @staticmethod
    def _refuse_channels(root: Path, channels: Table, audio: Table) -> None:
        """Raise DataError where a channel of a recording with several is named, because they are averaged."""
        for name in filter(audio.__contains__, channels):
            path = root / _file(*audio[name])
            with reading(path, f"a recording, named in {audio[name][0]}"):
                count = soundfile.info(path).channels
            if count > 1:
                why = f"a channel of {path.name}, which has {count}"
                raise DataError(f"{channels[name][0]}: {why}; write each into a file, because channels are averaged")


def table(path: Path) -> Table:
    """The lines of a Kaldi table by their first word: file and line, and the rest.  DataError: it occurs twice."""
    lines: dict[str, tuple[str, str]] = {}
    for number, line in enumerate(trimmed([*read_lines(path)], 0), 1):
        id, rest = (*line.split(None, 1), "", "")[:2]  # blanks or tabs
        if not id or id in lines:
            raise DataError(f"{path} line {number}: expected one line for each id, not {line!r:.60}")
        lines[id] = f"{path} line {number}", rest.strip()
    return lines


def _file(where: str, entry: str) -> str:
    """The path in a line of an .scp file.  DataError: the line names a command, or a place in an archive."""
    if entry.startswith("|") or entry.endswith("|"):
        raise DataError(f"{where}: commands are not run ({entry:.60}); write the output to a file, and name that file")
    if re.search(r"\.ark(:\d+)?(\[.*\])?$", entry):
        raise DataError(f"{where}: archives are not read ({entry:.60}); name a file for each id (.wav or .npy)")
    return entry


def clean(words: Sequence[_Word]) -> str:
    """The text of a segment as the ESPnet and Kaldi recipes prepare it."""
    text = " ".join(w.text for w in words if not w.punctuation).upper()
    text = " ".join(text.replace("-", " ").replace("_", ". ").split())
    return re.sub(r"\b(UH) (HUH)\b", r"\1-\2", re.sub(r"\b(MM) (HMM)\b", r"\1-\2", text))


def split_long(words: Sequence[_Word], start: float, end: float) -> list[tuple[float, float, list[_Word]]]:
    """Split a segment of more than `MAX_WORDS` words after full stops, and pieces that are still longer after commas.

    Returns:
        Start and end in seconds, and words, of each piece.
    """
    pieces = [list(words)]
    for signs in (".?!", ","):
        pieces = [part for piece in pieces for part in _cut(piece, signs)]
    if len(pieces) == 1:
        return [(start, end, pieces[0])]
    return [(piece[0].start, piece[-1].end, piece) for piece in pieces if piece]


def _cut(words: list[_Word], signs: str) -> list[list[_Word]]:
    if sum(not w.punctuation for w in words) <= MAX_WORDS:
        return [words]
    pieces: list[list[_Word]] = [[]]
    for word in words:
        pieces[-1].append(word)
        if word.punctuation and word.text in signs:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _words(path: Path) -> list[_Word]:
    words = []
    with reading(path, "an XML file with <w starttime= endtime=> in seconds"):
        for element in ElementTree.parse(path).iter("w"):
            times = [float(time) for key in ("starttime", "endtime") if (time := element.get(key))]
            text = (element.text or "").strip()
            if text and len(times) < 2:
                noted("word without times, which no segment has", str(path))
            elif text:
                words.append(_Word(text, times[0], times[1], element.get("punc") == "true"))
    return words


def _segments(path: Path) -> list[tuple[float, float]]:
    segments = []
    with reading(path, "an XML file with <segment transcriber_start= transcriber_end=> in seconds"):
        for i, element in enumerate(ElementTree.parse(path).iter("segment"), 1):
            start, end = (float(element.get(key, "nan")) for key in ("transcriber_start", "transcriber_end"))
            if not start <= end:
                raise ValueError(f"segment {i} is from {start} to {end} s")
            segments.append((start, end))
    return segments


def _speakers(path: Path) -> dict[str, dict[str, tuple[int, str]]]:
    """meeting -> agent -> (channel, global name)."""
    with reading(path, "an XML file with <meeting observation=> <speaker nxt_agent= channel= global_name=>"):
        return {
            meeting.get("observation", ""): {
                speaker.attrib["nxt_agent"]: (int(speaker.attrib["channel"]), speaker.get("global_name", ""))
                for speaker in meeting.iter("speaker")
            }
            for meeting in ElementTree.parse(path).iter("meeting")
        }

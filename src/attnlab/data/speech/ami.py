"""Readers of the AMI meeting corpus, headset audio: the published layout, and Kaldi-style directories of any corpus.

<root>/words/<MEETING>.<A..E>.words.xml          <w starttime= endtime= [punc="true"]>word</w>, among other elements
<root>/segments/<MEETING>.<A..E>.segments.xml    <segment transcriber_start= transcriber_end=>
<root>/corpusResources/meetings.xml              <meeting observation=> <speaker nxt_agent= channel= global_name=>
<root>/<MEETING>/audio/<MEETING>.Headset-<channel>.wav    (or amicorpus/, wav_db/ between)
<root>/splits/split_{train,dev,eval}.orig        meetings, one per line; without them the full-corpus-ASR partition

<root>/<split>/text             <id> WORDS
<root>/<split>/wav.scp          <recording> <path>      with segments: <id> <recording> <start> <end>
<root>/<split>/feats.scp        <id> <path of .npy or .mfc>
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from attnlab.data.corpus import (
    Kind,
    Reader,
    Segment,
    Stored,
    Utterance,
    excerpt,
    inspect_audio,
    recording,
    refuse_empty,
)
from attnlab.data.files import contents, read_lines, reading
from attnlab.errors import DataError

# The full-corpus-ASR partition, as the published recipes have it: all other meetings are for training.
DEV = "ES2011a ES2011b ES2011c ES2011d IB4001 IB4002 IB4003 IB4004 IB4010 IB4011 IS1008a IS1008b IS1008c IS1008d TS3004a TS3004b TS3004c TS3004d"  # noqa: E501
EVAL = "EN2002a EN2002b EN2002c EN2002d ES2004a ES2004b ES2004c ES2004d IS1009a IS1009b IS1009c IS1009d TS3003a TS3003b TS3003c TS3003d"  # noqa: E501

BEYOND = 1.0  # seconds that a segment may end after its recording
ROUNDED = 0.05  # the same in Kaldi's `segments`, whose times are written with two digits
MAX_WORDS = 30  # longer segments are split at full stops, then at commas


@dataclass(frozen=True)
class _Word:
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
        self.need(root / "corpusResources" / "meetings.xml", folder=root / "segments")
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
        """The meetings of a split.

        They are those of splits/split_<split>.final or .orig; without these files, those of the partition that exist.

        Raises:
            DataError: the split has no meetings.
        """
        for suffix in ("final", "orig"):
            path = root / "splits" / f"split_{split}.{suffix}"
            if path.is_file():
                return list(dict.fromkeys(name for line in read_lines(path) if (name := line.strip())))
        meetings = sorted({path.name.partition(".")[0] for path in (root / "words").glob("*.words.xml")})
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
        texts = [
            (start, end, text)
            for first, last in _segments(path)
            for start, end, part in split_long([w for w in words if w.start >= first and w.end <= last], first, last)
            if (text := clean(part))
        ]
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
        from attnlab.data.samples.spoken import write_meetings

        return write_meetings(cache_dir)


class Kaldi(Reader):
    """Kaldi-style directories.

    The folder of a split may also be named ihm_<split>, that of train also train_sp or ihm_train_sp.
    """

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
        for id, (where, text) in texts.items():
            refuse_empty(text, f"{where} ({id})", drop_empty)
        audio_path, cuts_path = folder / ("feats.scp" if kind == "stored" else "wav.scp"), folder / "segments"
        audio = table(audio_path)
        cuts = table(cuts_path) if kind == "audio" and cuts_path.is_file() else None
        same_ids((folder / "text", texts), (audio_path, audio) if cuts is None else (cuts_path, cuts))
        if kind == "stored":
            paths = {id: root / path for id, (_, path) in audio.items()}
            return [Stored(id=id, source=text, target=text, path=paths[id]) for id, (_, text) in texts.items()]
        for id, (where, path) in audio.items():
            if path.endswith("|"):
                raise DataError(f"{where}: {id} is a command, which is not run; expected the path of a recording")
        headers: dict[str, tuple[int, int]] = {}

        def part(id: str) -> dict[str, Any]:
            if cuts is None:
                where, path = audio[id]
                return recording(root / path, where)
            where, rest = cuts[id]
            name, *times = (*rest.split(), "", "")[:3]
            start, end = map(_seconds, times)
            if not 0 <= start < end < math.inf:
                raise DataError(f"{where}: expected '<id> <recording> <start> <end>' in seconds")
            if name not in audio:
                raise DataError(f"{where}: recording {name} is not in wav.scp")
            wav = root / audio[name][1]
            if name not in headers:
                headers[name] = inspect_audio(wav, audio[name][0])
            rate, _ = headers[name]
            return excerpt(wav, headers[name], round(start * rate), round(end * rate), where, ROUNDED)

        return [Segment(id=id, source=text, target=text, **part(id)) for id, (_, text) in texts.items()]


Table = dict[str, tuple[str, str]]  # by id: file and line, and the rest of the line


def table(path: Path) -> Table:
    """The lines of a Kaldi table.  Raises DataError: an empty line, or a first word that occurs twice."""
    lines: Table = {}
    for number, line in enumerate(read_lines(path), 1):
        where = f"{path} line {number}"
        if not line.strip():
            raise DataError(f"{where}: empty line")
        id, *others = line.split(None, 1)  # blanks or tabs
        if id in lines:
            raise DataError(f"{where}: {id} occurs twice; expected one line for each id")
        lines[id] = where, others[0].strip() if others else ""
    return lines


def same_ids(one: tuple[Path, Table], other: tuple[Path, Table]) -> None:
    """Raise DataError where an id is in one of two files only."""
    for (_, table), (path, lines) in ((one, other), (other, one)):
        for id, (where, _) in table.items():
            if id not in lines:
                raise DataError(f"{where}: {id} has no line in {path.name}; expected one for each id")


def clean(words: Sequence[_Word]) -> str:
    """The text of a segment as the ESPnet and Kaldi recipes prepare it."""
    text = " ".join(w.text for w in words if not w.punctuation).upper()
    text = " ".join(text.replace("-", " ").replace("_", ". ").split())
    return re.sub(r"\b(UH) (HUH)\b", r"\1-\2", re.sub(r"\b(MM) (HMM)\b", r"\1-\2", text))


def split_long(words: Sequence[_Word], start: float, end: float) -> list[tuple[float, float, list[_Word]]]:
    """Split a segment of more than `MAX_WORDS` words after full stops, and pieces that are still longer after commas.

    Args:
        words: of the segment.
        start, end: of the segment, in seconds.

    Returns:
        Start, end and words of each piece.
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
    for element in _xml(path).iter("w"):
        times = [element.get(key, "") for key in ("starttime", "endtime")]
        start, end = map(_seconds, times)
        text = (element.text or "").strip()
        if any(time and not math.isfinite(seconds) for time, seconds in zip(times, (start, end), strict=True)):
            raise DataError(f"{path}: the word {text!r} has the times {times}; expected seconds, or none")
        if text and math.isfinite(start) and math.isfinite(end):  # some words have no times
            words.append(_Word(text, start, end, element.get("punc") == "true"))
    return words


def _segments(path: Path) -> Iterator[tuple[float, float]]:
    for i, element in enumerate(_xml(path).iter("segment"), 1):
        start, end = (_seconds(element.get(key, "")) for key in ("transcriber_start", "transcriber_end"))
        if not -math.inf < start <= end < math.inf:
            raise DataError(f"{path}: segment {i} is from {start} to {end} s; expected its start before its end")
        yield start, end


def _speakers(path: Path) -> dict[str, dict[str, tuple[int, str]]]:
    """meeting -> agent -> (channel, global name)."""
    speakers: dict[str, dict[str, tuple[int, str]]] = {}
    for meeting in _xml(path).iter("meeting"):
        agents = speakers.setdefault(meeting.get("observation", ""), {})
        for speaker in meeting.iter("speaker"):
            agent, channel, name = (speaker.get(key, "") for key in ("nxt_agent", "channel", "global_name"))
            if not agent or not channel.isdigit():
                raise DataError(f"{path}: a speaker of {meeting.get('observation')} has no nxt_agent or no channel")
            agents[agent] = (int(channel), name)
    return speakers


def _xml(path: Path) -> ElementTree.Element:
    with reading(path, "an XML file"):
        return ElementTree.parse(path).getroot()


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan

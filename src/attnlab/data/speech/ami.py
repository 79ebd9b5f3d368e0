"""Readers of the AMI meeting corpus, headset audio: its own layout, and Kaldi-style directories of any corpus.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from xml.etree import ElementTree
from xml.parsers.expat import errors as expat

from attnlab.data.corpus import Kind, Reader, Segment, Stored, Utterance, inspect_audio, read_lines, refuse_empty
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
            raise DataError(
                f"data_root={root}: stored features are read from Kaldi directories with text and feats.scp"
            )
        self.need(root / "corpusResources" / "meetings.xml", folder=root / "segments")
        self.meetings(root, split)

    def read(self, root: Path, split: str, kind: Kind, drop_empty: bool) -> Sequence[Utterance]:
        if not (root / "words").is_dir():
            return Kaldi().read(root, split, kind, drop_empty)
        speakers = _speakers(root / "corpusResources" / "meetings.xml")
        found: list[Segment] = []
        for meeting in self.meetings(root, split):
            if meeting not in speakers:
                raise DataError(
                    f"{root / 'corpusResources' / 'meetings.xml'}: no meeting {meeting}, which {split} needs"
                )
            for agent, (channel, name) in sorted(speakers[meeting].items()):
                found += self._read_speaker(root, meeting, agent, channel, name)
        if not found:
            raise DataError(f"{root}: {split} has no words")
        return found

    def meetings(self, root: Path, split: str) -> list[str]:
        """The meetings of a split.

        They are those of splits/split_<split>.final or .orig; without these files, those of the partition that exist.

        Raises:
            DataError: the split has no meetings.
        """
        for suffix in ("final", "orig"):
            path = root / "splits" / f"split_{split}.{suffix}"
            if path.is_file():
                return list(dict.fromkeys(line for line in read_lines(path) if line))
        there = sorted({path.name.partition(".")[0] for path in (root / "words").glob("*.words.xml")})
        held = {"dev": DEV.split(), "eval": EVAL.split()}
        chosen = held.get(split) or [m for m in there if m not in held["dev"] + held["eval"]]
        chosen = [meeting for meeting in chosen if meeting in there]
        if not chosen:
            raise DataError(f"{root / 'words'}: no meeting of {split} (found {', '.join(there[:8]) or 'nothing'})")
        return chosen

    def _read_speaker(self, root: Path, meeting: str, agent: str, channel: int, name: str) -> list[Segment]:
        path = root / "segments" / f"{meeting}.{agent}.segments.xml"
        words_path = root / "words" / f"{meeting}.{agent}.words.xml"
        if not path.is_file() and not words_path.is_file():
            return []  # a speaker without words
        for one, other in ((path, words_path), (words_path, path)):
            if not one.is_file():
                raise DataError(f"{one} is missing, but {other.parent.name}/{other.name} exists; a speaker needs both")
        words = _words(words_path)
        pieces = [
            piece
            for start, end in _segments(path)
            for piece in split_long([w for w in words if w.start >= start and w.end <= end], start, end)
        ]
        texts = [(start, end, clean(part)) for start, end, part in pieces]
        texts = [x for x in texts if x[2]]
        if not texts:
            return []
        audio = self._audio(root, meeting, channel)
        rate, length = inspect_audio(audio, f"{meeting}, speaker {agent}")
        found = []
        for start, end, text in texts:
            first, last = round(start * rate), min(round(end * rate), length)
            if first >= last or end > length / rate + BEYOND:
                raise DataError(
                    f"{path}: a segment from {start:.2f} to {end:.2f} s, but {audio.name} is {length / rate:.2f} s long"
                )
            id = f"AMI_{meeting}_H{channel:02d}_{name}_{round(start * 100):07d}_{round(end * 100):07d}"
            found.append(spoken(id, text, audio, rate, first, last))
        return found

    def _audio(self, root: Path, meeting: str, channel: int) -> Path:
        tail = Path(meeting) / "audio" / f"{meeting}.Headset-{channel}.wav"
        for folder in (root, root / "amicorpus", root / "wav_db"):
            if (folder / tail).is_file():
                return folder / tail
        raise DataError(f"{root / tail} is missing: text without audio ({meeting}, channel {channel}); {self.layout}")

    def sample(self, cache_dir: Path) -> Path:
        from attnlab.data.samples import write_meetings

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
        texts = {id: (line, text) for line, id, text in table(folder / "text")}
        for id, (line, text) in texts.items():
            refuse_empty(text, f"{folder / 'text'} line {line} ({id})", drop_empty)
        if kind == "stored":
            paths = {id: (line, root / path) for line, id, path in table(folder / "feats.scp")}
            same_ids(folder / "text", texts, folder / "feats.scp", paths, "features")
            return [Stored(id=id, source=text, target=text, path=paths[id][1]) for id, (_, text) in texts.items()]
        audio = {id: (line, path) for line, id, path in table(folder / "wav.scp")}
        for id, (line, path) in audio.items():
            if path.endswith("|"):
                raise DataError(
                    f"{folder / 'wav.scp'} line {line}: {id} is a command, and commands are not run; write the audio "
                    "to a file and give its path"
                )
        if (folder / "segments").is_file():
            return list(self._segments(root, folder, texts, audio))
        same_ids(folder / "text", texts, folder / "wav.scp", audio, "audio")
        found = []
        for id, (_, text) in texts.items():
            rate, length = inspect_audio(root / audio[id][1], f"{folder / 'wav.scp'} line {audio[id][0]}")
            found.append(spoken(id, text, root / audio[id][1], rate, 0, length))
        return found

    def _segments(
        self, root: Path, folder: Path, texts: dict[str, tuple[int, str]], audio: dict[str, tuple[int, str]]
    ) -> Iterator[Segment]:
        path = folder / "segments"
        rows = {id: (line, rest) for line, id, rest in table(path)}
        same_ids(folder / "text", texts, path, rows, "a segment")
        headers: dict[str, tuple[int, int]] = {}
        for id, (_, text) in texts.items():
            line, rest = rows[id]
            parts = rest.split()
            numbers = [_seconds(part) for part in parts[1:3]]
            if len(parts) < 3 or not all(map(math.isfinite, numbers)) or not 0 <= numbers[0] < numbers[1]:
                raise DataError(f"{path} line {line}: expected '<id> <recording> <start> <end>' in seconds")
            if parts[0] not in audio:
                raise DataError(f"{path} line {line}: recording {parts[0]} is not in wav.scp")
            wav = root / audio[parts[0]][1]
            if parts[0] not in headers:
                headers[parts[0]] = inspect_audio(wav, f"{folder / 'wav.scp'} line {audio[parts[0]][0]}")
            rate, length = headers[parts[0]]
            first, last = round(numbers[0] * rate), round(numbers[1] * rate)
            if first >= length or last > length + ROUNDED * rate:
                does = f"starts at {parts[1]}" if first >= length else f"ends at {parts[2]}"
                raise DataError(f"{path} line {line}: it {does} s, but {wav.name} is {length / rate:.2f} s long")
            last = min(last, length)
            if first >= last:
                raise DataError(f"{path} line {line}: it has no samples at {rate} Hz; lengthen it, or leave it out")
            yield spoken(id, text, wav, rate, first, last)


def spoken(id: str, text: str, audio: Path, rate: int, first: int, last: int) -> Segment:
    """The utterance of samples `first` to `last` (exclusive) of a recording with `rate` samples per second.

    Args:
        id: of the utterance.
        text: its transcript.
        audio: the file of the recording.
        rate: samples per second (Hz).
        first: number of its first sample.
        last: number of the sample after its last.
    """
    return Segment(id=id, source=text, target=text, audio=audio, rate=rate, start=first, num_samples=last - first)


def table(path: Path) -> Iterator[tuple[int, str, str]]:
    """The rows of a Kaldi table.

    Args:
        path: the file.

    Yields:
        Line number, first word, rest of the line.

    Raises:
        DataError: an empty line, or a first word that occurs twice.
    """
    seen: set[str] = set()
    for number, line in enumerate(read_lines(path), 1):
        if not line:
            raise DataError(f"{path} line {number}: empty line")
        id, *others = line.split(None, 1)  # blanks or tabs
        if id in seen:
            raise DataError(f"{path} line {number}: {id} occurs twice; expected one line for each id")
        seen.add(id)
        yield number, id, others[0] if others else ""


def same_ids(
    path: Path, texts: Mapping[str, tuple[int, str]], other: Path, found: Mapping[str, tuple[int, object]], what: str
) -> None:
    """Raise DataError where an id is in one of two files only.

    Args:
        path: the file of the texts.
        texts: line and text of each id.
        other: the other file.
        found: line and value of each id in it.
        what: what a line of the other file holds, for the error.
    """
    for id, (line, _) in texts.items():
        if id not in found:
            raise DataError(f"{path} line {line}: {id} has text, but {other.name} has no line for it; expected {what}")
    for id, (line, _) in found.items():
        if id not in texts:
            raise DataError(f"{other} line {line}: {id} has no line in {path.name}; expected its text")


def clean(words: Sequence[_Word]) -> str:
    """The text of a segment as the ESPnet and Kaldi recipes prepare it.

    Args:
        words: in their order.
    """
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
    found = []
    for element in _xml(path).iter("w"):
        times = [element.get(key, "") for key in ("starttime", "endtime")]
        start, end = map(_seconds, times)
        text = (element.text or "").strip()
        if any(time and not math.isfinite(seconds) for time, seconds in zip(times, (start, end), strict=True)):
            raise DataError(f"{path}: the word {text!r} has the times {times}; expected seconds, or none")
        if text and math.isfinite(start) and math.isfinite(end):  # some words have no times
            found.append(_Word(text, start, end, element.get("punc") == "true"))
    return found


def _segments(path: Path) -> list[tuple[float, float]]:
    found = []
    for i, element in enumerate(_xml(path).iter("segment"), 1):
        start, end = (_seconds(element.get(key, "")) for key in ("transcriber_start", "transcriber_end"))
        if not (math.isfinite(start) and math.isfinite(end)):
            raise DataError(f"{path}: segment {i} has no transcriber_start and transcriber_end in seconds")
        if end < start:
            raise DataError(f"{path}: segment {i} ends at {end} s, before its start at {start} s")
        found.append((start, end))
    return found


def _speakers(path: Path) -> dict[str, dict[str, tuple[int, str]]]:
    """meeting -> agent -> (channel, global name)."""
    found: dict[str, dict[str, tuple[int, str]]] = {}
    for meeting in _xml(path).iter("meeting"):
        agents = found.setdefault(meeting.get("observation", ""), {})
        for speaker in meeting.iter("speaker"):
            agent, channel, name = (speaker.get(key, "") for key in ("nxt_agent", "channel", "global_name"))
            if not agent or not channel.isdigit():
                raise DataError(f"{path}: a speaker of {meeting.get('observation')} has no nxt_agent or no channel")
            agents[agent] = (int(channel), name)
    return found


def _xml(path: Path) -> ElementTree.Element:
    try:
        return ElementTree.parse(path).getroot()
    except ElementTree.ParseError as error:
        line, _ = error.position
        _broken(path, line, expat.messages.get(error.code, str(error)))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except (LookupError, ValueError) as error:
        raise DataError(f"{path}: malformed XML ({error})") from error


def _broken(path: Path, line: int, reason: str) -> NoReturn:
    raise DataError(f"{path} line {line}: malformed XML ({reason})")


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan

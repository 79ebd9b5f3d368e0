"""The length of a recording beside the one that its file promises.  libsndfile reads what there is, and does not tell.

WAV, AIFF, AU, W64, RF64: the sizes of chunks, which libsndfile's log compares with the file's.  SPHERE: `sample_count`.
MP3: the number of bytes in a Xing header.  Ogg: the last page is marked, and is of the first page's stream.
"""

import re
from pathlib import Path

import soundfile

from attnlab.errors import DataError

ENDLESS = 0x7FFF_F000  # from this size on, programs that write to a pipe mean that they do not know it
UNKNOWN = 2**62  # samples, of a FLAC file that was written to a pipe
SIZES = re.compile(r"(?:data|SSND|Data Size|riff) *: (\d+) \(should be (\d+)\)")  # the header's, and the file's
FRAMES = re.compile(r"frame count \d+ does not match value from 'ds64' chunk of (\d+)")
XING = re.compile(
    rb"(?:Xing|Info)...([\x02\x03\x06\x07\x0a\x0b\x0e\x0f])", re.DOTALL
)  # one that has the number of bytes


def lengths(path: Path) -> tuple[int, int, str]:
    """Samples per second, samples that can be read, and how the file contradicts them; "": it does not.

    Raises:
        DataError: the header does not say how long the recording is.
        soundfile.LibsndfileError: it cannot be read.
    """
    info = soundfile.info(path)
    rate, length, why = info.samplerate, info.frames, ""
    if length >= UNKNOWN:
        raise DataError(f"{path}: its header does not say how long it is; convert it again, into a file")
    promised = length
    if (sizes := SIZES.findall(info.extra_info)) and 0 < (actual := int(sizes[-1][1])) < int(sizes[-1][0]) < ENDLESS:
        promised = length * int(sizes[-1][0]) // actual
    elif frames := FRAMES.search(info.extra_info):
        promised = int(frames[1])
    elif info.format == "NIST":
        promised = _sphere(path) or length
    elif info.format == "MP3" and (ratio := _mp3(path)) != 1:
        length = len(soundfile.read(path, dtype="int16")[0])
        why = f"about {length * ratio / rate:.2f} s by its size" if ratio > 1 else ""
    elif info.format == "OGG":
        why = _ogg(path)
    if promised != length:
        why = f"its header says {promised / rate:.2f} s"
    return rate, length, f"{length / rate:.2f} s, {why}" if why else ""


def _sphere(path: Path) -> int:
    """The number of samples in the header; 0: it has none."""
    with path.open("rb") as file:
        count = re.search(rb"\nsample_count -i (\d+)", file.read(1024))
    return int(count[1]) if count else 0


def _mp3(path: Path) -> float:
    """The bytes of the stream as a multiple of those that its header says; 1: about as many, or it does not say."""
    with path.open("rb") as file:
        begin = file.read(10)
        tag = sum((byte & 127) << 7 * (3 - i) for i, byte in enumerate(begin[6:10])) + 10 if begin[:3] == b"ID3" else 0
        file.seek(tag)
        data = file.read(300)
    if not (header := XING.search(data)):
        return 1
    place = header.end() + 4 * (header[1][0] & 1)  # behind the number of frames
    size, actual = int.from_bytes(data[place : place + 4], "big"), path.stat().st_size - tag
    return 1 if not size or 0 <= actual - size <= max(0.01 * size, 4096) else actual / size  # tags at the end


def _ogg(path: Path) -> str:
    with path.open("rb") as file:
        first = file.read(18)
        file.seek(max(0, path.stat().st_size - 2**16 - 300))  # a page has less than 64 KiB
        end = file.read()
    last = end[end.rfind(b"OggS") :]
    if last[14:18] != first[14:18]:
        return "the first of several streams"
    return "" if last[5:6] and last[5] & 4 else "and the file ends before its stream does"

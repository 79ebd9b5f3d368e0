"""The length of a recording beside the one that its file promises.  libsndfile reads what there is, and does not tell.

WAV, AIFF, AU, W64, RF64, CAF: the sizes of chunks, which libsndfile's log compares with the file's.  VOC: the size of
its block.  SPHERE: `sample_count`.  MP3: the number of bytes in a Xing header.  Ogg: the last page is marked, and is of
the first page's stream.  FLAC: the number in the last frame, https://www.rfc-editor.org/rfc/rfc9639#section-9.1.
"""

import re
from pathlib import Path

import soundfile

from attnlab.errors import DataError

ENDLESS = 0x7FFF_F000  # from this size on, programs that write to a pipe mean that they do not know it
UNKNOWN = 2**62  # samples, of a FLAC file that was written to a pipe
SIZES = re.compile(r"(?:data|SSND|Data Size|riff) *: (\d+) \(should be (\d+)\)")  # the header's, and the file's
FRAMES = re.compile(r"frame count \d+ does not match value from 'ds64' chunk of (\d+)")
CHUNKS = re.compile(r"(?mi)^[ *]*(?!RIFF|FORM)(data size|\w{3,4}) *: (\d+)")
VOC = re.compile(r"Extended II : (\d+).*bit width *: (\d+)\s+channels *: (\d+).*Seems to be", re.DOTALL)
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
    elif info.format == "FLAC":
        end = _flac(path) or length
        why = f"its stream has {end / rate:.2f} s" if end > length else ""
        length = min(end, length)
    elif block := VOC.search(info.extra_info):
        size, bits, channels = map(int, block.groups())
        promised = (size - 12) * 8 // (bits * channels)
    elif (ratio := _by_size(info.extra_info, path.stat().st_size)) != 1:
        if info.format == "W64":  # it is read to the end of the file
            promised = int(length / ratio)
        else:
            why = f"about {length * ratio / rate:.2f} s by its size"
    if promised != length:
        why = f"its header says {promised / rate:.2f} s"
    return rate, length, f"{length / rate:.2f} s, {why}" if why else ""


def _by_size(log: str, actual: int) -> float:
    """The file's bytes as a multiple of those of its chunks, in libsndfile's log; 1: about as many, or not known."""
    sizes = {name.lower(): int(size) for name, size in CHUNKS.findall(log)}
    data = next((sizes[name] for name in ("data size", "ssnd", "data") if name in sizes), 0)
    rest = actual - sum(size for size in sizes.values() if size <= actual)
    return 1 if not 0 < data <= actual or rest <= max(0.01 * actual, 4096) else 1 + rest / data  # tags at the end


def _flac(path: Path) -> int:
    """The samples of a stream up to the end of its last frame, which may be cut; 0: it has no frame."""
    with path.open("rb") as file:
        begin = file.read(18)
        if begin[:4] != b"fLaC":
            return 0
        size, frame = int.from_bytes(begin[10:12], "big"), int.from_bytes(begin[15:18], "big")
        file.seek(max(42, path.stat().st_size - max(2 * frame, 2**16)))
        data = file.read()
    for place in range(len(data) - 6, -1, -1):
        if data[place] == 0xFF and data[place + 1] & 0xFE == 0xF8 and (samples := _frame(data[place : place + 16])):
            number, block = samples
            return (number if data[place + 1] & 1 else number * size) + block
    return 0


def _frame(header: bytes) -> tuple[int, int] | None:
    """The number in a FLAC frame's header, and the samples of the frame; None: it is no header."""
    block, rate = header[2] >> 4, header[2] & 15
    more = next((i for i in range(8) if not header[4] << i & 128), 8)  # bytes of the number, as in UTF-8
    at = 4 + max(1, more)
    fields = at + (0, 1, 2)[(block == 6) + 2 * (block == 7)]
    end = fields + (1 if rate == 12 else 2 if rate in (13, 14) else 0)
    if not block or rate == 15 or more in (1, 8) or end >= len(header) or _crc8(header[:end]) != header[end]:
        return None
    number = header[4] & (0x7F >> more)
    for byte in header[5:at]:
        number = number << 6 | byte & 0x3F
    if block in (6, 7):
        return number, int.from_bytes(header[at:fields], "big") + 1
    return number, 192 if block == 1 else 576 << block - 2 if block < 6 else 256 << block - 8


def _crc8(data: bytes) -> int:
    check = 0
    for byte in data:
        check ^= byte
        for _ in range(8):
            check = (check << 1) ^ (0x107 if check & 0x80 else 0)
    return check


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

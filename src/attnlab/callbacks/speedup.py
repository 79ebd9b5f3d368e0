"""Speed of decoding against another run: `baseline=RUN`.

A ratio of two measurements means something only if both were made in the same way, so the protocols must be equal.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnlab.config.build import at
from attnlab.errors import DataError
from attnlab.run import record as records
from attnlab.run.record import NOT_RUN, RECORD

# What two runs must share, with the option that changes it.
PROTOCOL = {
    "corpus": "data_root",
    "environment.device": "hardware",
    "environment.threads": "OMP_NUM_THREADS",
    "inference.dtype": "hardware.precision",
    "inference.beam": "task.decode.beam",
    "inference.batch": "task.decode_max_frames",
    "inference.protocol": "hardware.devices",
}
RATIOS = {  # name in `speedup` -> value in the record, and whether more is better
    "seconds": ("inference.seconds", False),
    "tokens_per_second": ("inference.tokens_per_second", True),
    "images_per_second": ("inference.images_per_second", True),
    "peak_memory": ("inference.peak_memory_mib", False),
    "cache_bytes": ("kv_cache.bytes_measured", False),
}
NAMES = ("command", "started", "task", "attention", "stride", "rank", "compress", "scale", "seed")


def read_baseline(place: str) -> dict[str, Any]:
    """The record in a run directory, or in the directory of a file.

    Raises:
        DataError: it is missing, not readable, or of a run that measured no decoding.
    """
    path = Path(place).expanduser()
    record = records.recorded(path if path.is_dir() else path.parent)
    status, seconds = record.get("status", "unknown"), at(record, "inference.seconds", NOT_RUN)
    if status != "finished" or seconds == NOT_RUN:
        raise DataError(
            f"baseline={place}: expected the directory of a finished run that scored its test set, with {RECORD}; its "
            f"status is {status}, its inference.seconds is {seconds}"
        )
    return record


def require_same_protocol(record: Mapping[str, Any], baseline: Mapping[str, Any], *, measured: bool) -> None:
    """DataError for unlike measurements. `measured`: False before scoring, when not everything is known yet."""
    for key, option in PROTOCOL.items():
        value, other = _pair(record, baseline, key)
        if key == "corpus" and NOT_RUN not in (fingerprints := _pair(record, baseline, "identity.corpus")):
            value, other = fingerprints
        if value != other and (measured or value != NOT_RUN):
            raise DataError(
                f"baseline: {key} differs, so the two runs cannot be compared: this run has {value}, the baseline "
                f"{other}; change {option}, or measure the baseline again"
            )


def speedup(record: Mapping[str, Any], baseline: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The section `inference.speedup`: which run this one is compared with, and ratios, above 1 if this one is better.

    DataError: the protocols differ.
    """
    require_same_protocol(record, baseline, measured=True)
    about = {name: baseline.get(name) for name in NAMES}
    ratios = {}
    for name, (key, more) in RATIOS.items():
        if name == "peak_memory" and record.get("mode") != baseline.get("mode"):
            continue  # a process that has trained before it scores holds more
        value, other = _pair(record, baseline, key)
        if all(isinstance(number, int | float) and number > 0 for number in (value, other)):
            ratios[name] = round(value / other if more else other / value, 4)
    return {"baseline": {"path": place, "run": at(baseline, "identity.run"), **about}, **ratios}


def _pair(record: Mapping[str, Any], baseline: Mapping[str, Any], key: str) -> tuple[Any, Any]:
    """The values of a dotted key in both, or NOT_RUN."""
    return at(record, key, NOT_RUN), at(baseline, key, NOT_RUN)

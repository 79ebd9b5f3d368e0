"""How many times faster a run decodes than another one: `baseline=RUN`.

A ratio of two measurements means something only if both were made in the same way, so the protocols must be equal.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnlab.errors import DataError
from attnlab.run.record import NOT_RUN

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
    """The record in a run directory or a file.

    Raises:
        DataError: it is missing, not readable, or of a run that measured no decoding.
    """
    path = Path(place).expanduser()
    path = path / "record.json" if path.is_dir() else path
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        seconds = record["inference"]["seconds"]
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
        raise DataError(f"baseline={place}: {path.name} {reason}; give a run directory") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"baseline={place}: {path.name} is not the record of a run; give a run directory") from error
    if record.get("status") != "finished" or seconds == NOT_RUN:
        raise DataError(
            f"baseline={place}: expected a finished run that scored its test set; its status is "
            f"{record.get('status')}, its inference.seconds is {seconds}"
        )
    return record


def require_same_protocol(record: Mapping[str, Any], baseline: Mapping[str, Any], *, measured: bool) -> None:
    """Refuse a comparison of unlike measurements.

    Args:
        measured: True: everything must be known and equal. False: before scoring, what is not known yet is passed over.

    Raises:
        DataError: names the first difference.
    """
    for key, option in PROTOCOL.items():
        pair = _corpora(record, baseline) if key == "corpus" else (_value(record, key), _value(baseline, key))
        if pair[0] != pair[1] and (measured or pair[0] != NOT_RUN):
            raise DataError(
                f"baseline: {key} differs, so the two runs cannot be compared: this run has {pair[0]}, the baseline "
                f"{pair[1]}; change {option}, or measure the baseline again"
            )


def speedup(record: Mapping[str, Any], baseline: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The section `inference.speedup`: which run this one is compared with, and ratios, above 1 if this one is better.

    Raises:
        DataError: the protocols differ.
    """
    require_same_protocol(record, baseline, measured=True)
    about = {name: baseline.get(name) for name in NAMES}
    identity = baseline.get("identity", {}).get("run") or baseline.get("config_hash")
    ratios = {}
    for name, (key, more) in RATIOS.items():
        if name == "peak_memory" and record.get("mode") != baseline.get("mode"):
            continue  # a process that has trained before it scores holds more
        value, other = _value(record, key), _value(baseline, key)
        if _positive(value) and _positive(other):
            ratios[name] = round(value / other if more else other / value, 4)
    return {"baseline": {"path": place, "run": identity, **about}, **ratios}


def _corpora(record: Mapping[str, Any], baseline: Mapping[str, Any]) -> tuple[Any, Any]:
    """By fingerprint where both have one; else as text."""
    corpora = _value(record, "identity.corpus"), _value(baseline, "identity.corpus")
    return corpora if NOT_RUN not in corpora else (_value(record, "corpus"), _value(baseline, "corpus"))


def _value(record: Mapping[str, Any], key: str) -> Any:
    value: Any = record
    for part in key.split("."):
        value = value.get(part, NOT_RUN) if isinstance(value, Mapping) else NOT_RUN
    return value


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0

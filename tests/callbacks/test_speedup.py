"""baseline=RUN: which comparisons are made, and which are refused."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from attnlab.callbacks.speedup import read_baseline, require_same_protocol, speedup
from attnlab.errors import DataError

BASELINE: dict[str, Any] = {
    "status": "finished", "task": "mustc", "attention": "mha", "stride": None, "identity": {"run": "abc"},
    "corpus": "MuST-C at /data: 5 segments", "environment": {"device": "cpu: a x 2", "threads": 2},
    "inference": {
        "seconds": 3.0, "tokens_per_second": 50.0, "peak_memory_mib": 300.0, "batch": 5, "beam": 5,
        "dtype": "float32", "protocol": "encoder and search",
    },
    "kv_cache": {"bytes_measured": 4000},
}  # fmt: skip


@pytest.fixture
def this_run() -> dict[str, Any]:
    record = copy.deepcopy(BASELINE) | {"attention": "mtla", "stride": 2, "kv_cache": {"bytes_measured": 1000}}
    record["inference"] |= {"seconds": 2.0, "tokens_per_second": 60.0, "peak_memory_mib": 200.0}
    return record


def test_the_ratios_name_the_run_they_are_of(this_run: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text(json.dumps(BASELINE))
    place = str(tmp_path)
    baseline = read_baseline(place)
    assert baseline == read_baseline(f"{place}/record.json") == BASELINE
    ratios = speedup(this_run, BASELINE, place)
    about = ratios.pop("baseline")
    assert ratios == {"seconds": 1.5, "tokens_per_second": 1.2, "peak_memory": 1.5, "cache_bytes": 4.0}
    assert (about["path"], about["run"], about["attention"], about["stride"]) == (place, "abc", "mha", None)


SHARED = "corpus environment.device environment.threads inference.dtype inference.beam inference.batch"


@pytest.mark.parametrize("name", [*SHARED.split(), "inference.protocol"])
def test_another_protocol_is_refused(this_run: dict[str, Any], name: str) -> None:
    section, _, key = name.rpartition(".")
    value, place = "other", this_run[section] if section else this_run
    place[key] = value
    with pytest.raises(DataError, match=f"baseline: {name} differs.*this run has {value}, the baseline "):
        speedup(this_run, BASELINE, "runs/mha")
    with pytest.raises(DataError, match=f"baseline: {name} differs"):
        require_same_protocol(this_run, BASELINE, measured=False)
    place[key] = "not run"  # before scoring: not known yet
    require_same_protocol(this_run, BASELINE, measured=False)
    with pytest.raises(DataError, match=f"baseline: {name} differs"):
        require_same_protocol(this_run, BASELINE, measured=True)


def test_one_corpus_in_two_places_is_one_corpus(this_run: dict[str, Any]) -> None:
    this_run["corpus"] = "MuST-C at /elsewhere: 5 segments"
    this_run["identity"] = {"corpus": "1234"}
    baseline = BASELINE | {"identity": {"corpus": "1234", "run": "r"}}
    assert speedup(this_run, baseline, "runs/mha")["baseline"]["run"] == "r"
    this_run["identity"] = {"corpus": "5678"}
    with pytest.raises(DataError, match="baseline: corpus differs.*5678.*1234"):
        speedup(this_run, baseline, "runs/mha")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (None, "its status is unknown"),
        ("{", "its status is unknown"),
        ({"status": "finished"}, "its inference.seconds is not run"),
        (BASELINE | {"status": "failed"}, "its status is failed"),
        (BASELINE | {"inference": {"seconds": "not run"}}, "its inference.seconds is not run"),
    ],
)
def test_what_is_no_baseline(tmp_path: Path, record: Any, message: str) -> None:
    if record is not None:
        (tmp_path / "record.json").write_text(record if isinstance(record, str) else json.dumps(record))
    with pytest.raises(DataError, match=message):
        read_baseline(str(tmp_path))

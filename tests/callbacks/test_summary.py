"""The table at the end of a run, for records of every kind of task."""

import re
from pathlib import Path
from typing import Any

import pytest

from attnlab.callbacks.summary import lines_of, show
from attnlab.run.record import NOT_RUN, SECTIONS


def blank(**sections: Any) -> dict[str, Any]:
    """A record with nothing measured but these values of its sections."""
    record: dict[str, Any] = {"task": "t", "attention": "mtla", "compress": "none", "scale": "sample"}
    record |= {name: dict.fromkeys(keys.split(), NOT_RUN) for name, keys in SECTIONS.items()}
    record |= {"corpus": "sample"}
    record["parameters"] |= {"total": 1234, "attention": 200}
    for name, values in sections.items():
        record[name] = record.get(name, {}) | values if isinstance(values, dict) else values
    return record


def lines(**sections: Any) -> dict[str, str]:
    return dict(lines_of(blank(**sections)))


TRANSLATION = {
    "quality": {"bleu": 12.5, "signature": "sig", "sentences": 3},
    "kv_cache": {"elements_per_token_per_layer": 72.0, "bytes_measured": 2**20, "bytes_predicted": 2**20},
    "inference": {
        "seconds": 2.0, "tokens_per_second": 30.0, "beam": 5, "peak_memory_mib": 10.0, "mean_memory_mib": 9.0,
    },
    "training": {"steps": 7, "seconds": 3.0, "tokens_per_second": 20.0},
}  # fmt: skip


def test_a_translation() -> None:
    assert lines(**TRANSLATION) == {
        "corpus": "embedded sample corpus",
        "BLEU": "12.5   (sig)",
        "parameters": "1,234   (attention 200)",
        "cache per token and layer": "72 numbers",
        "cache of the largest batch": "1.00 MiB (1.00 predicted)",
        "memory": "10.0 MiB peak, 9.0 mean while scoring",
        "decoding": "30.0 tokens/s, beam 5, one pass of 2.0 s",
        "training, 7 updates": "20.0 tokens/s, 3.0 s",
    }


def test_a_speed_says_how_sure_it_is() -> None:
    """By its passes, and by what else the machine did."""
    speed = {"seconds": 0.5, "passes": 4, "tokens_per_second": 30.0, "tokens_per_second_range": [25.0, 31.0]}
    shown = lines(inference=speed | {"beam": 1, "busy_cores_before": 1.5})
    assert shown["decoding"] == "30.0 tokens/s (25.0 to 31.0 in 4 passes), beam 1, 0.5 s"
    assert "1.5 cores" in shown["machine busy"] and "not comparable" in shown["machine busy"]
    assert "machine busy" not in lines(inference=speed | {"busy_cores_before": 0.1})


def test_nothing_is_cut_on_a_narrow_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnlab.callbacks.summary.WIDTH", 60)
    signature = "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.5.1"
    (tmp_path / "predictions.tsv").write_text(f"id\tsource\treference\thypothesis\n0\ts\tr\t{'some words ' * 15}\n")
    show(blank(quality={"bleu": 1.0, "signature": signature}), tmp_path)
    out = capsys.readouterr().out
    letters = re.sub(r"[\s│]", "", out)
    assert signature in letters and "…" not in out
    hypothesis = [line for line in out.splitlines() if "some words" in line]
    assert len(hypothesis) > 1 and all(
        line.startswith("hyp " if i == 0 else "    ") for i, line in enumerate(hypothesis)
    )


def test_a_resumed_run_beside_its_baseline() -> None:
    speedup = {
        "baseline": {"path": "outputs/R7/record.json", "attention": "mha"},
        "seconds": 0.4732,
        "cache_bytes": 3.5556,
    }
    shown = lines(
        inference={"speedup": speedup | {"tokens_per_second": 2.0, "peak_memory": 0.5}, "beam": 5},
        training={"steps": 1, "seconds": 3.0, "tokens_per_second": 20.0, "resumed": True},
    )
    ratios = "seconds 0.47x, cache bytes 3.56x, tokens per second 2.00x, peak memory 0.50x"
    assert shown["against the baseline"] == f"{ratios}   (above 1: better than outputs/R7/record.json)"
    assert shown["training, 1 update"] == "20.0 tokens/s, 3.0 s (since the resume)"


@pytest.mark.parametrize(
    ("attention", "words"),
    [({"window": 128}, "at most 128 tokens are kept"), ({"rank": 8}, "of fixed size, whatever the length")],
)
def test_a_cache_that_does_not_grow(attention: dict[str, Any], words: str) -> None:
    shown = lines(kv_cache={"elements_per_token_per_layer": 0.0}, config={"attention": attention})
    assert shown["cache per token and layer"] == words


def test_a_compressed_language_model() -> None:
    rate = {"rate": 2.2069, "parameters": 74240, "parameters_dense": 163840, "model_saving_percent": 12.4}
    quality = {"accuracy": 67.3, "accuracy_stderr": 6.5, "loss": 1.42, "loss_stderr": 0.29, "questions": 52}
    chosen = {"chosen": {"layers": [1]}, "search": [{}, {}]}
    shown = lines(compression={"quality": {"compressed": quality}, "rate": rate, **chosen})
    assert shown["quality, compressed"] == "accuracy 67.3 ± 6.5, loss 1.42 ± 0.29, questions 52"
    assert shown["compression"] == "rate 2.21: 74,240 parameters in place of 163,840; 12.4 % of the whole model saved"
    assert shown["search"] == "{'layers': [1]}, the best of 2 by the validation split"


def test_samples_are_spread_over_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(f'{i}\tsource {i}\t"quoted\thypothesis {i}\n' for i in range(10))
    (tmp_path / "predictions.tsv").write_text(f"id\tsource\treference\thypothesis\n{rows}")
    show(blank(**TRANSLATION), tmp_path, samples=2)
    out = capsys.readouterr().out
    assert "t · mtla · sample" in out and 'ref "quoted' in out
    assert [i for i in range(10) if f"hypothesis {i}" in out] == [0, 5]
    assert f"record: {tmp_path / 'record.json'}" in out

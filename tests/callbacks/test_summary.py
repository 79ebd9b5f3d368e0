"""The table at the end of a run, for records of every kind of task."""

import re
from pathlib import Path
from typing import Any

import pytest

from attnlab.callbacks.summary import LONGEST, lines_of, show
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


TRANSLATION = {
    "quality": {"bleu": 12.5, "signature": "sig", "sentences": 3},
    "kv_cache": {"elements_per_token_per_layer": 72.0, "bytes_measured": 2**20, "bytes_predicted": 2**20},
    "inference": {
        "seconds": 2.0, "tokens_per_second": 30.0, "beam": 5, "peak_memory_mib": 10.0, "mean_memory_mib": 9.0,
    },
    "training": {"steps": 7, "seconds": 3.0, "tokens_per_second": 20.0},
}  # fmt: skip


SPEED = {"seconds": 0.5, "passes": 4, "tokens_per_second": 30.0, "tokens_per_second_range": [25.0, 31.0], "beam": 1}
BASELINE = {"path": "outputs/R7/record.json", "attention": "mha"}
RATIOS = {"baseline": BASELINE, "seconds": 0.4732, "cache_bytes": 3.5556, "tokens_per_second": 2.0, "peak_memory": 0.5}
RATE = {"rate": 2.2069, "parameters": 74240, "parameters_dense": 163840, "model_saving_percent": 12.4}
ANSWERS = {"accuracy": 67.3, "accuracy_stderr": 6.5, "loss": 1.42, "loss_stderr": 0.29, "questions": 52}
CASES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {  # sections of a record, the lines that they give
    "translation": (TRANSLATION, {
        "corpus": "embedded sample corpus",
        "BLEU": "12.5   (sig)",
        "parameters": "1,234   (attention 200)",
        "cache per token and layer": "72 numbers",
        "cache of the largest batch": "1.00 MiB (1.00 predicted)",
        "memory": "10.0 MiB peak, 9.0 mean while scoring",
        "decoding": "30.0 tokens/s, beam 5, one pass of 2.0 s",
        "training, 7 updates": "20.0 tokens/s, 3.0 s",
    }),
    "two scores with signatures": ({"quality": {
        "bleu": 12.5, "signature": "tok:zh", "chrf": 40.0, "chrf_signature": "nc:6", "warnings": ["w"],
    }}, {"BLEU": "12.5   (tok:zh)", "chrF": "40.0   (nc:6)", "warning": "w"}),
    "errors of characters": ({"quality": {"wer": 12.5, "characters": 8, "unit": "characters"}}, {"CER": "12.5"}),
    "several passes on a busy machine": ({"inference": SPEED | {"busy_cores_before": 1.5}}, {
        "decoding": "30.0 tokens/s (25.0 to 31.0 in 4 passes), beam 1, 0.5 s", "machine busy": "1.5 cores",
    }),
    "resumed run, beside its baseline": ({
        "inference": {"speedup": RATIOS, "beam": 5},
        "training": {"steps": 1, "seconds": 3.0, "tokens_per_second": 20.0, "resumed": True},
    }, {
        "against the baseline": "seconds 0.47x, cache bytes 3.56x, tokens per second 2.00x, peak memory 0.50x   (above "
        "1: better than outputs/R7/record.json)",
        "training, 1 update": "20.0 tokens/s, 3.0 s   (after resuming only)",
    }),
    "window": ({"kv_cache": {"elements_per_token_per_layer": 0.0}, "config": {"attention": {"window": 128}}},
               {"cache per token and layer": "at most 128 tokens are kept"}),
    "state": ({"kv_cache": {"elements_per_token_per_layer": 0.0}, "config": {"attention": {"rank": 8}}},
              {"cache per token and layer": "of fixed size, whatever the length"}),
    "compressed language model": ({"compression": {
        "quality": {"compressed": ANSWERS}, "rate": RATE, "chosen": {"layers": [1]}, "search": [{}, {}],
    }}, {
        "quality, compressed": "accuracy 67.3 ± 6.5, loss 1.42 ± 0.29, questions 52",
        "compression": "rate 2.21: 74,240 parameters in place of 163,840; 12.4 % of the whole model saved",
        "search": "{'layers': [1]}, the best of 2 by the validation split",
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_lines_of_a_record(name: str) -> None:
    sections, expected = CASES[name]
    shown = dict(lines_of(blank(**sections)))
    assert all(text in shown[heading] for heading, text in expected.items())
    assert name != "translation" or shown == expected
    assert ("machine busy" in shown) == ("machine busy" in expected)


def predicted(directory: Path, *rows: str) -> Path:
    """Write predictions, each a source, a reference and a hypothesis."""
    lines = [f"{i}\t{row}\n" for i, row in enumerate(rows)]
    (directory / "predictions.tsv").write_text("id\tsource\treference\thypothesis\n" + "".join(lines))
    return directory


def test_nothing_is_cut_on_a_narrow_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnlab.callbacks.summary.WIDTH", 60)
    signature = "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.5.1"
    show(blank(quality={"bleu": 1.0, "signature": signature}), predicted(tmp_path, f"s\tr\t{'some words ' * 15}"))
    out = capsys.readouterr().out
    letters = re.sub(r"[\s│]", "", out)
    assert signature in letters and "…" not in out
    first, *rest = [line for line in out.splitlines() if "some words" in line]
    assert first.startswith("hyp ") and rest and all(line.startswith("    ") for line in rest)


def test_a_source_is_shown_where_it_says_more_than_the_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show(blank(), predicted(tmp_path, "eins\tone\ta", "two\ttwo\tb", "\tthree\tc"), samples=3)
    assert capsys.readouterr().out.count("src ") == 1


def test_the_original_of_a_conversion_is_shown_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The continuations of one text, by the ids of the rows."""
    file = predicted(tmp_path, "a\tb\tof the original") / "predictions.tsv"
    file.rename(tmp_path / "original.predictions.tsv")
    show(blank(), predicted(tmp_path, "a\tb\tof the converted", "c\td\tanother"), samples=2)
    words = capsys.readouterr().out.split()
    assert words.index("original") < words.index("hyp") and words.count("hyp") == 2
    assert " ".join(words).count("original of the original") == 1


def test_samples_are_spread_over_the_file_and_shown_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Markup and quotes are text; a long document is shortened."""
    rows = [f'source {i} [/b] [laughter]\t"quoted\thypothesis {i} {"word " * 1000}' for i in range(10)]
    show(blank(**TRANSLATION | {"corpus": "at /a[/b]"}), predicted(tmp_path, *rows), samples=2)
    out = capsys.readouterr().out
    assert "t · mtla · sample" in out and 'ref "quoted' in out and "source 5 [/b] [laughter]" in out
    assert [i for i in range(10) if f"hypothesis {i}" in out] == [0, 5]
    assert "word …" in out and out.count("word") < 2 * LONGEST / 5 + 2
    assert f"record: {tmp_path / 'record.json'}" in out

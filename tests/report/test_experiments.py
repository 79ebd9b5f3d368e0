"""Every overlay in conf/experiment/ composes and builds; every row of a table agrees with its specification."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig

from attnlab.bench import Settings
from attnlab.config.build import CONF, instantiate, leaves
from attnlab.config.check import compose
from attnlab.modes import describe
from attnlab.report.spec import Row, Spec, read_spec

ROOT = CONF.parent
SPECS = sorted((ROOT / "experiments").glob("*/*.yaml"))
OVERLAYS = sorted(
    p.relative_to(CONF / "experiment").with_suffix("").as_posix() for p in (CONF / "experiment").rglob("*.yaml")
)
ROWS = [(path, row) for path in SPECS for row in read_spec(path).rows if row.command]
FIRST = [next(pair for pair in ROWS if pair[0] == path) for path in dict.fromkeys(path for path, _ in ROWS)]
EACH_ROW = [pair if pair in FIRST else pytest.param(*pair, marks=pytest.mark.slow) for pair in ROWS]
COMPUTED = {
    "attention": "attention_percent",
    "flops": "multiply_adds_percent",
    "parameters": "parameters_percent",
}  # columns that mode=describe fills
TOTALS = {"mtla/asr_pretraining": 77_690_112 - 2 * 3000 * 512}  # MHA's, with 5,000 pieces


def described(cfg: DictConfig) -> dict[str, Any]:
    record: dict[str, Any] = {"kv_cache": {}}
    describe.run(cfg, record, Path())
    assert record["parameters"]["total"] == record["parameters"]["trainable"] > 0
    return record


@pytest.mark.parametrize("name", OVERLAYS)
def test_overlay(name: str) -> None:
    """It composes, is checked, builds on meta, and its comment has its command."""
    cfg = compose(f"experiment={name}")
    assert cfg.choices.experiment == name
    assert f"experiment={name} " in (CONF / "experiment" / f"{name}.yaml").read_text().replace("\n", " ")
    assert isinstance(instantiate(cfg.bench), Settings)
    total = described(cfg)["parameters"]["total"]
    assert total == TOTALS.get(name, total)


def test_an_overlay_is_more_than_options_and_heads() -> None:
    """`task attention scale` and a head count give the same as a command line."""
    for name in OVERLAYS:
        own = yaml.safe_load((CONF / "experiment" / f"{name}.yaml").read_text())
        own.pop("defaults", None)
        keys = {key for key, _ in leaves(own)}
        assert keys - {"task.attention_heads", "stride", "rank"}, name


@pytest.mark.parametrize(
    ("path", "row"), EACH_ROW, ids=lambda part: part.stem if isinstance(part, Path) else part.label
)
def test_row(path: Path, row: Row) -> None:
    """The command line of a row gives the numbers of its specification."""
    record = described(compose(*shlex.split(row.command)))
    assert record["parameters"]["total"] == row.parameters
    if path.parent.name == "tensorllm":
        found = record.get("compression", {}).get("rate", {})
        assert row.computed.get("rate") == (round(found["rate"], 4) if found else None)
        assert row.computed.get("saving") == (round(found["model_saving_percent"], 3) if found else None)
        return
    if "compression" in record:
        found = record["compression"]["remaining"]
        for key, value in row.computed.items():
            assert round(found[COMPUTED[key]], 3) == value
        return
    assert record["kv_cache"].get("elements_per_token_per_layer", 0) == row.cache
    if path.parent.name == "tensorized":
        assert row.computed == {"parameters": round(record["parameters"]["total"] / 1e6, 1)}


@pytest.mark.parametrize(
    "line",
    [row.command for path, row in ROWS if path.parent.name == "mtla" and path.stem in ("table1", "table5")]
    + ["experiment=mtla/asr_pretraining"],
)
def test_the_recipe_of_speech_translation(line: str) -> None:
    cfg = compose(*shlex.split(line))
    task, asr = cfg.task, "asr" in line
    assert (cfg.choices.task, cfg.scale, cfg.mode) == ("mustc", "paper", "train")
    assert (task.target, task.data.vocab_size) == (("transcript", 5000) if asr else ("translation", 8000))
    assert (task.optimizer.lr, task.schedule.warmup_steps) == (1e-3 if asr else 2e-3, 10_000)
    assert (task.train.max_steps, dict(task.train.batch)) == (
        100_000,
        {"frames": 320_000, "bucket": 40_000, "split": True},
    )
    assert (task.decode.beam, task.decode_max_frames, task.train.keep_best) == (50, 50_000, 10)
    assert (task.train.label_smoothing, task.train.clip, task.train.ctc_weight) == (0.1, 10.0, 0.0)


RECIPES = {  # spec 3.2: rate, warm-up, updates, clip, CTC, speeds, vocabulary, beam, decoding batch, dropout
    "xsum": (2e-4, 15_000, 60_000, 0.0, 0.0, None, 30_000, 10, 70_000, 0.1),
    "ami": (2e-4, 15_000, 100_000, 1.0, 1.0, [0.9, 1.0, 1.1], 100, 20, 120_000, 0.15),
    "slurp": (2e-4, 50_000, 300_000, 10.0, 1.0, [0.9, 1.0, 1.1], 600, 10, 130_000, 0.3),
}


@pytest.mark.parametrize("name", RECIPES)
def test_the_recipes_of_the_other_tasks(name: str) -> None:
    task = compose(f"task={name}", "scale=paper").task
    found = (
        task.optimizer.lr, task.schedule.warmup_steps, task.train.max_steps, task.train.clip, task.train.ctc_weight,
        task.data.speeds, task.data.vocab_size, task.decode.beam, task.decode_max_frames, task.model.decoder.dropout,
    )  # fmt: skip
    assert found == RECIPES[name]
    assert task.train.first_token_weight == (5.0 if name == "slurp" else 1.0)
    assert (task.train.label_smoothing, task.train.keep_best, list(task.optimizer.betas)) == (0.1, 10, [0.9, 0.98])
    assert (task.decode.temperature, task.optimizer.weight_decay) == ((0.9, 1e-4) if name == "xsum" else (1.0, 0.0))


@pytest.mark.parametrize("path", SPECS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_specification(path: Path) -> None:
    spec: Spec = read_spec(path)
    keys = {column.key for column in spec.columns}
    for row in spec.rows:
        assert set(row.published) <= keys
        assert all(
            str(float(number)).rstrip("0") == number.rstrip("0") or number.isdigit()
            for number in row.published.values()
        )
        _ratios_are_the_published_ones(spec, row)
    first = next(row for row in spec.rows if row.command)
    assert compose(*shlex.split(spec.command.format(row=first.command))[3:])
    if spec.before.startswith("python -m src.run"):
        assert compose(*shlex.split(spec.before)[3:])


def _ratios_are_the_published_ones(spec: Spec, row: Row) -> None:
    base = next(other for other in spec.rows if other.label == spec.baseline)
    for ratio, number in (("speedup", "seconds"), ("reduction", "memory")):
        if ratio not in row.published:
            continue
        expected = float(base.published[number]) / float(row.published[number])
        assert float(row.published[ratio]) == pytest.approx(expected, abs=0.0101)  # they cut some, and round others

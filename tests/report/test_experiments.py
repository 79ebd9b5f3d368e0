"""Every overlay in conf/experiment/ composes and builds; every row of a table agrees with its specification."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from attnlab.attention.multilinear.base import MultiLinear
from attnlab.bench import Settings
from attnlab.config.build import CONF, instantiate
from attnlab.config.check import check, compose
from attnlab.models.build import build_attention
from attnlab.pretrained import huggingface
from attnlab.report.command import specifications
from attnlab.report.match import composed
from attnlab.report.spec import Row, Spec, read_spec
from attnlab.run.store import SavedRecord
from attnlab.tasks.base import Task, task_of
from tests.conversion.shapes import SHAPES

ROOT = CONF.parent
SPECS = {path: read_spec(path) for path in specifications(ROOT / "experiments")}
OVERLAYS = sorted(
    p.relative_to(CONF / "experiment").with_suffix("").as_posix() for p in (CONF / "experiment").rglob("*.yaml")
)
EVERY = [(path, row) for path, spec in SPECS.items() for row in spec.rows if row.command]
CLAIMS = re.findall(r"`python -m src\.run ([^`]+)`", (ROOT / "experiments" / "claims.md").read_text())
CONVERTED = {row.command: (path, row) for path, row in EVERY if path.parent.name == "convert"}
LOCAL = {path for path, spec in SPECS.items() if "model=" in spec.command}  # models that other commands train first
ROWS = [(path, row) for path, row in EVERY if path.parent.name != "convert" and path not in LOCAL]
SEVERAL = {row.command: (path, row) for path, row in reversed(ROWS)}  # T6's tables repeat their rows
FIRST = {path.parent.name + SPECS[path].command: command for command, (path, _) in reversed(SEVERAL.items())}
EACH_ROW = [
    (path, row) if row.command in FIRST.values() else pytest.param(path, row, marks=pytest.mark.slow)
    for path, row in SEVERAL.values()
]
COMPUTED = {"attention": "attention_percent", "flops": "multiply_adds_percent", "parameters": "parameters_percent"}


def described(cfg: DictConfig) -> dict[str, Any]:
    record: dict[str, Any] = {"kv_cache": {}}
    task_of(cfg, Task).describe(record)
    record |= {"d_model": cfg.task.model.get("d_model"), "layers": cfg.task.model.get("num_layers")}
    healed = OmegaConf.select(cfg, "convert.healing.trained", default="all")
    trained = "total" if healed == "all" else "attention"
    assert record["parameters"][trained] == record["parameters"]["trainable"] > 0
    return record


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if i % 4 else name for i, name in enumerate(OVERLAYS)]
)
def test_overlay(name: str) -> None:
    """It composes, is checked, builds on meta, and its comment has its command."""
    cfg = check([f"experiment={name}"]).jobs[0]
    assert cfg.choices.experiment == name
    assert f"experiment={name} " in (CONF / "experiment" / f"{name}.yaml").read_text().replace("\n", " ")
    assert isinstance(instantiate(cfg.bench), Settings)
    described(cfg)


@pytest.mark.parametrize(
    "command", [pytest.param(line, marks=pytest.mark.slow) if i % 6 else line for i, line in enumerate(CLAIMS)]
)
def test_a_command_of_the_page_of_claims(command: str) -> None:
    assert check(shlex.split(command), read_models=False).jobs


@pytest.mark.parametrize(
    ("path", "row"), EACH_ROW, ids=lambda part: part.stem if isinstance(part, Path) else part.label
)
def test_row(path: Path, row: Row) -> None:
    """The command line of a row gives the numbers of its specification."""
    record = described(composed(*SPECS[path].overrides(row)))
    assert not row.parameters or record["parameters"]["total"] == row.parameters
    if path.parent.name == "tensorllm":
        rate = record.get("compression", {}).get("rate", {})
        assert row.computed.get("rate") == (round(rate["rate"], 4) if rate else None)
        assert row.computed.get("saving") == (round(rate["model_saving_percent"], 3) if rate else None)
        return
    if "compression" in record:
        remaining = record["compression"]["remaining"]
        for key, value in row.computed.items():
            assert round(remaining[COMPUTED[key]], 3) == value
        return
    if row.parameters or row.cache:
        assert record["kv_cache"].get("elements_per_token_per_layer", 0) == row.cache
    saved = SavedRecord(Path(), record)
    for column in SPECS[path].columns:
        if column.described:
            number = saved.number(column.described)
            assert number is not None and row.computed[column.key] == round(number * column.factor, column.digits)
    if "counted" in row.computed and path.stem == "table4":  # of language models; table 3 has a test of its own
        dense = 4 * record["d_model"] ** 2 * record["layers"]
        assert row.computed["counted"] == round(dense / record["parameters"]["attention"], 4)


@pytest.mark.slow
@pytest.mark.parametrize(("path", "row"), CONVERTED.values(), ids=lambda part: getattr(part, "label", ""))
def test_row_of_a_converted_model(path: Path, row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cache is the share that the row says, by the model's published sizes alone."""
    monkeypatch.setattr(huggingface, "config_of", SHAPES.__getitem__)
    cfg = check(SPECS[path].overrides(row)).jobs[0]
    cached = described(cfg)["kv_cache"]["elements_per_token_per_layer"]
    sizes = SHAPES[cfg.model]
    width = sizes.get("head_dim", sizes["hidden_size"] // sizes["num_attention_heads"])
    share = 100 * cached / (2 * sizes["num_key_value_heads"] * width)
    stated = float(row.facts["cache"]) if "cache" in row.facts else 100 - float(row.facts["saved"])
    assert share == pytest.approx(stated, abs=0.2)


@pytest.mark.parametrize("path", SPECS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_specification(path: Path) -> None:
    spec: Spec = SPECS[path]
    keys = {column.key for column in spec.columns}
    for row in spec.rows:
        assert set(row.published) <= keys and set(row.settings) <= keys and set(row.computed) <= keys
        words = [number for key, number in row.published.items() if key not in row.settings]
        assert all(re.fullmatch(r"-?\d+(\.\d+)?[KMB]?", number) for number in words)
    if spec.before.startswith("python -m src.run"):
        assert compose(*shlex.split(spec.before)[3:])


SHOTS = {2: 0, 3: 2, 4: 0, 5: 2, 8: 0, 9: 2, 10: 0, 11: 2}


@pytest.mark.parametrize("number", SHOTS)
def test_the_evaluations_of_t6(number: int) -> None:
    """The printed average is the mean of the printed scores; each score is that metric of the harness."""
    spec = SPECS[ROOT / "experiments" / "t6" / f"table{number}.yaml"]
    keys = [column.key for column in spec.columns]
    assert len(keys) == 10 and keys[-1] == "average" and len(spec.rows) == 6
    normalised = {key for key in keys if key.startswith("arc")} | {"hellaswag", "openbookqa", "piqa", "sciq"}
    place = f"quality.shots.{SHOTS[number]}"
    metrics = {key: f"{place}.{key}.{'acc_norm' if key in normalised else 'acc'}" for key in keys[:-1]}
    assert {column.key: column.value for column in spec.columns[:-1]} == metrics
    assert list(spec.columns[-1].mean) == list(metrics.values())
    for row in spec.rows:
        mean = sum(float(row.published[key]) for key in keys[:-1]) / 9
        same = abs(mean - float(row.published["average"])) < 0.006
        assert same == ("average" not in row.differs)
    assert shlex.split(spec.after) == ["python", "-m", "src.run", "mode=evaluate", "checkpoint=RUN"]
    evaluation = composed(*spec.overrides(spec.rows[0])).task.evaluation
    assert SHOTS[number] in evaluation.num_fewshot
    assert f"{', '.join(evaluation.tasks)}; trained on FineWeb-Edu" in spec.corpus["name"]


def test_the_formulas_of_t6() -> None:
    """Table 1 by its own formulas, which are those of the mechanisms but for MQA, GQA and MLA."""
    spec = SPECS[ROOT / "experiments" / "t6" / "table1.yaml"]
    names = {"d": 768, "d_h": 64, "d_c": 256, "d_c'": 512, "d_h^R": 32, "g": 2, "R_Q": 6, "R_K": 2, "R_V": 2}
    others = set()
    for row in spec.rows:
        known = names | {"h": int(row.facts["heads"])}

        def value(formula: str, known: dict[str, int] = known) -> float:
            text = formula.replace("d^2", "d d")
            for name in sorted(known, key=len, reverse=True):
                text = re.sub(rf"(?<![\w^']){re.escape(name)}(?![\w^'])", str(known[name]), text)
            text = re.sub(r"(?<=[\d)]) (?=[\d(])", " * ", text)
            assert re.fullmatch(r"[\d ()+*/]+", text), text
            return float(eval(text))

        assert row.computed["cache_by_formula"] == value(row.facts["cache_formula"]) == row.computed["cache"]
        assert row.computed["attention_by_formula"] == round(12 * value(row.facts["parameter_formula"]))
        others |= {row.label} if row.computed["attention_by_formula"] != row.computed["attention"] else set()
    assert others == {"MQA", "GQA", "MLA"}


@pytest.mark.parametrize(
    ("table", "eq21"), [("table3", [0.9999, 1.9997, 0.9999]), ("table4", [1.9999, 1.9999, 2.0, 7.9985])]
)
def test_the_equations_20_and_21(table: str, eq21: list[float]) -> None:
    """Of the Tensorized Transformer's supplement, d = d_model; the text's "almost 8 times" is table 4's last row."""
    spec = SPECS[ROOT / "experiments" / "tensorized" / f"{table}.yaml"]
    rows = [row for row in spec.rows if "eq20" in row.computed]
    for row in rows:
        with torch.device("meta"):
            layer = build_attention(compose(*row.command.split()), 0)
        assert isinstance(layer, MultiLinear)
        h, rank, d = layer.num_cores, layer.rank, layer.d_model
        assert row.computed["eq20"] == round(3 * h * d / (3 * d + h), 4)
        assert row.computed["eq21"] == round(3 * h * d * d / (3 * d * d + rank * h), 4)
        assert row.computed["counted"] == round(4 * d * d / sum(p.numel() for p in layer.parameters()), 4)
    assert [row.computed["eq21"] for row in rows] == eq21
    assert table == "table3" or (row.computed["eq20"], row.published) == (7.9585, {"eq20": "8"})

"""mode=bench: what it measures, and what it refuses to say."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from torch import Tensor

from attnlab.attention import MTLA, Attention
from attnlab.bench import baselines, compare, workloads
from attnlab.bench.compare import failures
from attnlab.bench.exactness import check
from attnlab.bench.memory import peak_mib
from attnlab.bench.settings import KINDS, Settings, Shape, summary
from attnlab.bench.variants import lineup
from attnlab.config.build import CONF, freeze, instantiate
from attnlab.config.check import compose as check_composed
from attnlab.errors import ConfigError
from attnlab.modes import bench
from attnlab.run import device
from attnlab.run import record as records

CPU = torch.device("cpu")
TINY = (
    "task.model.d_model=32",
    "task.attention_heads=4",
    "task.model.encoder.num_layers=1",
    "task.model.encoder.ffn_dim=32",
    "task.model.encoder.conv_channels=32",
    "task.model.decoder.num_layers=2",
    "task.model.decoder.ffn_dim=32",
    "hardware=cpu",
    "bench.memory=false",
    "bench.rounds=2",
    "bench.batch=2",
    "bench.beam=3",
    "bench.prefix=7",
    "bench.text=12",
    "bench.steps=5",
)


def config(*overrides: str, attention: str = "mtla") -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", [f"attention={attention}", *TINY, *overrides, "mode=bench"], return_hydra_config=True)
        return freeze(cfg, cfg.hydra.runtime.choices)


def measured(cfg: DictConfig, directory: Path) -> dict[str, Any]:
    record = records.new(cfg, "python -m attnlab")
    bench.run(cfg, record, directory)
    return record


class Wrong(baselines.PublishedMTLA):
    """One per cent too large."""

    def attend(self, x: Tensor, joint: Tensor) -> Tensor:
        return super().attend(x, joint) * 1.01


@pytest.mark.parametrize(
    "attention", ["mtla", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mha", "gqa"))]
)
def test_a_run(attention: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    what = "bench.what=[training,model,decoding,beam]"
    record = measured(config(what, "bench.text=[12,9]", attention=attention), tmp_path)
    rows = record["bench"]["rows"]
    assert [row["what"] for row in rows] == ["training"] * 2 + ["model"] * 2 + ["decoding"] * 2 + ["beam"]
    assert [row.get("text", row.get("steps")) for row in rows] == [12, 9, 12, 9, 5, 5, 5]
    references = ["mha"] * (attention != "mha") + [f"published_{attention}"]
    for row in rows:
        others = [f"{attention}_copied"] * (row["what"] == "beam") + references
        assert list(row["variants"]) == [attention, *others]
        assert [(pair["of"], pair["against"]) for pair in row["ratios"]] == [(attention, other) for other in others]
        for found in row["variants"].values():
            assert 0 < found["seconds"]["min"] <= found["seconds"]["median"] <= found["seconds"]["max"]
            assert found["peak_memory_mib"] == "not run"
            if "cache_bytes" in found:
                assert found["cache_bytes"]["measured"] == found["cache_bytes"]["predicted"] > 0
        for pair in row["ratios"]:
            assert pair["seconds"]["min"] <= pair["seconds"]["median"] <= pair["seconds"]["max"]
            assert ("cache" in pair) == (row["what"] in ("decoding", "beam"))
    beam = rows[-1]
    assert beam["variants"][f"{attention}_copied"]["cache_bytes"] == beam["variants"][references[-1]]["cache_bytes"]
    assert beam["ratios"][0]["cache"] > 1.3
    assert record["kv_cache"]["bytes_measured"] == record["kv_cache"]["bytes_predicted"]
    assert record["inference"]["beam"] == 3 and record["inference"]["mean_memory_mib"] == "not run"
    assert record["training"]["tokens_per_second"] > 0 and record["training"]["final_loss"] == "not run"
    record["environment"] = records.environment("cpu")
    assert records.problems(json.loads(records.dumps(record))) == []
    shown = capsys.readouterr().out
    assert f"{attention} faster by" in shown and "no ratio" not in shown


def test_a_failed_check_gives_no_ratio(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forms: dict[type[Attention], Any] = {**baselines.FORMS, MTLA: Wrong}
    monkeypatch.setattr(baselines, "FORMS", forms)
    record = measured(config("bench.what=training"), tmp_path)
    mha, reference = record["bench"]["rows"][0]["ratios"]
    for pair in (mha, reference):
        assert pair["not run"].startswith("mtla was not found equal") and "seconds" not in pair
    shown = capsys.readouterr().out
    assert "no ratio of mtla against mha" in shown
    assert "x (" not in shown


@pytest.mark.slow
def test_a_mechanism_without_a_published_form_is_checked_against_its_formula(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def none(attention: Attention) -> Attention:
        raise LookupError("no published algorithm is kept")

    monkeypatch.setattr(baselines, "of", none)
    found = measured(config("bench.what=training"), tmp_path)["bench"]
    row, check = found["rows"][0], found["checks"]["mtla"]
    assert check["reference"] == "formula" and max(check["output"], check["gradient"]) < check["tolerance"]
    assert row["variants"]["published_mtla"] == {"not run": "no published algorithm is kept"}
    by = {pair["against"]: pair for pair in row["ratios"]}
    assert by["mha"]["seconds"]["median"] > 0
    assert "no published algorithm is kept" in by["published_mtla"]["not run"]


@pytest.mark.slow
def test_the_published_step_of_stride_one_is_caught(tmp_path: Path) -> None:
    cfg = config("stride=1", "bench.what=[training,decoding]")
    training, decoding, _ = measured(cfg, tmp_path)["bench"]["rows"]
    assert all("seconds" in pair for pair in training["ratios"])
    mha, broken = decoding["ratios"]
    assert "seconds" in mha
    assert "published_mtla was not found equal to its reference: steps off by" in broken["not run"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("attention", ["mha", "mqa", "mla", "mtla"])
def test_checks_pass_in_every_precision(attention: str, dtype: torch.dtype) -> None:
    cfg = config(attention=attention)
    settings = instantiate(cfg.bench)
    for variant in lineup(cfg, settings):
        found = check(variant, baselines.of, dtype, CPU)
        assert not failures(found, "training") and not failures(found, "decoding"), found


def test_t_by_t_tensors_that_do_not_fit_are_not_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    free = psutil.virtual_memory()._replace(available=20_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    row = measured(config("bench.what=training"), tmp_path)["bench"]["rows"][0]
    assert "seconds" in row["variants"]["mtla"] and "seconds" in row["variants"]["mha"]
    reason = row["variants"]["published_mtla"]["not run"]
    assert reason.startswith("its 12 x 19 tensors take") and row["ratios"][1]["not run"] == reason


def test_rounds_are_interleaved_and_warm_up_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    order: list[str] = []

    def timed(work: Any, device: torch.device) -> dict[str, float]:
        name = type(work.attentions[0]).__name__
        order.append(name)
        return {"prepare_seconds": 1.0, "seconds": {"MTLA": 1.0, "MHA": 2.0, "PublishedMTLA": 8.0}[name] * len(order)}

    monkeypatch.setattr(compare, "timed", timed)
    row = measured(config("bench.what=training", "bench.warmup=1", "bench.rounds=2"), tmp_path)["bench"]["rows"][0]
    turn = ["MTLA", "MHA", "PublishedMTLA"]
    assert order == [*turn, *turn[::-1], *turn]
    # rounds 2 and 3: MTLA is run 6th and 7th, MHA 5th and 8th, the published one 4th and 9th
    assert row["variants"]["mtla"]["seconds"] == {"median": 6.5, "min": 6, "max": 7}
    mha, reference = row["ratios"]
    assert mha["seconds"] == summary([2 * 5 / 6, 2 * 8 / 7])
    assert reference["seconds"] == summary([8 * 4 / 6, 8 * 9 / 7])


@pytest.mark.slow
def test_peak_memory_is_that_of_one_run() -> None:
    cfg = config()
    ours, _, theirs = lineup(cfg, instantiate(cfg.bench))
    shape = Shape("training", batch=2, beam=1, prefix=0, text=768)
    scores = 2 * 4 * 768**2 * 4 / 2**20
    small, large = (peak_mib(variant, shape, "float32", CPU) for variant in (ours, theirs))
    assert isinstance(small, float) and isinstance(large, float)
    assert 1 < small < scores < 2 * scores < large < 6 * scores


@pytest.mark.slow
def test_a_measuring_process_that_fails_is_no_number() -> None:
    cfg = config()
    shape = Shape("nothing", batch=1, beam=1, prefix=0, text=8)
    found = peak_mib(lineup(cfg, instantiate(cfg.bench))[0], shape, "float32", CPU)
    assert found == "not run: the measuring process ended with 1: ValueError: no workload nothing"


def test_every_workload_has_its_file() -> None:
    assert set(KINDS) == set(workloads.WORKLOADS)
    for what in KINDS:
        kind = workloads.workload_type(what)
        assert kind.about and kind.checked


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("bench.what=trainng", "bench: what=trainng: expected training, model, decoding, beam, forward, projections"),
        ("bench.what=[beam,speed]", "what=speed"),
        ("bench.batch=0", "batch=0: expected int >= 1"),
        ("bench.text=[4,0]", "text="),
        ("bench.prefix=0", "a whole model reads a prefix"),
        ("bench.context=-1", "context=-1: expected int >= 0"),
        ("bench.reorder=[]", "reorder=[]: expected a list, each bool, not empty"),
        ("bench.overrides=['gqa.num_heads=2']", "gqa.num_heads=2: expected REFERENCE.KEY=VALUE"),
        ("bench.overrides=['mha.heads=2']", "bench.overrides: mha has no heads; nearest: "),
        ("bench.references=[mhaa]", "mhaa is no mechanism; nearest: mha"),
        ("bench.references=['']", "references: '' names no mechanism"),
        ("bench.references=[published_compiled_mla]", "published and compiled cannot be combined"),
        ("bench.references=[mtla.stride]", "references: mtla.stride: expected NAME or NAME.KEY=VALUE"),
        ("bench.references=['mtla.strid=4']", "mtla has no strid; nearest: stride"),
        ("bench.references=[published_mtl]", "mtl is no mechanism; nearest: mtla"),
    ],
)
def test_wrong_settings(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        measured(config(override), tmp_path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("attention", "rank", "expected"),
    [("mtla", 24, {"mla": 24, "mla_t6": 24, "tpa": 2}), ("tpa", 3, {"mla": 32, "mtla": 32, "tpa_kvonly": 3})],
)
def test_a_rank_is_that_of_references_that_mean_the_same_by_it(
    attention: str, rank: int, expected: dict[str, int]
) -> None:
    cfg = config(f"rank={rank}", f"bench.references=[{','.join(expected)}]", attention=attention)
    found = {variant.name: variant.cfg.attention for variant in lineup(cfg, instantiate(cfg.bench))[1:]}
    assert {name: node.get("latent_dim", node.get("rank")) for name, node in found.items()} == expected


def test_a_value_of_the_runs_own_mechanism_is_a_key_of_the_run() -> None:
    cfg = config("bench.references=[mtla]", "bench.overrides=['mtla.stride=3']")
    with pytest.raises(ConfigError, match="mtla is the mechanism of the run itself; give attention.stride=3"):
        lineup(cfg, instantiate(cfg.bench))


def test_references_have_the_sizes_and_knobs_of_the_run() -> None:
    cfg = config("rank=24", "stride=3", "bench.references=[gqa,mla,published,published_mha,mtla]")
    found = lineup(cfg, instantiate(cfg.bench))
    assert [variant.name for variant in found] == ["mtla", "gqa", "mla", "published_mtla", "published_mha"]
    sizes = [dict(variant.cfg.attention) for variant in found]
    assert all(size["d_model"] == 32 and size["num_heads"] == 4 for size in sizes)
    assert sizes[1]["num_kv_heads"] == 2 and sizes[2]["latent_dim"] == 24
    assert sizes[3] == sizes[0] and sizes[0]["stride"] == 3
    ours, theirs = (found[i].attention(torch.float32, CPU) for i in (0, 3))
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_a_mechanism_stands_beside_itself_with_another_value() -> None:
    cfg = config("bench.references=['mtla.stride=4','published_mtla.stride=2',mla]", "stride=3")
    found = lineup(cfg, instantiate(cfg.bench))
    assert [variant.name for variant in found] == ["mtla", "mtla.stride=4", "published_mtla.stride=2", "mla"]
    assert [variant.cfg.attention.get("stride") for variant in found] == [3, 4, 2, None]


def test_a_mechanism_stands_beside_its_compiled_steps() -> None:
    cfg = config("bench.references=[compiled,compiled_mla,mla]")
    found = lineup(cfg, instantiate(cfg.bench))
    assert [variant.name for variant in found] == ["mtla", "compiled_mtla", "compiled_mla", "mla"]
    assert [variant.compiled for variant in found] == [False, True, True, False]
    with pytest.raises(ConfigError, match="mtl is no mechanism; nearest: mtla"):
        lineup(cfg, replace(instantiate(cfg.bench), references=["compiled_mtl"]))


def test_values_of_a_reference_are_those_of_its_compiled_form_too() -> None:
    cfg = config()
    settings = replace(instantiate(cfg.bench), references=["compiled_mha"], overrides=["mha.num_heads=2"])
    assert [variant.cfg.attention.num_heads for variant in lineup(cfg, settings)] == [4, 2]
    with pytest.raises(ValueError, match="compiled_mha.num_heads=2: expected REFERENCE.KEY=VALUE"):
        replace(settings, overrides=["compiled_mha.num_heads=2"])  # nothing would read it


def test_without_a_compiler_compiled_steps_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(device.shutil, "which", lambda name: None)
    cfg = config("bench.what=decoding", "bench.reorder=[false]", "bench.references=[compiled]")
    found = measured(cfg, tmp_path)["bench"]["rows"][0]["variants"]
    assert found["mtla"]["seconds"] and found["compiled_mtla"][records.NOT_RUN].startswith("torch.compile needs a C++")


@pytest.mark.parametrize("what", ["training", "kernels"])
def test_nothing_is_compiled_where_no_steps_are_decoded(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "compile", None)
    found = measured(config(f"bench.what={what}", "bench.references=[compiled]"), tmp_path)["bench"]
    compiled = [name for name in found["checks"] if name.startswith("compiled_mtla")]
    assert compiled and found["protocol"]["computed_by"] and found["protocol"][what] != found["protocol"]["computed_by"]
    for name in compiled:
        reason = found["rows"][0]["variants"][name][records.NOT_RUN]
        assert "takes no decoding steps" in reason and found["checks"][name] == {records.NOT_RUN: reason}
    assert f"no check of {compiled[0]}: " in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
@pytest.mark.parametrize(("task", "what"), [("mustc", "[decoding,beam,training]"), ("wikitext2", "[generation]")])
def test_compiled_steps_are_measured_in_turns(
    task: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend, fullgraph=True))
    overrides = [f"bench.what={what}", "bench.reorder=[true]", "bench.references=[compiled]"]
    if task == "mustc":
        cfg = config(*overrides)
    else:
        small = ["task.model.d_model=32", "task.model.num_layers=1", "bench.steps=5", "bench.rounds=2", "bench.batch=2"]
        with initialize_config_dir(str(CONF), version_base="1.3"):
            given = ["task=wikitext2", "attention=mtla", "mode=bench", "bench.memory=false", *small, *overrides]
            cfg = compose("config", given, return_hydra_config=True)
            cfg = freeze(cfg, cfg.hydra.runtime.choices)
    found = measured(cfg, tmp_path)["bench"]
    assert found["checks"]["compiled_mtla"]["steps"] < 1e-3 and graphs
    for row in found["rows"]:
        ratio = next(ratio for ratio in row["ratios"] if ratio["against"] == "compiled_mtla")
        if row["what"] == "training":
            assert "takes no decoding steps" in ratio[records.NOT_RUN]
        else:
            assert ratio["seconds"]["median"] > 0


@pytest.mark.slow
def test_the_share_outside_of_products(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = measured(config("bench.what=decoding", "bench.reorder=[false]"), tmp_path)["bench"]["rows"][0]
    for found in row["variants"].values():
        assert found["product_seconds"] > 0 and found["share_outside_products"] < 1
    assert "outside matrix products" in capsys.readouterr().out


@pytest.mark.parametrize(
    "attention", ["mha", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tpa", "tpa_kvonly"))]
)
def test_decoding_begins_with_a_filled_cache(attention: str, tmp_path: Path) -> None:
    cfg = config("bench.what=decoding", "bench.context=[40,70]", "bench.reorder=[false]", attention=attention)
    rows = measured(cfg, tmp_path)["bench"]["rows"]
    assert [row["context"] for row in rows] == [40, 70]
    for row in rows:
        cache = row["variants"][attention]["cache_bytes"]
        attention_layer = lineup(cfg, instantiate(cfg.bench))[0].attention(torch.float32, CPU)
        assert cache["measured"] == 4 * attention_layer.cache_elements(2, row["context"] + 6, 7)
        reference = row["ratios"][-1]
        if attention == "mha":  # published: a cache that grows by concatenation
            assert reference["not run"] == "its cache grows step by step: it cannot begin with a context"
        else:
            assert reference["against"] == f"published_{attention}" and "seconds" in reference


@pytest.mark.parametrize(
    ("task", "attention"),
    [
        ("wikitext2", "mla"),
        ("wmt16", "multilinear"),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (("ptb", "multilinear"), ("xsum", "mtla"), ("slurp", "mla"))
        ),
    ],
)
def test_whole_models_of_every_kind_of_task(task: str, attention: str, tmp_path: Path) -> None:
    cfg = check_composed(
        f"task={task}", f"attention={attention}", "mode=bench", "bench.what=model", "bench.references=[published]",
        "bench.text=12", "bench.prefix=6", "bench.batch=2", "bench.rounds=1", "bench.warmup=0", "bench.memory=false",
    )  # fmt: skip
    record = records.new(cfg, "test")
    bench.run(cfg, record, tmp_path)
    (row,) = record["bench"]["rows"]
    assert row["variants"][attention]["seconds"]["median"] > 0
    assert row["ratios"][0]["against"] == f"published_{attention}" and "seconds" in row["ratios"][0]


@pytest.mark.parametrize(("task", "kind"), [("wikitext2", "beam"), ("wmt16", "beam")])
def test_what_a_task_has_not_is_not_measured(task: str, kind: str, tmp_path: Path) -> None:
    cfg = check_composed(f"task={task}", "attention=mha", "mode=bench", f"bench.what={kind}")
    with pytest.raises(ConfigError, match=rf"bench.what={kind} cannot measure the model of task={task}: give bench.wh"):
        measured(cfg, tmp_path)


SIZES = {"mtla": (512, 8, 64), "t6": (768, 34, 64)}
OVERLAYS = [("mtla", "training"), ("mtla", "decoding"), ("mtla", "beam"), ("t6", "training"), ("t6", "decoding")]


@pytest.mark.parametrize("name", [f"{paper}/bench_{what}" for paper, what in OVERLAYS])
def test_overlays(name: str) -> None:
    paper, what = name.split("/bench_")
    other = "mla" if paper == "mtla" else "tpa"
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", [f"experiment={name}", f"attention={other}"], return_hydra_config=True)
        cfg = freeze(cfg, cfg.hydra.runtime.choices)
    settings: Settings = instantiate(cfg.bench)
    node = cfg.attention
    assert cfg.mode == "bench" and (node.d_model, node.num_heads, node.head_dim) == SIZES[paper]
    assert settings.kinds == [what]
    assert lineup(cfg, settings)[0].name == other


@pytest.mark.parametrize("name", ["t6/bench_training", "t6/bench_decoding"])
def test_products_are_measured_against_as_many_parameters(name: str) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", [f"experiment={name}"], return_hydra_config=True)
        cfg = freeze(cfg, cfg.hydra.runtime.choices)
    found = [variant.attention(torch.float32, torch.device("meta")) for variant in lineup(cfg, instantiate(cfg.bench))]
    assert [type(attention).__name__ for attention in found] == ["TPA", "MHA", "PublishedTPA"]
    assert [sum(p.numel() for p in attention.parameters()) for attention in found] == [2_423_808, 2_359_296, 2_423_808]


@pytest.mark.parametrize("name", ["tensorized/bench_absolute", "tensorized/bench_relative"])
def test_overlays_of_multilinear_attention(name: str) -> None:
    """Its ratios are against the published tensor, which a small shape is found equal to."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", [f"experiment={name}"], return_hydra_config=True)
        cfg = freeze(cfg, cfg.hydra.runtime.choices)
    settings: Settings = instantiate(cfg.bench)
    ours, *_, theirs = lineup(cfg, settings)
    assert cfg.mode == "bench" and cfg.attention.d_model == 256 and not cfg.attention.reads_prefix
    assert [ours.name, theirs.name] == [cfg.choices.attention, f"published_{cfg.choices.attention}"]
    for variant in (ours, theirs):
        found = check(variant, baselines.of, torch.float32, CPU)
        assert not failures(found, "training") and not failures(found, "decoding"), found

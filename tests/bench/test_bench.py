"""mode=bench: what it measures, and what it refuses to say."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from attnlab.attention import Attention
from attnlab.bench import baselines, compare, workloads
from attnlab.bench.compare import unchecked
from attnlab.bench.memory import peak_mib
from attnlab.bench.settings import Shape, summary
from attnlab.bench.variants import AttentionVariant
from attnlab.bench.workloads import decoding
from attnlab.config.check import compose
from attnlab.decoding.beam import WARM_UP
from attnlab.errors import ConfigError
from attnlab.run import device
from attnlab.run import record as records
from attnlab.run.record import NOT_RUN
from tests.bench.small import CPU, QUICK, config, measured, spoil, variants

pytestmark = pytest.mark.usefixtures("short_checks")
LANGUAGE = ("task=wikitext2", *QUICK, "task.model.d_model=32", "task.model.num_layers=1", "bench.text=12")


@pytest.mark.parametrize("attention", ["mtla", pytest.param("gqa", marks=pytest.mark.slow)])
def test_a_run(attention: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    what = "bench.what=[training,model,decoding,beam]"
    record = measured(config(what, "bench.text=[12,9]", attention=attention), tmp_path)
    rows = record["bench"]["rows"]
    assert [row["what"] for row in rows] == ["training"] * 2 + ["model"] * 2 + ["decoding"] * 2 + ["beam"]
    assert [row.get("text", row.get("steps")) for row in rows] == [12, 9, 12, 9, 5, 5, 5]
    references = ["mha", f"published_{attention}"]
    for row in rows:
        others = [f"{attention}_copied"] * (row["what"] == "beam") + references
        assert list(row["variants"]) == [attention, *others]
        assert [(pair["of"], pair["against"]) for pair in row["ratios"]] == [(attention, other) for other in others]
        for result in row["variants"].values():
            assert 0 < result["seconds"]["min"] <= result["seconds"]["median"] <= result["seconds"]["max"]
            assert result["peak_memory_mib"] == NOT_RUN
            if "cache_bytes" in result:
                assert result["cache_bytes"]["measured"] == result["cache_bytes"]["predicted"] > 0
        for pair in row["ratios"]:
            assert pair["seconds"]["min"] <= pair["seconds"]["median"] <= pair["seconds"]["max"]
            assert ("cache" in pair) == (row["what"] in ("decoding", "beam"))
    beam = rows[-1]
    assert beam["variants"][f"{attention}_copied"]["cache_bytes"] == beam["variants"][references[-1]]["cache_bytes"]
    assert beam["ratios"][0]["cache"] > 1.3
    for result in beam["variants"].values():
        parts = result["parts"]
        assert result["most_times_faster"] == pytest.approx(
            sum(parts.values()) / (sum(parts.values()) - parts["attention"] - parts["reorder"]), rel=1e-2
        )
    assert record["kv_cache"]["bytes_measured"] == record["kv_cache"]["bytes_predicted"]
    assert record["inference"]["beam"] == 3 and record["inference"]["mean_memory_mib"] == NOT_RUN
    assert record["training"]["tokens_per_second"] > 0 and record["training"]["final_loss"] == NOT_RUN
    record["environment"] = records.environment("cpu")
    assert records.problems(json.loads(records.dumps(record))) == []
    shown = capsys.readouterr().out
    assert f"{attention} faster by" in shown and "no ratio" not in shown


@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_a_failed_check_gives_no_ratio(
    factor: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(monkeypatch, baselines.PublishedMTLA, "attend", factor)
    record = measured(config("bench.what=training"), tmp_path)
    mha, reference = record["bench"]["rows"][0]["ratios"]
    for pair in (mha, reference):
        assert pair[NOT_RUN].startswith("mtla was not found equal") and "seconds" not in pair
    shown = capsys.readouterr().out
    assert "no ratio of mtla against mha" in shown
    assert "x (" not in shown


@pytest.mark.slow
def test_a_mechanism_without_a_published_form_is_checked_against_its_formula(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def none(attention: Attention) -> Attention:
        raise LookupError("no published algorithm")

    monkeypatch.setattr(baselines, "of", none)
    section = measured(config("bench.what=training"), tmp_path)["bench"]
    row, errors = section["rows"][0], section["checks"]["mtla"]
    assert errors["reference"] == "formula" and max(errors["output"], errors["gradient"]) < errors["tolerance"]
    assert row["variants"]["published_mtla"] == {NOT_RUN: "no published algorithm"}
    by = {pair["against"]: pair for pair in row["ratios"]}
    assert by["mha"]["seconds"]["median"] > 0
    assert "no published algorithm" in by["published_mtla"][NOT_RUN]


def test_t_by_t_tensors_that_do_not_fit_are_not_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    free = psutil.virtual_memory()._replace(available=20_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    row = measured(config("bench.what=training", "bench.references=[published]"), tmp_path)["bench"]["rows"][0]
    assert "seconds" in row["variants"]["mtla"]
    reason = row["variants"]["published_mtla"][NOT_RUN]
    assert reason.startswith("its 12 x 19 tensors take") and row["ratios"][0][NOT_RUN] == reason


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
    ours, _, published = variants(config())
    shape = Shape("training", batch=2, beam=1, prefix=0, text=768)
    scores = 2 * 4 * 768**2 * 4 / 2**20
    small, large = (peak_mib(variant, shape, "float32", CPU) for variant in (ours, published))
    assert isinstance(small, float) and isinstance(large, float)
    assert 1 < small < scores < 2 * scores < large < 6 * scores
    shape = Shape("nothing", batch=1, beam=1, prefix=0, text=8)
    ended = peak_mib(ours, shape, "float32", CPU)
    assert ended == "not run: the measuring process ended with 1: KeyError: 'nothing'"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["bench.what=[beam,speed]"], "bench.what=speed cannot measure the model of task=mustc: give bench.what=["),
        (["bench.prefix=0"], "bench.prefix=0: its decoder reads a prefix"),
        (["bench.overrides=['gqa.num_heads=2']"], "bench.overrides: gqa.num_heads=2: expected REFERENCE.KEY=VALUE"),
        (["bench.overrides=['mha.heads=2']"], "bench.overrides: mha has no heads; nearest: "),
        (["bench.references=[mtla]", "bench.overrides=['mtla.stride=3']"], "mtla.stride=3: mtla is the mechanism of"),
        (["bench.references=[mhaa]"], "bench.references: mhaa is no mechanism; nearest: mha"),
        (["bench.references=[published_compiled_mla]"], "bench.references: compiled_mla is no mechanism"),
        (["bench.references=[mtla.stride]"], "references: mtla.stride: expected NAME or NAME.KEY=VALUE"),
        (["bench.references=['mtla.strid=4']"], "mtla has no strid; nearest: stride"),
    ],
)
def test_wrong_settings(settings: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        measured(config(*settings), tmp_path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # a rank is that of references that mean the same by it
        (["rank=24", "bench.references=[mla,mla_t6,tpa]"],
         {"mtla": {"latent_dim": 24}, "mla": {"latent_dim": 24}, "mla_t6": {"latent_dim": 24}, "tpa": {"rank": 2}}),
        (["attention=tpa", "rank=3", "bench.references=[mla,mtla,tpa_kvonly]"],
         {"tpa": {"rank": 3}, "mla": {"latent_dim": 32}, "mtla": {"latent_dim": 32}, "tpa_kvonly": {"rank": 3}}),
        (["rank=24", "stride=3", "bench.references=[gqa,mla,published,published_mha,mtla]"],
         {"mtla": {"stride": 3}, "gqa": {"num_kv_heads": 2}, "mla": {"latent_dim": 24}, "published_mtla": {"stride": 3},
          "published_mha": {"d_model": 32, "num_heads": 4}}),
        (["stride=3", "bench.references=['mtla.stride=4','published_mtla.stride=2',mla]"],
         {"mtla": {"stride": 3}, "mtla.stride=4": {"stride": 4}, "published_mtla.stride=2": {"stride": 2}, "mla": {}}),
        (["bench.references=[compiled,compiled_mha]", "bench.overrides=['mha.num_heads=2']"],
         {"mtla": {"num_heads": 4}, "compiled_mtla": {"num_heads": 4}, "compiled_mha": {"num_heads": 2}}),
    ],
)  # fmt: skip
def test_lineup(settings: list[str], expected: dict[str, dict[str, int]]) -> None:
    ours = {variant.name: variant for variant in variants(config(*settings))}
    nodes = {name: variant.cfg.attention for name, variant in ours.items()}
    assert {name: {key: nodes[name].get(key) for key in values} for name, values in expected.items()} == expected
    assert list(ours) == list(expected)
    assert all(variant.compiled == name.startswith("compiled") for name, variant in ours.items())
    if "published_mtla" in ours:
        pair = [ours[name].attention(torch.float32, CPU).parameters() for name in ("mtla", "published_mtla")]
        assert all(torch.equal(*parameters) for parameters in zip(*pair, strict=True))


def test_without_a_compiler_compiled_steps_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(device.shutil, "which", lambda name: None)
    cfg = config("bench.what=decoding", "bench.reorder=[false]", "bench.references=[compiled]")
    results = measured(cfg, tmp_path)["bench"]["rows"][0]["variants"]
    assert results["mtla"]["seconds"] and results["compiled_mtla"][NOT_RUN].startswith("torch.compile needs a C++")


@pytest.mark.parametrize("what", ["training", "kernels"])
def test_nothing_is_compiled_where_no_steps_are_decoded(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "compile", None)
    section = measured(config(f"bench.what={what}", "bench.references=[compiled]"), tmp_path)["bench"]
    compiled = [name for name in section["checks"] if name.startswith("compiled_mtla")]
    assert compiled and section["protocol"]["computed_by"] != section["protocol"][what]
    for name in compiled:
        reason = section["rows"][0]["variants"][name][NOT_RUN]
        assert "takes no decoding steps" in reason and section["checks"][name] == {NOT_RUN: reason}
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
    cfg = config(*overrides) if task == "mustc" else compose("attention=mtla", *LANGUAGE, "bench.steps=5", *overrides)
    section = measured(cfg, tmp_path)["bench"]
    assert section["checks"]["compiled_mtla"]["steps"] < 1e-3 and graphs
    for row in section["rows"]:
        ratio = next(ratio for ratio in row["ratios"] if ratio["against"] == "compiled_mtla")
        if row["what"] == "training":
            assert "takes no decoding steps" in ratio[NOT_RUN]
        else:
            assert ratio["seconds"]["median"] > 0


@pytest.mark.slow
def test_peers_and_weights_of_8_bits_are_measured_beside_the_mechanism(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    more = (
        "bench.references=[llama,llama_static,int8_mha]",
        "bench.batch=[1,2]",
        "bench.context=[3]",
        "bench.reorder=[false]",
    )
    cfg = compose(
        "attention=mha", *LANGUAGE, "bench.steps=4", "bench.what=[generation,model]", "bench.text=[8,4]", *more
    )
    rows = measured(cfg, tmp_path)["bench"]["rows"]
    assert [row["batch"] for row in rows] == [1, 2, 1, 2]
    for row in rows[:2]:
        counts = [result["parameters"] for result in row["variants"].values()]
        assert max(counts[:3]) < 1.02 * min(counts[:3])
        assert all(result["times_read"] > 0 for result in row["variants"].values())
        assert [ratio["against"] for ratio in row["ratios"] if NOT_RUN not in ratio] == [
            "llama",
            "llama_static",
            "int8_mha",
        ]
    assert "not trained" in rows[2]["variants"]["int8_mha"][NOT_RUN]


@pytest.mark.parametrize("attention", ["mha", pytest.param("tpa", marks=pytest.mark.slow)])
def test_decoding_begins_with_a_filled_cache(attention: str, tmp_path: Path) -> None:
    cfg = config("bench.what=decoding", "bench.context=[40,70]", "bench.reorder=[false]", attention=attention)
    rows = measured(cfg, tmp_path)["bench"]["rows"]
    assert [row["context"] for row in rows] == [40, 70]
    for row in rows:
        result = row["variants"][attention]
        attention_layer = variants(cfg)[0].attention(torch.float32, CPU)
        assert result["cache_bytes"]["measured"] == 4 * attention_layer.cache_elements(2, row["context"] + 6, 7)
        assert result["product_seconds"] > 0 and result["share_outside_products"] < 1
        reference = row["ratios"][-1]
        if attention == "mha":  # published: a cache that grows by concatenation
            assert reference[NOT_RUN] == "its cache grows step by step: it cannot begin with a context"
        else:
            assert reference["against"] == f"published_{attention}" and "seconds" in reference


@pytest.mark.parametrize(
    ("task", "attention"),
    [
        ("wikitext2", "mla"),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (("wmt16", "multilinear"), ("ptb", "multilinear"), ("xsum", "mtla"), ("slurp", "mla"))
        ),
    ],
)
def test_whole_models_of_every_kind_of_task(task: str, attention: str, tmp_path: Path) -> None:
    settings = ["bench.what=model", "bench.references=[published]", "bench.text=12", "bench.prefix=6"]
    small = LANGUAGE if task == "wikitext2" else (f"task={task}", *QUICK)
    (row,) = measured(compose(f"attention={attention}", *small, *settings), tmp_path)["bench"]["rows"]
    assert row["variants"][attention]["seconds"]["median"] > 0
    assert row["ratios"][0]["against"] == f"published_{attention}" and "seconds" in row["ratios"][0]


@pytest.mark.parametrize("name", ["t6/bench_training", "t6/bench_decoding"])
def test_products_are_measured_against_as_many_parameters(name: str) -> None:
    attentions = [
        variant.attention(torch.float32, torch.device("meta")) for variant in variants(compose(f"experiment={name}"))
    ]
    counts = {type(attention).__name__: sum(p.numel() for p in attention.parameters()) for attention in attentions}
    assert counts == {"TPA": 2_423_808, "MHA": 2_359_296, "PublishedTPA": 2_423_808}


@pytest.mark.parametrize("what", ["decoding", "generation"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_measured_steps_come_after_the_first_ones(what: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA the step is captured in the first ones."""
    monkeypatch.setattr(decoding, "first_steps", lambda device: WARM_UP + 2)  # on a CPU, too
    shape = Shape(what, 3, 1, 0, 20, reorder=True, context=9)
    variant = AttentionVariant("mtla", compose("attention=mtla", *LANGUAGE))
    work = workloads.workload_type(what)(variant, shape, torch.float32, torch.device(device))
    assert isinstance(work, decoding.Decoding)
    for _ in range(2):  # each round begins anew
        work.prepare()
        assert {cache.length for cache in work.caches} == {9 + WARM_UP + 2}
        assert work.captured == (device == "cuda")
        work.run()
        assert {cache.length for cache in work.caches} == {9 + WARM_UP + 2 + 20}
    assert work.cache_bytes()["measured"] == work.cache_bytes()["predicted"]


def test_a_kernel_that_was_timed_and_not_checked_gives_no_ratio() -> None:
    check = {"output": 0.0, "kernels": {"merged": ["FUSED_CUDA"], "step": ["TRITON"]}}
    assert unchecked(check, {"kernels": {"merged": ["FUSED_CUDA"], "dense": ["SDPA flash"]}}) == []
    result = {"kernels": {"merged": ["FLASH_CUDA", "FUSED_CUDA"], "window": ["FLEX", "SDPA"]}}
    assert unchecked(check, result) == ["FLASH_CUDA (merged)", "FLEX (window)"]
    assert unchecked({}, result) == []  # of a published algorithm, which is the reference

"""bench.what=kernels: what it checks and refuses without a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from attnlab.attention.ops.kernels import usable
from attnlab.bench.compare import failures
from attnlab.bench.workloads.kernels import Kernels, Reading
from attnlab.config.build import instantiate
from attnlab.run.record import NOT_RUN
from tests.bench.small import CPU, config, measured, spoil

SMALL = ("bench.what=kernels", "bench.context=[20]")
interpreted = pytest.mark.skipif(not usable(CPU), reason="needs TRITON_INTERPRET=1")


@interpreted
@pytest.mark.slow
def test_on_a_cpu_the_kernel_is_checked_and_not_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    section = measured(config(*SMALL, "bench.references=[mha,published]", "bench.prefix=3"), tmp_path)["bench"]
    (row,), checks = section["rows"], section["checks"]
    assert row["what"] == "kernels" and row["context"] == 20
    assert list(row["variants"]) == list(checks) == ["mtla triton", "mtla torch", "mha triton", "mha torch"]
    assert all(result["output"] <= result["tolerance"] == 1e-3 for result in checks.values())
    for name, result in row["variants"].items():
        if name.endswith("triton"):
            assert "timed on CUDA" in result[NOT_RUN]
        else:
            assert result["bytes"] > 0 and result["bytes_per_second"] == NOT_RUN
    assert all("timed on CUDA" in pair[NOT_RUN] for pair in row["ratios"])
    assert "mtla triton" in capsys.readouterr().out


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize(("attention", "name"), [("mqa", "latent"), ("tpa", "factor")])
def test_the_check_finds_a_wrong_kernel(attention: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip(f"attnlab.attention.ops.kernels.{name}")
    cfg = config(*SMALL, "bench.prefix=3", "bench.references=[tpa_shared_b]", attention=attention)
    settings = instantiate(cfg.bench)
    kernel, torch_alone, unserved = Kernels.lineup(cfg, settings)[:3]
    for variant in (kernel, torch_alone):
        assert not failures(Kernels.check(variant, settings, torch.float32, CPU), "kernels")
    with pytest.raises(LookupError, match="no kernel reads the cache of TPASharedB as it is"):
        Kernels.check(unserved, settings, torch.float32, CPU)
    spoil(monkeypatch, module, f"{name}_decode")
    assert failures(Kernels.check(kernel, settings, torch.float32, CPU), "kernels")


def test_what_does_not_fit_is_left_out_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Kernels.__init__

    def full(self: Kernels, variant: Reading, *rest: Any) -> None:
        if variant.name.startswith("mha"):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80 GiB\nmore lines")
        make(self, variant, *rest)

    monkeypatch.setattr(Kernels, "__init__", full)
    record = measured(config("bench.what=kernels", "bench.context=[4]", "bench.references=[mha]"), tmp_path)
    result = record["bench"]["rows"][0]["variants"]
    assert result["mha torch"] == {NOT_RUN: "CUDA out of memory. Tried to allocate 80 GiB"}
    assert result["mtla torch"]["seconds"]["median"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize(("attention", "prefix"), [("mtla", 0), ("tpa", 7)])
def test_on_a_gpu_kernels_are_timed(attention: str, prefix: int, tmp_path: Path) -> None:
    words = "hardware=gpu", "bench.dtype=bfloat16", f"bench.prefix={prefix}", "bench.batch=16", "bench.context=[4096]"
    record = measured(config(*SMALL, *words, "bench.references=[mha]", attention=attention), tmp_path)
    for result in record["bench"]["rows"][0]["variants"].values():
        assert 0 < result["bytes_per_second"] < 2e13
    assert all(NOT_RUN not in pair for pair in record["bench"]["rows"][0]["ratios"])

"""bench.what=kernels: what it checks and refuses without a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab.attention.ops.kernels import usable
from attnlab.bench.compare import failures
from attnlab.bench.workloads.kernels import Kernels, Reading
from attnlab.config.build import instantiate
from attnlab.run.record import NOT_RUN
from tests.bench.test_bench import CPU, config, measured

SMALL = ("bench.what=kernels", "bench.context=[20]", "bench.references=[mha,published]")


@pytest.mark.skipif(not usable(CPU), reason="needs TRITON_INTERPRET=1")
@pytest.mark.slow
def test_on_a_cpu_the_kernel_is_checked_and_not_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = measured(config(*SMALL, "bench.prefix=3"), tmp_path)
    (row,), checks = record["bench"]["rows"], record["bench"]["checks"]
    assert row["what"] == "kernels" and row["context"] == 20
    assert list(row["variants"]) == ["mtla triton", "mtla torch", "mha triton", "mha torch"]
    assert list(checks) == list(row["variants"])
    assert all(result["output"] <= result["tolerance"] == 1e-3 for result in checks.values())
    for name, result in row["variants"].items():
        if name.endswith("triton"):
            assert "timed on CUDA" in result[NOT_RUN]
        else:
            assert result["bytes"] > 0 and result["share_of_copy"] == result["bytes_per_second"] == NOT_RUN
    assert all("timed on CUDA" in pair[NOT_RUN] for pair in row["ratios"])
    assert "mtla triton" in capsys.readouterr().out


@pytest.mark.skipif(not usable(CPU), reason="needs TRITON_INTERPRET=1")
@pytest.mark.slow
def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnlab.attention.ops.kernels import latent

    right = latent.latent_decode

    def wrong(*args: object, **kwargs: object) -> Tensor:
        return right(*args, **kwargs) * 1.01  # type: ignore[arg-type]

    monkeypatch.setattr(latent, "latent_decode", wrong)
    cfg = config(*SMALL, attention="mqa")
    settings = instantiate(cfg.bench)
    kernel, torch_alone = Kernels.lineup(cfg, settings)[:2]
    assert failures(Kernels.check(kernel, settings, torch.float32, CPU), "kernels")
    assert not failures(Kernels.check(torch_alone, settings, torch.float32, CPU), "kernels")


def test_what_does_not_fit_is_left_out_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Kernels.__init__

    def full(self: Kernels, variant: Reading, *rest: Any) -> None:
        if variant.name.startswith("mha"):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80 GiB\nmore lines")
        make(self, variant, *rest)

    monkeypatch.setattr(Kernels, "__init__", full)
    record = measured(
        config("bench.what=kernels", "bench.context=[4]", "bench.references=[mha]", "bench.memory=false"), tmp_path
    )
    result = record["bench"]["rows"][0]["variants"]
    assert result["mha torch"] == {NOT_RUN: "CUDA out of memory. Tried to allocate 80 GiB"}
    assert result["mtla torch"]["seconds"]["median"] > 0


@pytest.mark.gpu
def test_on_a_gpu_bytes_per_second_stand_beside_a_copy(tmp_path: Path) -> None:
    words = "hardware=gpu", "bench.dtype=bfloat16", "bench.prefix=0", "bench.batch=16", "bench.context=[4096]"
    record = measured(config(*SMALL, *words), tmp_path)
    for result in record["bench"]["rows"][0]["variants"].values():
        assert 0 < result["share_of_copy"] < 1.5
    assert all(NOT_RUN not in pair for pair in record["bench"]["rows"][0]["ratios"])

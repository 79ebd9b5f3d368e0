"""bench.what=kernels of tensor product attention: what is checked, and that a wrong kernel is found."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from attnlab.attention.ops.kernels import usable
from attnlab.bench.compare import failures
from attnlab.bench.workloads.kernels import Kernels
from attnlab.config.build import instantiate
from attnlab.run.record import NOT_RUN
from tests.bench.test_bench import CPU, config, measured

SMALL = ("bench.what=kernels", "bench.context=[20]", "bench.prefix=3", "bench.references=[tpa_shared_b]")


@pytest.mark.skipif(not usable(CPU), reason="needs TRITON_INTERPRET=1")
@pytest.mark.slow
def test_the_check_finds_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnlab.attention.ops.kernels import factor

    cfg = config(*SMALL, attention="tpa")
    settings = instantiate(cfg.bench)
    kernel, torch_alone, unserved = Kernels.lineup(cfg, settings)[:3]
    assert not failures(Kernels.check(kernel, settings, torch.float32, CPU), "kernels")
    assert not failures(Kernels.check(torch_alone, settings, torch.float32, CPU), "kernels")
    with pytest.raises(LookupError, match="no kernel reads the cache of TPASharedB in a step"):
        Kernels.check(unserved, settings, torch.float32, CPU)
    right = factor.factor_decode

    def wrong(*args: object, **kwargs: object) -> Tensor:
        return right(*args, **kwargs) * 1.01  # type: ignore[arg-type]

    monkeypatch.setattr(factor, "factor_decode", wrong)
    assert failures(Kernels.check(kernel, settings, torch.float32, CPU), "kernels")


@pytest.mark.gpu
def test_on_a_gpu_bytes_per_second_stand_beside_a_copy(tmp_path: Path) -> None:
    words = "hardware=gpu", "bench.dtype=bfloat16", "bench.batch=16", "bench.context=[4096]"
    record = measured(config(*SMALL[:1], "bench.references=[mha]", *words, attention="tpa"), tmp_path)
    for result in record["bench"]["rows"][0]["variants"].values():
        assert 0 < result["share_of_copy"] < 1.5
    assert all(NOT_RUN not in pair for pair in record["bench"]["rows"][0]["ratios"])

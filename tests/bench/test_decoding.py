"""Workloads of decoding: their first steps, on CUDA those in which the step is captured."""

import pytest
import torch

from attnlab.bench.settings import Shape
from attnlab.bench.variants import AttentionVariant
from attnlab.bench.workloads import decoding, workload_type
from attnlab.config.check import compose
from attnlab.decoding.steps import WARM_UP

SMALL = "task=wikitext2", "attention=mtla", "task.model.d_model=32", "task.model.num_layers=2", "mode=bench"


@pytest.mark.parametrize("what", ["decoding", "generation"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_measured_steps_come_after_the_first_ones(what: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "first_steps", lambda device: WARM_UP + 2)  # on a CPU, too
    shape = Shape(what, 3, 1, 0, 20, reorder=True, context=9)
    work = workload_type(what)(AttentionVariant("mtla", compose(*SMALL)), shape, torch.float32, torch.device(device))
    assert isinstance(work, decoding.Decoding)
    for _ in range(2):  # each round begins anew
        work.prepare()
        assert {cache.length for cache in work.caches} == {9 + WARM_UP + 2}
        assert work.captured == (device == "cuda")
        work.run()
        assert {cache.length for cache in work.caches} == {9 + WARM_UP + 2 + 20}
    assert work.cache_bytes()["measured"] == work.cache_bytes()["predicted"]

"""What is said about memory before a training begins, against what a real step holds."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

import pytest
import torch
from torch import Tensor, nn

from attnlab.attention import Attention
from attnlab.config.build import CONF
from attnlab.config.check import compose
from attnlab.errors import ConfigError
from attnlab.modes import describe
from attnlab.tasks import memory
from attnlab.tasks.base import Task, task_of
from attnlab.training import memory as steps
from attnlab.training.memory import Estimate, LiveTensors, refusal

TINY = ["hardware=cpu", "task.model.d_model=32", "task.attention_heads=2"]
LINES = ["task=wikitext2", *TINY, "task.model.num_layers=2", "task.data.batch_size=4", "task.data.window=32"]
SENTENCES = [
    *TINY, "task.model.encoder.num_layers=1", "task.model.encoder.ffn_dim=48", "task.model.decoder.num_layers=1",
    "task.model.decoder.ffn_dim=48",
]  # fmt: skip
RUNS = {
    "mha": [*LINES, "attention=mha"],
    "mla": [*LINES, "attention=mla"],
    "mtla": [*LINES, "attention=mtla"],
    "tpa": [*LINES, "attention=tpa"],
    "translation": ["task=wmt16", "attention=mla", *SENTENCES, "task.data.max_input_frames=20"],
    "speech": ["task=mustc", *SENTENCES, "task.train.batch.frames=300", "task.data.max_input_frames=100"],
    "conformer": ["task=slurp", *SENTENCES, "task.train.batch.frames=300", "task.data.max_input_frames=100"],
    "images": ["task=imagenet", "hardware=cpu", "task.model.depth=2", "task.data.batch_size=5", "task.ema_decay=0"],
}
QUICK = ("mtla",)
TOLERANCE = {"speech": 0.1}  # relative; the backward pass of a convolution has other temporaries without storage


def real_peak(task: Task, size: int) -> tuple[int, int]:
    """Bytes of the tensors that are alive at once in three real steps, and those of a model without gradients."""
    torch.manual_seed(0)
    with LiveTensors() as alive:
        model = task.build().train()
        for value in (*model.parameters(), *model.buffers()):
            alive.count(value)
        weights = alive.live
        loss: Callable[[], Tensor] = task.rehearsal(model, size, torch.device("cpu"))
        optimizer = task.optimizer_of(model)
        for _ in range(3):
            alive.peak = alive.live
            value = loss()
            optimizer.zero_grad()
            value.backward()
            del value
            optimizer.step()
    return alive.peak, weights


@pytest.mark.parametrize("name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in RUNS])
def test_the_estimate_is_what_a_real_step_holds(name: str) -> None:
    task: Task = task_of(compose(*RUNS[name]))
    found = memory.needed(task)
    assert found is not None
    peak, weights = real_peak(task, memory.largest_batch(task))
    assert found.weights == pytest.approx(weights, rel=0.01)
    assert found.weights + found.gradients + found.optimizer + found.activations == pytest.approx(
        peak, rel=TOLERANCE.get(name, 0.02)
    )
    assert found.gradients > 0.9 * found.weights and found.optimizer == pytest.approx(2 * found.gradients, rel=0.01)


DEEP = {
    "mha": [*LINES, "attention=mha", "task.model.num_layers=5"],
    "again": [*LINES, "attention=mla", "task.model.num_layers=4", "hardware.gradient_checkpointing=true"],
    "half": [*LINES, "attention=tpa", "task.model.num_layers=4", "hardware.precision=bf16-mixed"],
    "speech": [*RUNS["speech"], "task.model.encoder.num_layers=4", "task.model.decoder.num_layers=5"],
    "conformer": [*RUNS["conformer"], "task.model.encoder.num_layers=4"],
    "translation": [*RUNS["translation"], "task.model.encoder.num_layers=3", "task.model.decoder.num_layers=4"],
    "images": [*RUNS["images"], "task.model.depth=5"],
    "images again": [*RUNS["images"], "task.model.depth=4", "hardware.gradient_checkpointing=true"],
    **{
        path.stem: [*LINES, f"attention={path.stem}", "task.model.num_layers=7"]
        for path in (CONF / "attention").glob("*.yaml")
        if path.stem != "mha"
    },
}


@pytest.mark.parametrize("name", [x if x == "mha" else pytest.param(x, marks=pytest.mark.slow) for x in DEEP])
def test_layers_of_one_kind_are_run_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found from two layers of a kind is what all of them hold."""
    task: Task = task_of(compose(*DEEP[name]))
    calls: list[type] = []
    real = Attention.forward

    def counted(self: Attention, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(type(self))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Attention, "forward", counted)
    found, some = memory.needed(task), len(calls)
    monkeypatch.setattr(steps, "estimate", functools.partial(steps.estimate, whole=True))
    whole = memory.needed(task)
    assert found is not None and whole is not None
    assert (found.weights, found.gradients, found.optimizer) == (whole.weights, whole.gradients, whole.optimizer)
    assert found.activations == pytest.approx(whole.activations, rel=0.005)
    if name == "mha":
        assert (some, len(calls) - some) == (3, 5)


def test_a_description_has_the_memory() -> None:
    record: dict[str, Any] = {"kv_cache": {}}
    cfg = compose(*LINES, "attention=mha", "mode=describe", "hardware=gpu")
    describe.run(cfg, record, None)
    found = memory.needed(task_of(cfg))
    assert found is not None and record["memory"] == found.describe()
    assert record["memory"]["activations_mib"] > 0.5


@pytest.mark.slow
def test_sizes_that_depend_on_the_words_are_not_estimated(caplog: pytest.LogCaptureFixture) -> None:
    record: dict[str, Any] = {"kv_cache": {}}
    words = ("task=wikitext103", "scale=paper", "attention=multilinear", "mode=describe", "hardware=gpu")
    describe.run(compose(*words), record, None)
    assert "memory" not in record and "adaptive softmax" in caplog.text


@pytest.mark.slow
def test_each_switch_changes_what_it_says() -> None:
    plain = memory.needed(task_of(compose(*LINES)))
    assert plain is not None

    def changed(*overrides: str) -> Estimate:
        found = memory.needed(task_of(compose(*LINES, *overrides)))
        assert found is not None
        return found

    assert changed("task.data.batch_size=8").activations > 1.8 * plain.activations
    again = changed("hardware.gradient_checkpointing=true", "task.model.num_layers=8")
    assert again.activations < 2 * plain.activations
    assert changed("hardware.precision=bf16-mixed").activations < 0.9 * plain.activations
    assert changed("hardware.precision=bf16-true").weights == pytest.approx(plain.weights / 2, rel=0.02)
    assert changed("hardware.devices=2").gradients == 2 * plain.gradients
    assert changed("callbacks=ema").weights == 2 * plain.weights


class OnCuda:
    """A CUDA device with some GiB free, as far as `check_memory` asks about it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: float, found: Estimate) -> None:
        monkeypatch.setattr(memory, "device_of", lambda cfg: torch.device("cuda", 0))
        monkeypatch.setattr(memory, "needed", lambda task: found)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free * 2**30), 80 * 2**30))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")


FOUND = Estimate(weights=2**30, gradients=2**30, optimizer=2 * 2**30, activations=16 * 2**30, cache=3 * 2**30)


def test_one_line_says_what_a_training_needs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    OnCuda(monkeypatch, 60, FOUND)
    record: dict[str, Any] = {}
    memory.check_memory(task_of(compose(*LINES)), record)
    said = "weights 1.00, gradients 1.00, optimizer state 2.00, activations 16.00, decoding cache 3.00"
    assert caplog.messages == [f"memory: about 20.00 GiB ({said}); free: 60.00 of 80.00 GiB"]
    assert record["memory"]["total_mib"] == 20480


def test_a_test_needs_weights_and_caches(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    OnCuda(monkeypatch, 0.001, FOUND)
    task: Task = task_of(compose(*LINES))
    trained = memory.needed_for_test(task)
    record: dict[str, Any] = {}
    assert trained is not None
    memory.check_memory(task, record, training=False)
    model = task.build()
    assert trained.weights == sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    assert trained.total == trained.weights + trained.cache
    assert trained.cache == task.decoding_cache(model, torch.float32) > 0
    assert record["memory"] == trained.describe() and caplog.messages[0].startswith("memory: about 0.0")


def test_what_cannot_fit_is_refused_with_the_keys_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    OnCuda(monkeypatch, 15, FOUND)
    with pytest.raises(ConfigError) as caught:
        memory.check_memory(task_of(compose(*LINES)), {})
    assert "and H200 has 15.00 GiB free: set task.data.batch_size (below 4; an update stays as it is), " in str(
        caught.value
    )
    assert "hardware.gradient_checkpointing=true (slower), hardware.precision=bf16-mixed" in str(caught.value)
    OnCuda(monkeypatch, 3, FOUND)
    with pytest.raises(ConfigError, match="without any batch it is too much already: take a smaller model"):
        memory.check_memory(task_of(compose(*LINES)), {})


def test_a_compiled_run_is_warned(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    OnCuda(monkeypatch, 15, FOUND)
    memory.check_memory(task_of(compose(*LINES, "hardware.compile=true")), {})
    assert any("need less than this" in message for message in caplog.messages)


def test_an_estimate_is_refused_well_above_what_is_free() -> None:
    assert refusal(FOUND, 19 * 2**30, "X", {"a": "b"}) is None
    assert refusal(FOUND, 18 * 2**30, "X", {"a": "b"}) is not None


def test_a_limit_ends_a_step() -> None:
    layer = nn.Linear(100, 100)
    with pytest.raises(torch.OutOfMemoryError, match="more than"), LiveTensors(limit=10_000):
        layer(torch.ones(1000, 100))

"""The memory of a training and the search for the largest batch, against what a real update holds."""

import logging
from pathlib import Path
from typing import Any

import attnlab.torchvision_schemas  # noqa: F401  (before lightning)

import pytest
import torch

from attnlab.config.check import compose
from attnlab.errors import ConfigError
from attnlab.modes import describe
from attnlab.run.identity import recipe
from attnlab.tasks import memory
from attnlab.tasks.base import Trains, task_of
from attnlab.tasks.memory import LiveTensors, Memory, estimate, largest, rehearse, with_largest_batch

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
    "again": [*LINES, "attention=mla", "hardware.gradient_checkpointing=true"],
    "translation": ["task=wmt16", "attention=mla", *SENTENCES, "task.data.max_input_frames=20"],
    "speech": ["task=mustc", *SENTENCES, "task.train.batch.frames=300", "task.data.max_input_frames=100"],
    "conformer": ["task=slurp", *SENTENCES, "task.train.batch.frames=300", "task.data.max_input_frames=100"],
    "images": ["task=imagenet", "hardware=cpu", "task.model.depth=2", "task.data.batch_size=5", "task.ema_decay=0"],
}
QUICK = ("mtla",)
TOLERANCE = {"speech": 0.1}  # relative; the backward pass of a convolution has other temporaries without storage


def real_peak(task: Trains, size: int) -> tuple[int, int]:
    """Bytes of the tensors that are alive at once in three real steps of an initialised model, and of its weights."""
    with LiveTensors() as live:
        model = task.build().train()
        for value in (*model.parameters(), *model.buffers()):
            live.count(value)
        weights = live.live
        if task.cfg.hardware.gradient_checkpointing:
            memory.checkpoint_layers(model)
        loss = task.rehearsal(model, size, torch.device("cpu"))
        optimizer = task.optimizer_of(model)
        for _ in range(3):
            live.peak = live.live
            value = loss()
            optimizer.zero_grad()
            value.backward()
            del value
            optimizer.step()
    return live.peak, weights


@pytest.mark.parametrize("name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in RUNS])
def test_the_estimate_is_what_a_real_step_holds(name: str) -> None:
    task: Trains = task_of(compose(*RUNS[name]), Trains)
    peak, weights = real_peak(task, memory.configured_batch(task))
    needed = estimate(task)
    assert needed is not None and needed.weights == pytest.approx(weights, rel=0.01)
    assert needed.update == pytest.approx(peak, rel=TOLERANCE.get(name, 0.02))
    assert needed.gradients > 0.9 * needed.weights
    assert needed.optimizer_state == pytest.approx(2 * needed.gradients, rel=0.01)


@pytest.mark.slow
def test_each_switch_changes_the_estimate() -> None:
    def needed(*overrides: str) -> Memory:
        memory = estimate(task_of(compose(*LINES, *overrides), Trains))
        assert memory is not None
        return memory

    plain = needed()
    assert needed("task.data.batch_size=8").activations > 1.8 * plain.activations
    assert needed("hardware.gradient_checkpointing=true", "task.model.num_layers=8").activations < 2 * plain.activations
    assert needed("hardware.precision=bf16-mixed").activations < 0.9 * plain.activations
    assert needed("hardware.precision=bf16-true").weights == pytest.approx(plain.weights / 2, rel=0.02)
    assert needed("hardware.devices=2").gradients == 2 * plain.gradients
    assert needed("callbacks=ema").weights == 2 * plain.weights


def test_a_description_has_the_memory() -> None:
    record: dict[str, Any] = {"kv_cache": {}}
    cfg = compose(*LINES, "attention=mha", "mode=describe", "hardware=gpu")
    describe.run(cfg, record, None)
    needed = estimate(task_of(cfg, Trains))
    assert needed is not None and record["memory"] == needed.describe()
    assert list(record["memory"]) == [
        f"{name}_mib"
        for name in ("weights", "gradients", "optimizer_state", "activations", "decoding_cache", "total")
    ]  # fmt: skip


@pytest.mark.slow
def test_sizes_that_depend_on_the_words_are_not_estimated(caplog: pytest.LogCaptureFixture) -> None:
    record: dict[str, Any] = {"kv_cache": {}}
    words = ("task=wikitext103", "scale=paper", "attention=multilinear", "mode=describe", "hardware=gpu")
    describe.run(compose(*words), record, None)
    assert "memory" not in record and "not estimated" in caplog.text


# --- the check on a GPU ---------------------------------------------------------------------------------------------

NEEDED = Memory(
    weights=2**30, gradients=2**30, optimizer_state=2 * 2**30, activations=16 * 2**30, decoding_cache=3 * 2**30
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """gpu(free): a CUDA device with `free` GiB, on which an update of NEEDED runs or does not fit."""

    def make(free: float) -> None:
        fits = NEEDED.update <= free * 2**30
        monkeypatch.setattr(memory, "device_of", lambda cfg: torch.device("cuda", 0))
        monkeypatch.setattr(memory, "rehearse", lambda *args, fake=False: NEEDED if fits or fake else None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free * 2**30), 80 * 2**30))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")

    return make


def test_the_memory_of_a_run_is_recorded(gpu: Any) -> None:
    """A test needs weights and caches alone."""
    task: Trains = task_of(compose(*LINES), Trains)
    record: dict[str, Any] = {}
    gpu(60)
    memory.check_memory(task, record)
    assert record["memory"] == NEEDED.describe() and record["memory"]["total_mib"] == 20480
    gpu(0.001)
    memory.check_memory(task, record, training=False)
    model = task.build()
    weights = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    assert record["memory"] == Memory(weights, decoding_cache=task.decoding_cache(model, torch.float32)).describe()


def test_what_does_not_fit_is_refused_with_the_keys_to_lower(gpu: Any, caplog: pytest.LogCaptureFixture) -> None:
    gpu(15)
    keys = "task.data.batch_size .*hardware.gradient_checkpointing=true .*hardware.precision=bf16-mixed"
    with pytest.raises(ConfigError, match=f"H200 has 15.00 GiB free.*{keys}"):
        memory.check_memory(task_of(compose(*LINES), Trains), {})
    memory.check_memory(task_of(compose(*LINES, "hardware.compile=true"), Trains), {})
    assert "need less than this" in caplog.text
    gpu(3)
    with pytest.raises(ConfigError, match="without any batch: take a smaller model"):
        memory.check_memory(task_of(compose(*LINES), Trains), {})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_allocator_decides() -> None:
    task, device = task_of(compose(*LINES, "hardware=gpu"), Trains), torch.device("cuda", 0)
    needed, estimated = rehearse(task, 64, device), rehearse(task, 64, device, fake=True)
    assert needed is not None and estimated is not None and needed.weights == estimated.weights
    assert needed.update > 0.95 * estimated.update
    assert rehearse(task, 2**24, device) is None
    assert rehearse(task, 64, device) is not None


# --- hardware.find_batch --------------------------------------------------------------------------------------------

SEARCH = [
    "task=wikitext2", "hardware=cpu", "task.model.d_model=16", "task.attention_heads=2", "task.model.num_layers=1",
    "task.data.window=32", "task.train.batch.tokens=2048", "task.data.batch_size=1", "hardware.find_batch=true",
]  # fmt: skip


@pytest.mark.parametrize(
    ("least", "most", "room"),
    [(1, 64, 100), (1, 64, 64), (1, 64, 13), (1, 64, 1), (1, 64, 0), (1, 1, 5), (100, 4000, 99)],
)
def test_the_search_is_exact_where_sizes_are_small(least: int, most: int, room: int) -> None:
    expected = min(room, most) if room >= least else None
    assert largest(lambda size: size <= room, least, most) == expected


@pytest.mark.parametrize("room", [17, 155, 385, 3999, 5000])
def test_a_long_search_ends_close_below_the_limit(room: int) -> None:
    size = largest(lambda size: size <= room, 1, 4000)
    assert size is not None and (room * 0.93 - 1 <= size <= room or size == 4000)


@pytest.mark.slow
def test_the_searched_batch_is_used_and_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    words = [*SEARCH, f"cache_dir='{tmp_path}'", "hardware.find_batch_gib=0.006"]
    configured, record = compose(*words), dict[str, Any]()
    cfg = with_largest_batch(task_of(configured, Trains), record)
    size = cfg.task.data.batch_size
    assert 1 < size < 64 and configured.task.data.batch_size == 1 and recipe(cfg) == recipe(configured)
    assert record["found_batch"] == {"key": "task.data.batch_size", "size": size}
    needed = estimate(task_of(cfg, Trains))
    assert needed is not None and 0.7 * 0.006 < needed.total / 2**30 <= 0.0063
    caplog.clear()
    assert with_largest_batch(task_of(compose(*words, "seed=2"), Trains), {}).task.data.batch_size == size
    assert len(caplog.messages) == 1  # nothing is tried again
    (path,) = (tmp_path / "batches").glob("*/index.json")
    path.write_text("{")
    assert with_largest_batch(task_of(configured, Trains), {}).task.data.batch_size == size
    for other in ("task.model.num_layers=2", "hardware.gradient_checkpointing=true"):
        with_largest_batch(task_of(compose(*words, other), Trains), {})
    assert len([*(tmp_path / "batches").glob("*/index.json")]) == 3


def test_a_search_without_memory_or_room_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hardware.find_batch_gib"):
        with_largest_batch(task_of(compose(*SEARCH), Trains), {})
    small = compose(*SEARCH, f"cache_dir='{tmp_path}'", "hardware.find_batch_gib=0.0001")
    with pytest.raises(ConfigError, match="task.data.batch_size=1 fits"):
        with_largest_batch(task_of(small, Trains), {})
